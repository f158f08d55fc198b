"""Dropout's masks of one client: the numbers that torch's own layers would draw, step by step and layer by layer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

try:
    from mutirao.training.engine import _dense  # type: ignore[attr-defined]  # compiled
except ImportError:  # installed without a C compiler
    draw: Callable[..., None] | None = None
else:
    draw = _dense.draw

TRIED_COUNTS = (1, 15, 16, 259, 5000, 640, 17)  # numbers drawn one after the other


def kernel_masks(layers: Sequence[tuple[int, float]], longest: int, seed: int) -> tuple[Any, Any]:
    """What the kernel needs to leave out inputs of layers, given their widths and the shares that are left out.

    That is a seed where it can draw as torch does, which is ten times as fast, or else what draws with torch.
    """
    if not any(dropped for _, dropped in layers):
        return None, None
    if draws_like_torch():
        return [(1 - dropped, None) if dropped else None for _, dropped in layers], seed
    masks = [torch.zeros(longest, width) for width, _ in layers]
    kept = [1 - dropped for _, dropped in layers]
    generator = torch.Generator().manual_seed(seed)

    def draw_step(length: int) -> None:
        for mask, share in zip(masks, kept, strict=True):
            if 0 < share < 1:  # where nothing or all is left out, torch draws nothing
                mask[:length].bernoulli_(share, generator=generator)

    return [(share, mask.numpy()) if share < 1 else None for mask, share in zip(masks, kept, strict=True)], draw_step


@functools.cache
def draws_like_torch() -> bool:
    """Whether torch draws with its Mersenne Twister, as the kernel does; on some processors it has MKL draw."""
    if draw is None:
        return False
    for seed, kept in ((0, 0.8), (1 << 62, 0.5), (7, 0.001)):
        generator, ours = torch.Generator().manual_seed(seed), np.ones(sum(TRIED_COUNTS), np.float32)
        theirs = [torch.empty(n).bernoulli_(kept, generator=generator) for n in TRIED_COUNTS]
        draw(seed, kept, ours)
        if not np.array_equal(ours, torch.cat(theirs).numpy()):
            return False
    return True
