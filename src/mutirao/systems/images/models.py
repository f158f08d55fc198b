"""The model of a set of pictures: a small network from scratch, or a pretrained backbone of which a part is trained."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mutirao.errors import ConfigError
from mutirao.systems.images.bag_heads import make_head
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
from mutirao.systems.images.features import Extractor, draw_views
from mutirao.systems.images.heads import OneView
from mutirao.systems.images.networks import NETWORKS
from mutirao.training.plain import Transform


@dataclass(frozen=True)
class Plan:
    """What is done with a picture before training, and what is trained."""

    extract: Extractor
    trainable: Trainable
    transform: Transform | None = None  # of pictures whenever they are trained on
    head: str = "linear"  # or one for whole slides

    @classmethod
    def of(cls, config: Any) -> "Plan":
        """The plan that the settings of a recipe describe, from `body` to `cache`, if they fit each other."""
        check_backbone(config.body, *NETWORK_NAMES)
        scratch = config.body in NETWORK_NAMES
        trainable: Any = ("all" if scratch else "head") if config.trainable == "auto" else config.trainable
        if scratch and trainable != "all":
            raise ConfigError(
                f"trainable={trainable}: body={config.body} has no pretrained part to keep; "
                f"use all, or body={BACKBONE_NAMES[0]}"
            )
        if scratch and config.weights:
            raise ConfigError(f"weights: body={config.body} begins from scratch; they are for {BACKBONE_CHOICES}")
        check_trainable(config.body, trainable)
        extract = Extractor(config.body, config.weights, config.views, DEPTHS[trainable], config.cache)
        if scratch:
            return cls(replace(extract, size=config.side), trainable)
        # A backbone that is trained sees new views each time; DP-SGD bounds a sample in views that stay.
        drawn = trainable == "all" and config.views > 1 and config.privacy.name != "dpsgd"
        return cls(replace(extract, views=1), trainable, draw_views) if drawn else cls(extract, trainable)

    def prepared(self, stain: str, augment: str, head: str) -> "Plan":
        """The plan with stains normalised, views augmented and another head, if these fit it."""
        if augment != "none" and (self.transform is not None or self.extract.views < 2):
            raise ConfigError(f"augment={augment}: it is done to views that are kept; use trainable=head and views=2")
        return replace(self, extract=replace(self.extract, stain=stain, augment=augment), head=head)

    def model(self, classes: int) -> nn.Module:
        """What is trained, and travels; of a picture's views it sees one at a time."""
        backbone, side = self.extract.body, self.extract.size
        if backbone in NETWORK_NAMES:
            return nn.Sequential(OneView(), *NETWORKS[backbone]((3, side, side), classes).children())
        return make_head(self.head, self.extract.network, self.trainable, classes)

    def training(self, config: Any) -> dict[str, Any]:
        """What a Trainer is told besides the settings that all recipes share."""
        return {"transform": self.transform, "keep_optimizer": config.keep_optimizer}

    def agreed(self) -> dict[str, str]:
        """What parties must have in common of it, by digest."""
        return {"backbone": self.frozen(), "preprocessing": self.extract.preprocessing()}

    def frozen(self) -> str:
        """What the part of a backbone that does not travel is known by; empty if there is none."""
        if self.extract.body in NETWORK_NAMES:
            return ""
        backbone = self.extract.network
        if self.trainable == "all":
            return statistics_fingerprint(backbone)
        return weights_fingerprint(backbone if self.trainable == "head" else backbone.trunk)
