"""Backbones of timm: any of its models by name, with its own weights, those of a file, or those of a model hub.

timm is imported only when such a backbone is loaded. The models have no classifier, and normalize as timm says.
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

# Arguments of `create_model` that users may not set: weight files are given in `weights`, and read safely.
RESERVED = ("pretrained", "checkpoint", "cache_dir", "num_classes", "scriptable", "exportable")


class FrozenNormStatistics(nn.Module):
    """A network with batch normalization that keeps its statistics in training, and does not send them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        for norm in self.norms():
            for name, value in list(norm.named_buffers(recurse=False)):
                norm.register_buffer(name, value, persistent=False)

    def norms(self) -> list[nn.Module]:
        """The batch normalization layers."""
        return [m for m in self.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def train(self, mode: bool = True) -> "FrozenNormStatistics":
        """Switch to training mode, the statistics excepted."""
        super().train(mode)
        for norm in self.norms():
            norm.training = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        out: Tensor = self.network(x)
        return out


def timm_backbone(name: str, weights: str = "", pretrained: bool = True) -> Backbone:
    """Load `timm:NAME` or `timm:NAME?setting=value&...`; settings are passed to `timm.create_model`.

    `mean` and `std`, three numbers each, replace timm's normalization. The weights are timm's own, which it may
    download, or those of the file `weights`; without `pretrained` they are random.
    """
    model_name, _, query = name.removeprefix(TIMM).partition("?")
    settings: dict[str, Any] = {k: parse_value(v) for k, v in urllib.parse.parse_qsl(query)}
    colours = {k: three_numbers(name, k, settings.pop(k)) for k in ("mean", "std") if k in settings}
    if odd := [k for k in settings if k.startswith(RESERVED)]:
        raise ConfigError(f"body={name}: {odd[0]!r} is not a setting of the network; a file of weights is weights=PATH")
    try:
        timm = importlib.import_module("timm")
    except Exception as error:  # its dependencies raise exceptions of their own
        raise ConfigError(
            f"body={name} needs timm, with torchvision: install mutirao[timm] ({shorten(error)})"
        ) from error
    try:
        with seeded(derive_seed(0, 0, f"body {name}")):
            network = timm.create_model(model_name, pretrained=pretrained and not weights, num_classes=0, **settings)
        facts = timm.data.resolve_model_data_config(network)
        size = int(settings.get("img_size", facts["input_size"][-1]))
        mean = colours.get("mean", tuple(facts["mean"]))
        std = colours.get("std", tuple(facts["std"]))
    except Exception as error:  # unknown model or setting, failed download: timm raises many kinds
        raise ConfigError(
            f"timm cannot make {model_name!r}: {shorten(error)}; a file will do, too: weights=PATH"
        ) from error
    if weights == "random":
        log.warning("body=%s has RANDOM weights: nothing it was trained for, and features worth little", name)
    elif weights:
        given = getattr(network, "default_cfg", {}).get("classifier") or ()
        classifiers = tuple(f"{layer}." for layer in ((given,) if isinstance(given, str) else given))
        own = network.state_dict()
        state = read_weights(Path(weights).expanduser())

        # The network has no classifier (num_classes=0), so the one in the file is left out.
        def our_key(key: str) -> str | None:
            if key.startswith(classifiers) and key not in own:
                return None
            return key

        copy_weights(own, state, our_key, weights, name)
        # A normalization other than ImageNet's suits few weights but timm's own.
        if "mean" not in colours and mean != IMAGENET_MEAN:
            log.warning("body=%s normalises by mean %s and std %s, as timm's own weights want it", name, mean, std)
    trunk = nn.Sequential(Normalize(mean, std), FrozenNormStatistics(network), Features(name))
    trunk.requires_grad_(False).eval()
    with torch.inference_mode():
        width = int(trunk(torch.zeros((1, 3, size, size), dtype=torch.uint8)).shape[1])
    backbone = Backbone(name, trunk, nn.Sequential(), width, size, about=f"{size} pixels")
    return backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def three_numbers(name: str, key: str, value: Any) -> tuple[float, ...]:
    """Parse three numbers, one for each colour, separated by commas."""
    try:
        found = tuple(float(v) for v in str(value).split(","))
    except ValueError:
        found = ()
    if len(found) != 3 or (key == "std" and min(found) <= 0):
        raise ConfigError(f"body={name}: {key} must be three numbers, such as {key}=0.485,0.456,0.406")
    return found


def shorten(error: Exception) -> str:
    """An error as one short line."""
    return one_line(error)[:150]
