"""Models for images: a small network from scratch, or a pretrained backbone of which a part is trained."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mutirao.errors import ConfigError
from mutirao.systems.images.base import statistics_fingerprint, weights_fingerprint
from mutirao.systems.images.choices import (
    BACKBONE_CHOICES,
    BACKBONE_NAMES,
    DEPTHS,
    NETWORK_NAMES,
    Trainable,
    check_backbone,
    check_trainable,
)
from mutirao.systems.images.features import Extractor, random_views
from mutirao.systems.images.heads import OneView, make_head
from mutirao.systems.images.networks import NETWORKS
from mutirao.training.plain import Transform


@dataclass(frozen=True)
class TrainingPlan:
    """How images are prepared before training, and which part of the model is trained."""

    extract: Extractor
    trainable: Trainable
    transform: Transform | None = None  # augmentation of each batch
    head: str = "linear"  # or a head for whole slides

    @classmethod
    def of(cls, config: Any) -> "TrainingPlan":
        """Build the plan from a recipe's settings; ConfigError if they do not fit each other."""
        check_backbone(config.body, *NETWORK_NAMES)
        scratch = config.body in NETWORK_NAMES
        trainable: Any = config.trainable
        if trainable == "auto":
            trainable = "all" if scratch else "head"
        if scratch and trainable != "all":
            raise ConfigError(
                f"trainable={trainable}: body={config.body} has no pretrained part to keep; "
                f"use all, or body={BACKBONE_NAMES[0]}"
            )
        if scratch and config.weights:
            raise ConfigError(f"weights: body={config.body} begins from scratch; it is for {BACKBONE_CHOICES}")
        check_trainable(config.body, trainable)
        extract = Extractor(config.body, config.weights, config.views, DEPTHS[trainable], config.cache)
        if scratch:
            return cls(replace(extract, size=config.side), trainable)
        # A backbone that is trained sees new views in each epoch. DP-SGD needs fixed ones: it clips by sample.
        if trainable == "all" and config.views > 1 and config.privacy.name != "dpsgd":
            return cls(replace(extract, views=1), trainable, random_views)
        return cls(extract, trainable)

    def prepared(self, stain: str, augment: str, head: str) -> "TrainingPlan":
        """The plan with stain normalization, augmentation and another head; ConfigError if they do not fit it."""
        if augment != "none" and (self.transform is not None or self.extract.views < 2):
            raise ConfigError(f"augment={augment}: it needs cached views; use trainable=head and views=2")
        return replace(self, extract=replace(self.extract, stain=stain, augment=augment), head=head)

    def model(self, classes: int) -> nn.Module:
        """The module that is trained and sent; it takes one of an image's views at a time."""
        backbone = self.extract.backbone
        side = self.extract.size
        if backbone in NETWORK_NAMES:
            return nn.Sequential(OneView(), *NETWORKS[backbone]((3, side, side), classes).children())
        return make_head(self.head, self.extract.network, self.trainable, classes)

    def training(self, config: Any) -> dict[str, Any]:
        """Arguments of the Trainer besides the settings that all recipes share."""
        return {"transform": self.transform, "keep_optimizer": config.keep_optimizer}

    def agreed(self) -> dict[str, str]:
        """Digests that must be the same at all clients, as arguments of the Trainer."""
        return {"backbone": self.frozen(), "preprocessing": self.extract.preprocessing()}

    def frozen(self) -> str:
        """Fingerprint of the part of the backbone that is not sent; empty if there is none."""
        if self.extract.backbone in NETWORK_NAMES:
            return ""
        backbone = self.extract.network
        if self.trainable == "all":
            return statistics_fingerprint(backbone)
        return weights_fingerprint(backbone if self.trainable == "head" else backbone.trunk)
