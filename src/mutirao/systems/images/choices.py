"""Names of networks, backbones, heads and stain methods; kept apart from the code, which imports torch."""

from typing import Literal

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.registry import is_dotted

Trainable = Literal["head", "last_block", "all"]
Depth = Literal["features", "maps", "pixels"]

NETWORK_NAMES = ("cnn", "small", "deep", "mobilenet")
BACKBONE_NAMES = ("efficientnet_lite0", "resnet18")
# prefixes: a model of timm, and a file with an exported network
TIMM = "timm:"
FILE = "file:"
BACKBONE_CHOICES = f"{', '.join(BACKBONE_NAMES)}, {TIMM}NAME or {FILE}PATH"
# What the frozen part of a backbone gives, by what is trained.
DEPTHS: dict[Trainable, Depth] = {"head": "features", "last_block": "maps", "all": "pixels"}
BAG_HEADS = ("mean", "max", "abmil")  # heads that classify a slide by all of its tiles
HEADS = ("linear", *BAG_HEADS)
STAINS = ("none", "macenko", "reinhard")
AUGMENTS = ("none", "stain")
ELSEWHERE = "none"  # the setting `data` of a server without images; the sites have them


def check_network(name: str) -> None:
    """Raise ConfigError for a network that is neither in the list nor of the form `package.module:function`."""
    if name not in NETWORK_NAMES and not is_dotted(name):
        raise ConfigError(f"model: {name!r} is not a choice{nearest(name, NETWORK_NAMES)}; or package.module:function")


def check_backbone(name: str, *networks: str) -> None:
    """Raise ConfigError for an unknown backbone, before anything is loaded; `networks` are accepted, too."""
    if name not in (*BACKBONE_NAMES, *networks) and not (name.startswith((TIMM, FILE)) and name.partition(":")[2]):
        close = nearest(name, (*BACKBONE_NAMES, *networks))
        raise ConfigError(f"body: {name!r} is not a choice{close}; or {TIMM}NAME, or {FILE}PATH")


def check_trainable(name: str, trainable: str) -> None:
    """Raise ConfigError for parts that cannot be trained: any part of a file, the last block of timm's models."""
    if name.startswith(FILE) and trainable != "head":
        raise ConfigError(f"trainable={trainable}: a backbone from a file stays as it is; use head")
    if name.startswith(TIMM) and trainable == "last_block":
        raise ConfigError(
            "trainable=last_block: timm does not say which block of a network is the last; use head or all"
        )
