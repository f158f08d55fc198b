"""MaxPool and ReLU in one pass over memory each way, by a kernel in C (`pools.c`).

Where the maximum of a window is positive, both orders of the two layers pass on its value and its gradient; elsewhere
both give 0 and pass nothing. So the bits equal those of the replaced layers.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

try:
    from mutirao.training.engine import _pools as kernel  # type: ignore[attr-defined]  # compiled
except ImportError:  # installed without a C compiler
    kernel = None

MAX_SIDE = 15  # of a window, so that a position in it fits in a byte


def fuse_pools(module: nn.Module) -> nn.Module:
    """The module with each ReLU and the MaxPool right behind it fused."""
    for chain in [m for m in module.modules() if type(m) is nn.Sequential]:
        for i, (relu, pool) in enumerate(itertools.pairwise(list(chain))):
            hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (relu, pool))
            if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices and not hooked:
                chain[i] = PooledReLU(pool)
                chain[i + 1] = nn.Identity()
    return module


class PooledReLU(nn.Module):
    """ReLU(pool(x)), by the kernel where it is available and fits."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.pool = pool
        self.side = square_size(pool.kernel_size)
        self.stride = square_size(pool.stride)
        own = square_size(pool.padding) == 0 and square_size(pool.dilation) == 1 and not pool.ceil_mode
        self.fits = kernel is not None and own and 0 < self.side <= MAX_SIDE and self.stride > 0

    def forward(self, x: Tensor) -> Tensor:
        """Pool, then cut off negative values."""
        if (
            self.fits
            and x.dtype == torch.float32
            and x.dim() == 4
            and x.is_contiguous(memory_format=torch.channels_last)
            and min(x.shape[2:]) >= self.side
        ):
            return Pooling.apply(x, self.side, self.stride)  # type: ignore[no-any-return, no-untyped-call]
        return functional.relu(self.pool(x))


class Pooling(torch.autograd.Function):
    """The kernel as an autograd function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: int, stride: int) -> Tensor:
        """ReLU(max-pool(x)), recording the position of each maximum."""
        n, channels, *sizes = x.shape
        shape = (n, channels, *((size - side) // stride + 1 for size in sizes))
        out = torch.empty(shape, memory_format=torch.channels_last)
        where = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
        kernel.forth(as_nhwc(x), as_nhwc(out), as_nhwc(where), side, stride)
        ctx.save_for_backward(out, where)
        ctx.sizes = x.shape, side, stride
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Route each gradient to the position of its maximum."""
        (out, where) = ctx.saved_tensors
        (shape, side, stride) = ctx.sizes
        slopes = torch.empty(shape, memory_format=torch.channels_last)
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        kernel.back(as_nhwc(slopes), as_nhwc(out), as_nhwc(where), as_nhwc(gradient), side, stride)
        return slopes, None, None


def as_nhwc(x: Tensor) -> Any:
    """The tensor as a NumPy view of N x H x W x C, its order in memory."""
    return x.detach().permute(0, 2, 3, 1).numpy()


def square_size(setting: int | tuple[int, ...]) -> int:
    """A setting that is the same in both directions; -1 if they differ."""
    if isinstance(setting, int):
        return setting
    if len(set(setting)) == 1:
        return setting[0]
    return -1
