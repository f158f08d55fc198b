"""What networks for pictures, and ways to prepare pictures, can be asked for by name; those themselves need torch."""

from typing import Literal

Trainable = Literal["head", "last_block", "all"]
Depth = Literal["features", "maps", "pixels"]

NETWORK_NAMES = ("cnn", "small")
BODY_NAMES = ("efficientnet_lite0", "resnet18")
# How far the frozen part of a body goes.
DEPTHS: dict[Trainable, Depth] = {"head": "features", "last_block": "maps", "all": "pixels"}

BAG_HEADS = ("mean", "max", "abmil")  # heads that judge a slide by all of its tiles
HEADS = ("linear", *BAG_HEADS)
STAINS = ("none", "macenko", "reinhard")
AUGMENTS = ("none", "stain")
