"""Backbones by timm: any of its networks by name, with its own weights, with a file of them, or from a model hub.

timm is imported when it is asked for. Its networks come without a classifier, and normalise as their makers did.
"""

import importlib
import logging
import urllib.parse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mutirao.config import one_line, parse_value
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed
from mutirao.systems.images.base import IMAGENET_MEAN, Backbone, Features, copy_weights, read_weights
from mutirao.systems.images.choices import TIMM
from mutirao.systems.images.networks import Normalize
from mutirao.training.optimizers import seeded

log = logging.getLogger("mutirao")

# What `create_model` takes besides a network's own settings: files of weights come by `weights`, read by ourselves.
RESERVED = ("pretrained", "checkpoint", "cache_dir", "num_classes", "scriptable", "exportable")


class Still(nn.Module):
    """A network whose batch normalisation keeps its statistics, in training too, and does not send them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        for norm in self.norms():
            for name, value in list(norm.named_buffers(recurse=False)):
                norm.register_buffer(name, value, persistent=False)

    def norms(self) -> list[nn.Module]:
        """The layers of batch normalisation."""
        return [m for m in self.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def train(self, mode: bool = True) -> "Still":
        """Train all but the statistics."""
        super().train(mode)
        for norm in self.norms():
            norm.training = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        """What the network gives."""
        out: Tensor = self.network(x)
        return out


def timm_backbone(name: str, weights: str = "", pretrained: bool = True) -> Backbone:
    """The network that `timm:NAME` or `timm:NAME?setting=value&...` names; settings go to `timm.create_model`.

    `mean` and `std`, three numbers each, say how pictures are normalised if not as timm says. Its weights are timm's
    own, which may have to be fetched, or those of the file `weights`; without `pretrained` it has none yet.
    """
    asked, _, query = name.removeprefix(TIMM).partition("?")
    settings: dict[str, Any] = {k: parse_value(v) for k, v in urllib.parse.parse_qsl(query)}
    colours = {k: three(name, k, settings.pop(k)) for k in ("mean", "std") if k in settings}
    if odd := [k for k in settings if k.startswith(RESERVED)]:
        raise ConfigError(f"body={name}: {odd[0]!r} is not a setting of the network; a file of weights is weights=PATH")
    try:
        timm = importlib.import_module("timm")
    except Exception as error:  # what it builds on may fail in its own ways
        raise ConfigError(f"body={name} needs timm, with torchvision: install mutirao[timm] ({why(error)})") from error
    try:
        with seeded(derive_seed(0, 0, f"body {name}")):
            network = timm.create_model(asked, pretrained=pretrained and not weights, num_classes=0, **settings)
        facts = timm.data.resolve_model_data_config(network)
        size = int(settings.get("img_size", facts["input_size"][-1]))
        mean, std = (colours.get(k, tuple(facts[k])) for k in ("mean", "std"))
    except (
        Exception
    ) as error:  # no such network, no such setting, nothing at hand to fetch from: much can be in the way
        raise ConfigError(f"timm cannot make {asked!r}: {why(error)}; a file will do, too: weights=PATH") from error
    if weights == "random":
        log.warning("body=%s has RANDOM weights: nothing it was trained for, and features worth little", name)
    elif weights:
        given = getattr(network, "default_cfg", {}).get("classifier") or ()
        classes = tuple(f"{c}." for c in ((given,) if isinstance(given, str) else given))
        own, state = network.state_dict(), read_weights(Path(weights).expanduser())
        copy_weights(own, state, lambda key: None if key.startswith(classes) and key not in own else key, weights, name)
        if "mean" not in colours and mean != IMAGENET_MEAN:  # what is not ImageNet's fits few weights but timm's own
            log.warning("body=%s normalises by mean %s and std %s, as timm's own weights want it", name, mean, std)
    trunk = nn.Sequential(Normalize(mean, std), Still(network), Features(name))
    trunk.requires_grad_(False).eval()
    with torch.inference_mode():
        width = int(trunk(torch.zeros((1, 3, size, size), dtype=torch.uint8)).shape[1])
    made = Backbone(name, trunk, nn.Sequential(), width, size, about=f"{size} pixels")
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def three(name: str, key: str, value: Any) -> tuple[float, ...]:
    """Three numbers for the three colours, separated by commas."""
    try:
        found = tuple(float(v) for v in str(value).split(","))
    except ValueError:
        found = ()
    if len(found) != 3 or (key == "std" and min(found) <= 0):
        raise ConfigError(f"body={name}: {key} must be three numbers, such as {key}=0.485,0.456,0.406")
    return found


def why(error: Exception) -> str:
    """An error in a few words."""
    return one_line(error)[:150]
