"""What networks for pictures, and ways to prepare pictures, can be asked for by name; those themselves need torch."""

from typing import Literal

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.registry import is_dotted

Trainable = Literal["head", "last_block", "all"]
Depth = Literal["features", "maps", "pixels"]

NETWORK_NAMES = ("cnn", "small", "deep", "mobilenet")
BACKBONE_NAMES = ("efficientnet_lite0", "resnet18")
TIMM, FILE = "timm:", "file:"  # before the name of a network of timm's, and the path of a network in a file
BACKBONE_CHOICES = f"{', '.join(BACKBONE_NAMES)}, {TIMM}NAME or {FILE}PATH"
# How far the frozen part of a backbone goes.
DEPTHS: dict[Trainable, Depth] = {"head": "features", "last_block": "maps", "all": "pixels"}
BAG_HEADS = ("mean", "max", "abmil")  # heads that judge a slide by all of its tiles
HEADS = ("linear", *BAG_HEADS)
STAINS = ("none", "macenko", "reinhard")
AUGMENTS = ("none", "stain")
ELSEWHERE = "none"  # what `data` is where a party has no pictures of its own: a server whose sites hold them all


def check_network(name: str) -> None:
    """Refuse a network that is neither known by name nor of the user's own, `package.module:function`."""
    if name not in NETWORK_NAMES and not is_dotted(name):
        raise ConfigError(f"model: {name!r} is not a choice{nearest(name, NETWORK_NAMES)}; or package.module:function")


def check_backbone(name: str, *more: str) -> None:
    """Refuse a backbone that nobody knows, before anything is loaded; `more` are names that will do, too."""
    if name not in (*BACKBONE_NAMES, *more) and not (name.startswith((TIMM, FILE)) and name.partition(":")[2]):
        close = nearest(name, (*BACKBONE_NAMES, *more))
        raise ConfigError(f"body: {name!r} is not a choice{close}; or {TIMM}NAME, or {FILE}PATH")


def check_trainable(name: str, trainable: str) -> None:
    """Refuse to train what of a backbone cannot be: of a file nothing, of timm's networks all or nothing."""
    if name.startswith(FILE) and trainable != "head":
        raise ConfigError(f"trainable={trainable}: a backbone from a file stays as it is; use head")
    if name.startswith(TIMM) and trainable == "last_block":
        raise ConfigError(
            "trainable=last_block: what the last block of timm's network is, nobody says; use head or all"
        )
