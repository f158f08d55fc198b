"""MobileNetV2, narrow enough to be trained on a processor: inverted residuals with linear bottlenecks."""

import itertools

from torch import Tensor, nn

WIDTH = 0.35  # times the paper's channels: 408,938 weights with ten outputs instead of 2,236,682
LAST = 1280  # channels before the dense layer, at any width up to 1
# (expansion, channels, blocks, stride of the first block): table 2 of the paper
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


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
        return x + y if self.adds else y


def convolution(into: int, out: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution with batch normalisation and a ReLU cut off at 6."""
    inner = nn.Conv2d(into, out, size, stride, size // 2, groups=groups, bias=False)
    return [inner, nn.BatchNorm2d(out), nn.ReLU6()]


def scaled(channels: int, width: float) -> int:
    """So many channels times the width, as a multiple of 8 that is at most a tenth below it.

    >>> scaled(32, 1.0), scaled(24, 0.35), scaled(320, 0.35)
    (32, 8, 112)
    """
    near = max(8, int(channels * width + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels * width else near


def mobilenet(channels: int, outputs: int, first: nn.Module, width: float = WIDTH) -> nn.Sequential:
    """MobileNetV2 (Sandler et al., CVPR 2018) behind a `first` layer, for pictures of so many channels.

    All strides are those of the paper, so of 32 x 32 pixels one place is left before the dense layer.
    """
    into = scaled(32, width)
    layers = [first, *convolution(channels, into, 3, 2)]
    for expansion, wanted, blocks, stride in STAGES:
        out = scaled(wanted, width)
        for step in itertools.islice(itertools.chain([stride], itertools.repeat(1)), blocks):
            layers.append(InvertedResidual(into, out, expansion, step))
            into = out
    last = scaled(LAST, max(1.0, width))
    return nn.Sequential(
        *layers, *convolution(into, last, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, outputs)
    )
