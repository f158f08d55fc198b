"""The model of a set of pictures: a small network from scratch, or a pretrained body of which a part is trained."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mutirao.errors import ConfigError
from mutirao.images.bodies import weights_fingerprint
from mutirao.images.features import Extractor
from mutirao.images.heads import OneView, trained_part
from mutirao.images.names import BODY_NAMES, DEPTHS, NETWORK_NAMES, Trainable
from mutirao.images.networks import NETWORKS


@dataclass(frozen=True)
class Plan:
    """What is done with a picture before training, and what is trained."""

    extract: Extractor
    trainable: Trainable

    @classmethod
    def of(cls, config: Any) -> "Plan":
        """The plan that the settings of a recipe describe, from `body` to `cache`, if they fit each other."""
        scratch = config.body in NETWORK_NAMES
        trainable: Any = ("all" if scratch else "head") if config.trainable == "auto" else config.trainable
        if scratch and trainable != "all":
            raise ConfigError(
                f"trainable={trainable}: body={config.body} has no pretrained part to keep; "
                f"use all, or body={BODY_NAMES[0]}"
            )
        if scratch and config.weights:
            raise ConfigError(f"weights: body={config.body} begins from scratch; they are for {', '.join(BODY_NAMES)}")
        extract = Extractor(config.body, config.weights, config.views, DEPTHS[trainable], config.cache)
        return cls(replace(extract, size=config.side) if scratch else extract, trainable)

    def model(self, classes: int) -> nn.Module:
        """What is trained, and travels; of a picture's views it sees one at a time."""
        body, side = self.extract.body, self.extract.size
        if body in NETWORK_NAMES:
            return nn.Sequential(OneView(), *NETWORKS[body]((3, side, side), classes).children())
        return trained_part(self.extract.network, self.trainable, classes)

    def agreed(self) -> dict[str, str]:
        """What parties must have in common of it, by digest."""
        return {"body": self.frozen(), "preprocessing": self.extract.preprocessing()}

    def frozen(self) -> str:
        """What the part of a body that does not travel is known by; empty if all travels."""
        if self.trainable == "all":
            return ""
        body = self.extract.network
        return weights_fingerprint(body if self.trainable == "head" else body.trunk)
