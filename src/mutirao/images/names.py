"""What networks for pictures can be asked for by name; those themselves need torch."""

from typing import Literal

Trainable = Literal["head", "last_block", "all"]
Depth = Literal["features", "maps", "pixels"]

NETWORK_NAMES = ("cnn", "small")
BODY_NAMES = ("efficientnet_lite0", "resnet18")
# How far the frozen part of a body goes.
DEPTHS: dict[Trainable, Depth] = {"head": "features", "last_block": "maps", "all": "pixels"}
ELSEWHERE = "none"  # what `data` is where a party has no pictures of its own: a server whose sites hold them all
