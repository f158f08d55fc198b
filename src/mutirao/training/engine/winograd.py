"""Accelerated 3 x 3 and 5 x 5 convolutions with fewer multiplications, by a kernel in C (`winograd.c`).

The results are torch's except for rounding of about 1e-5. Only `engine=plain` and `engine=stacked` keep torch's own
layers.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mutirao.training.engine.pooling import as_nhwc, square_size

try:
    from mutirao.training.engine import _winograd as kernel  # type: ignore[attr-defined]  # compiled
except ImportError:  # installed without a C compiler
    kernel = None

POINTS = 36  # of a tile, each a multiplication a pair of channels
LANES = 16  # channels that the kernel takes at once
MIN_TILES = 16  # tiles for which bringing the weights into the basis of the tiles pays
MAX_CHANNEL_PAIRS = 1 << 16  # pairs of channels: beyond, the matrices are too large for the cache


def accelerate_convolutions(module: nn.Module) -> nn.Module:
    """The module with its convolutions computed by the kernel where that pays; names and weights stay the same."""
    if kernel is None:
        return module
    for conv in module.modules():
        if type(conv) is nn.Conv2d and supports_convolution(conv):
            conv.forward = partial(convolve, conv)  # type: ignore[method-assign]
    return module


def supports_convolution(conv: nn.Conv2d) -> bool:
    """Whether the kernel can compute this layer: square, dense, stride 1, padded with zeros only."""
    side = square_size(conv.kernel_size)
    return (
        side in (3, 5)
        and isinstance(conv.padding, tuple)
        and 0 <= square_size(conv.padding) < side
        and conv.padding_mode == "zeros"
        and square_size(conv.stride) == square_size(conv.dilation) == conv.groups == 1
        and conv.in_channels % LANES == conv.out_channels % LANES == 0
        and conv.in_channels * conv.out_channels <= MAX_CHANNEL_PAIRS
    )


def output_size(x: Tensor, side: int, padding: int) -> tuple[int, int]:
    """The height and width of the output."""
    return x.shape[2] + 2 * padding - side + 1, x.shape[3] + 2 * padding - side + 1


def is_worthwhile(pictures: int, sizes: tuple[int, int], side: int) -> bool:
    """Whether pictures of this output size take less than half of the multiplications."""
    step = 7 - side
    tiles = -(-sizes[0] // step) * -(-sizes[1] // step)
    return pictures * tiles >= MIN_TILES and 2 * POINTS * tiles <= sizes[0] * sizes[1] * side**2


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The layer's output for x."""
    side = conv.kernel_size[0]
    padding = square_size(conv.padding)  # type: ignore[arg-type]  # `supports_convolution` refuses names
    if (
        x.dtype == conv.weight.dtype == torch.float32
        and x.dim() == 4
        and x.shape[1] == conv.in_channels
        and x.is_contiguous(memory_format=torch.channels_last)
        and is_worthwhile(len(x), output_size(x, side, padding), side)
    ):
        bias = torch.zeros(conv.out_channels) if conv.bias is None else conv.bias
        return Winograd.apply(x, conv.weight, bias, padding)  # type: ignore[no-any-return, no-untyped-call]
    y: Tensor = conv._conv_forward(x, conv.weight, conv.bias)
    return y


class Winograd(torch.autograd.Function):
    """The kernel as an autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
        """The convolution of x with `weight`, plus `bias`."""
        y = torch.empty(
            (len(x), len(weight), *output_size(x, weight.shape[2], padding)), memory_format=torch.channels_last
        )
        kernel.forth(as_nhwc(x), matrices(weight, 1, 0), bias.detach().numpy(), as_nhwc(y), padding)
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        """The gradients of x, if requested, of `weight` and of `bias`."""
        x, weight = ctx.saved_tensors
        outs, ins, *sides = weight.shape
        slopes = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        weights = torch.empty(*sides, ins, outs)
        biases = torch.empty(outs)
        gradient = as_nhwc(gradient.contiguous(memory_format=torch.channels_last))
        into = None if slopes is None else as_nhwc(slopes)
        kernel.back(as_nhwc(x), matrices(weight, 0, 1), gradient, into, weights.numpy(), biases.numpy(), ctx.padding)
        return slopes, weights.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last), biases, None


def matrices(weight: Tensor, as_nhwc: int, columns: int) -> Any:
    """The weights as side x side matrices over these two dimensions."""
    return weight.detach().permute(2, 3, as_nhwc, columns).contiguous().numpy()
