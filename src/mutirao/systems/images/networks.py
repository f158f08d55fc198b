"""Small networks trained from scratch: for images (bytes) of any size, normalized in the first layer, and for rows."""

import itertools
import math

import torch
from torch import Tensor, nn

from mutirao.config import load_name, one_line
from mutirao.errors import ConfigError
from mutirao.registry import check_module, is_dotted

MOBILENET_WIDTH = 0.35  # times the paper's channels: 408,938 weights with ten outputs instead of 2,236,682
MOBILENET_LAST = 1280  # channels before the dense layer, at any width up to 1
# (expansion, channels, blocks, stride of the first block): table 2 of the paper
MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Widen by a 1 x 1 convolution, filter each channel by itself, narrow again without a nonlinearity.

    y = x + project(filter(expand(x))), the sum only where shapes agree.
    """

    def __init__(self, into: int, out: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = into * expansion
        widen = convolution(into, wide, 1) if expansion > 1 else []
        narrow = [nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.layers = nn.Sequential(*widen, *convolution(wide, wide, 3, stride, wide), *narrow)
        self.adds = stride == 1 and into == out

    def forward(self, x: Tensor) -> Tensor:
        """The filtered channels, added to what came in where they fit."""
        y: Tensor = self.layers(x)
        if self.adds:
            return x + y
        return y


def convolution(into: int, out: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution with batch normalisation and a ReLU cut off at 6."""
    inner = nn.Conv2d(into, out, size, stride, size // 2, groups=groups, bias=False)
    return [inner, nn.BatchNorm2d(out), nn.ReLU6()]


def scaled_channels(channels: int, width: float) -> int:
    """So many channels times the width, as a multiple of 8 that is at most a tenth below it.

    >>> scaled_channels(32, 1.0), scaled_channels(24, 0.35), scaled_channels(320, 0.35)
    (32, 8, 112)
    """
    near = max(8, int(channels * width + 4) // 8 * 8)
    if near < 0.9 * channels * width:
        return near + 8
    return near


def mobilenet(channels: int, outputs: int, first: nn.Module, width: float = MOBILENET_WIDTH) -> nn.Sequential:
    """MobileNetV2 (Sandler et al., CVPR 2018) behind a `first` layer, for pictures of so many channels.

    All strides are those of the paper, so of 32 x 32 pixels one place is left before the dense layer.
    """
    into = scaled_channels(32, width)
    layers = [first, *convolution(channels, into, 3, 2)]
    for expansion, wanted, blocks, stride in MOBILENET_STAGES:
        out = scaled_channels(wanted, width)
        for step in itertools.islice(itertools.chain([stride], itertools.repeat(1)), blocks):
            layers.append(InvertedResidual(into, out, expansion, step))
            into = out
    # Section 4 of the paper: below a width of 1 the last convolution keeps its channels.
    last = scaled_channels(MOBILENET_LAST, max(1.0, width))
    return nn.Sequential(
        *layers, *convolution(into, last, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, outputs)
    )


PICTURE = (3, 32, 32)  # of CIFAR-10: channels, height, width
# pixels a side: for any convolution here, and for two without padding
SMALLEST = 7
UNPADDED = 19
DEEP = 16  # pixels a side from which on the four convolutions of `deep` are padded as in the authors' code
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)  # of the training set, by channel, pixels in 0..1
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


class Normalize(nn.Module):
    """Bytes to floats: (x / 255 - mean) / std by channel; the defaults are those of CIFAR-10."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: tuple[float, ...] = CIFAR10_MEAN, std: tuple[float, ...] = CIFAR10_STD) -> None:
        super().__init__()
        # Not part of the state: constants need not be sent, and averaging would round them.
        self.register_buffer("scale", 1 / (255 * torch.tensor(std)).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("shift", -(torch.tensor(mean) / torch.tensor(std)).view(1, -1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize a batch of images."""
        return x.float() * self.scale + self.shift


def normalize(channels: int) -> Normalize:
    """The first layer for images of so many channels; without CIFAR-10's three channels, mean 0.5 and std 0.25."""
    if channels == 3:
        return Normalize()
    return Normalize((0.5,) * channels, (0.25,) * channels)


def sides_of(shape: tuple[int, ...]) -> tuple[int, list[int]]:
    """The channels and both sides of an image shape; ConfigError if it is too small for convolutions."""
    channels, *sides = shape
    if min(sides) < SMALLEST:
        raise ConfigError(f"model: pictures of {' x '.join(map(str, sides))} are too small for convolutions; use mlp")
    return channels, sides


def convolutional(
    shape: tuple[int, ...], channels: int, more: int, pool: tuple[int, int], dense: tuple[int, ...], outputs: int
) -> nn.Module:
    """5 x 5 convolutions, each with a pool behind it, then dense layers of these widths: for pictures of that shape.

    There are two, or as many as it takes until at most 8 x 8 places are left. Where a picture is too small for
    that, convolutions are padded.
    """
    deep, sides = sides_of(shape)
    size, step = pool
    pad = 0 if min(sides) >= UNPADDED else 2
    layers: list[nn.Module] = [normalize(deep)]  # and three for each convolution
    for into, out in itertools.chain([(deep, channels), (channels, more)], itertools.repeat((more, more))):
        if len(layers) > 6 and (max(sides) <= 8 or min(sides) + 2 * pad - 4 < size):
            break
        layers += [nn.Conv2d(into, out, 5, padding=pad), nn.ReLU(), nn.MaxPool2d(size, step)]
        sides = [(side + 2 * pad - 4 - size) // step + 1 for side in sides]
    layers.append(nn.Flatten())
    for into, out in itertools.pairwise((more * sides[0] * sides[1], *dense, outputs)):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(shape: tuple[int, ...] = PICTURE, outputs: int = 10) -> nn.Module:
    """The network of the federated learning papers: two 5 x 5 convolutions of 64, pools 3/2, dense 1024-384-192-10.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    after TensorFlow's tutorial; 576,778 parameters. Of other pictures it has more or fewer.
    """
    return convolutional(shape, 64, 64, (3, 2), (384, 192), outputs)


def small(shape: tuple[int, ...] = PICTURE, outputs: int = 10) -> nn.Module:
    """A network of the size of LeNet-5 (LeCun et al., 1998) for quick trials; 62,006 parameters."""
    return convolutional(shape, 6, 16, (2, 2), (120, 84), outputs)


def deep(shape: tuple[int, ...] = PICTURE, outputs: int = 10) -> nn.Module:
    """Four 3 x 3 convolutions of 32, 64, 128 and 128, each with a pool behind it, then a dense layer of 512.

    The network with which the authors of client groups train (de Souza et al., SBRC 2022, in their code); 312,010
    parameters. The second and third are padded only where a picture is too small otherwise; of a large picture there
    are more of the last kind, until at most 4 x 4 places are left.
    """
    channels, sides = sides_of(shape)
    inner = 0 if min(sides) >= DEEP else 1
    layers: list[nn.Module] = [normalize(channels)]
    first = [(channels, 32, 1), (32, 64, inner), (64, 128, inner), (128, 128, 1)]
    for number, (into, out, pad) in enumerate(itertools.chain(first, itertools.repeat((128, 128, 1)))):
        if number >= len(first) and (max(sides) <= 4 or min(sides) == 1):
            break
        sides = [side + 2 * pad - 2 for side in sides]
        layers += [nn.Conv2d(into, out, 3, padding=pad), nn.ReLU()]
        if min(sides) > 1:  # there is something left to pool
            layers.append(nn.MaxPool2d(2))
            sides = [side // 2 for side in sides]
    width = 128 * math.prod(sides)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, outputs))


def mobile(shape: tuple[int, ...] = PICTURE, outputs: int = 10) -> nn.Module:
    """MobileNetV2 (Sandler et al., CVPR 2018) at 0.35 of its width; 408,938 parameters for CIFAR-10."""
    channels, _ = sides_of(shape)
    return mobilenet(channels, outputs, normalize(channels))


def mlp(inputs: int = 64, width: int = 64, outputs: int = 10) -> nn.Sequential:
    """One hidden layer; as it is, for scikit-learn's digits."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def make_network(name: str, shape: tuple[int, ...], width: int, outputs: int) -> nn.Module:
    """A network for samples of that shape: dense for rows, else the one of that name.

    >>> network = make_network("small", (3, 32, 32), width=64, outputs=10)
    >>> sum(p.numel() for p in network.parameters())
    62006
    """
    if is_dotted(name):
        return call_factory(name, shape, outputs)
    if len(shape) == 1:
        return mlp(shape[0], width, outputs)
    if name == "mlp":
        return nn.Sequential(normalize(shape[0]), nn.Flatten(), *mlp(math.prod(shape), width, outputs))
    return NETWORKS[name](shape, outputs)


def call_factory(path: str, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Call a user's function, `package.module:name`, with the sample shape and the number of outputs."""
    check_module("model", path)
    make = load_name(path)
    try:
        found = make(shape, outputs)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"model: {path!r} fails for ({shape}, {outputs}): {one_line(error)}") from error
    if not isinstance(found, nn.Module):
        raise ConfigError(f"model: {path!r} gives a {type(found).__name__}; expected a torch.nn.Module")
    return found


def replace_head(network: nn.Module, outputs: int) -> nn.Module:
    """The network with a new, randomly initialized last layer of so many outputs."""
    layers = list(network.children())
    return nn.Sequential(*layers[:-1], nn.Linear(layers[-1].in_features, outputs))  # type: ignore[arg-type]


NETWORKS = {"cnn": cnn, "small": small, "deep": deep, "mobilenet": mobile}
