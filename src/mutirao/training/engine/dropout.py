"""Dropout masks that do not depend on the engine: each client draws the same masks as in plain training.

`nn.Dropout` draws a mask at each call, 1 with probability 1 - p or else 0, and multiplies by mask / (1 - p). If it is
known which layers are called, in what order and with what shapes, the same masks can be made before the step: as
inputs of a compiled step of many clients, or for the kernel of one client (`kernel_masks`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mutirao.training.engine.tracer import Unsupported
from mutirao.training.optimizers import seeded

NAME = "mask"  # of the buffer through which a layer is given its mask


class Mask(NamedTuple):
    """The mask that one layer draws in a step: a 0 with probability `p`, in the shape of each sample."""

    layer: str
    p: float
    shape: tuple[int, ...]
    dtype: torch.dtype


class GivenDropout(nn.Dropout):
    """Dropout by a given mask that is already divided by 1 - p."""

    mask: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """The input times the mask; Unsupported if the shapes differ."""
        if input.shape != self.mask.shape:
            raise Unsupported("the shapes of its dropout change")
        if self.inplace:
            return input.mul_(self.mask)
        return input * self.mask


def find_masks(module: nn.Module, x: Tensor) -> list[Mask]:
    """The masks that a module draws in a step, in order; none if it is random in other ways, too.

    Nothing else is random if drawing the masks alone leaves torch's generator in the same state.
    """
    if x.device.type != "cpu":  # other devices do not draw masks number by number
        return []
    try:
        with seeded(0):
            masks = watch_dropout(module, x)
            after = torch.get_rng_state()
        with seeded(0):
            # A batch of twice the size shows which dimensions belong to a sample.
            again = watch_dropout(module, torch.cat([x, x]))
    except Exception:  # a model may insist on a length, or on anything
        return []
    generator = torch.Generator().manual_seed(0)
    draw_masks(masks, [generator], np.array([[len(x)]]), len(x))
    once = len({mask.layer for mask in masks}) == len(masks)
    if once and masks == again and torch.equal(generator.get_state(), after):
        return masks
    return []


def watch_dropout(module: nn.Module, x: Tensor) -> list[Mask]:
    """Run a module and record the masks that its dropout layers draw."""
    seen: list[Mask] = []

    def watch(name: str, layer: nn.Dropout) -> torch.utils.hooks.RemovableHandle:
        def note(layer: nn.Dropout, _: object, out: Tensor) -> None:
            if layer.training and 0 < layer.p < 1:
                if len(out) != len(x) or not out.is_contiguous():
                    raise Unsupported("its dropout does not have one mask per sample")
                seen.append(Mask(name, layer.p, tuple(out.shape[1:]), out.dtype))

        return layer.register_forward_hook(note)

    handles = [watch(name, layer) for name, layer in module.named_modules() if type(layer) is nn.Dropout]
    try:
        with torch.no_grad():
            module(x)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def give_masks(module: nn.Module, masks: Sequence[Mask]) -> None:
    """Replace the dropout layers that draw these masks by layers that are given them."""
    for mask in masks:
        layer = module.get_submodule(mask.layer)
        # A new object would not do: the module may hold the layer under several names.
        layer.__class__ = GivenDropout
        layer.register_buffer(NAME, torch.empty(0), persistent=False)


def draw_masks(
    masks: Sequence[Mask], generators: Sequence[torch.Generator], lengths: npt.NDArray[np.int64], batch: int
) -> list[Tensor]:
    """The masks of some steps, [step, client, sample, ...], sampled by each client for its batch `lengths`.

    Samples that only fill up a batch have weight 0 and need no mask.
    """
    made = [torch.ones(*lengths.shape, batch, *mask.shape, dtype=mask.dtype) for mask in masks]
    if not masks:
        return made
    for i, generator in enumerate(generators[: lengths.shape[1]]):
        steps = zip(lengths[:, i].tolist(), *(some[:, i].unbind() for some in made), strict=True)
        for length, *own in steps:
            for mask, one in zip(masks, own, strict=True):
                one[:length].bernoulli_(1 - mask.p, generator=generator)
    return [some.div_(1 - mask.p) for some, mask in zip(made, masks, strict=True)]


try:
    from mutirao.training.engine import _dense  # type: ignore[attr-defined]  # compiled
except ImportError:  # installed without a C compiler
    draw: Callable[..., None] | None = None
else:
    draw = _dense.draw

TRIED_COUNTS = (1, 15, 16, 259, 5000, 640, 17)  # lengths of successive draws


def kernel_masks(layers: Sequence[tuple[int, float]], longest: int, seed: int) -> tuple[Any, Any]:
    """What the kernel needs for dropout, given the layers' widths and dropout rates.

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
    """Whether the kernel's Mersenne Twister gives torch's numbers; on some processors torch draws with MKL."""
    if draw is None:
        return False
    for seed, kept in ((0, 0.8), (1 << 62, 0.5), (7, 0.001)):
        generator = torch.Generator().manual_seed(seed)
        ours = np.ones(sum(TRIED_COUNTS), np.float32)
        theirs = [torch.empty(n).bernoulli_(kept, generator=generator) for n in TRIED_COUNTS]
        draw(seed, kept, ours)
        if not np.array_equal(ours, torch.cat(theirs).numpy()):
            return False
    return True
