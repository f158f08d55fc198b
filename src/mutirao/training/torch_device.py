"""The torch device to train on: the CPU or, if requested and worth the transfer, a GPU.

Equal bits are guaranteed on the CPU only: a GPU sums in an order of its own.
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

DEVICES = "auto, cpu, cuda, cuda:N (the N-th GPU, from 0) or mps"
PRECISIONS = ("float32", "bf16")
HEAVY = 1 << 29  # floating-point operations a step: from here on calls cost little beside the arithmetic
MEMORY_SHARE = 0.5  # of a device's free memory that samples may take; the rest is for models and what they compute


def is_device(name: str) -> bool:
    """Whether `name` is a valid device setting.

    >>> [is_device(name) for name in ("auto", "cuda:1", "gpu")]
    [True, True, False]
    """
    return re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", name) is not None


def find_device(name: str, is_worth_it: Callable[[], bool]) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one and a step is heavy enough, otherwise the CPU."""
    if name == "auto":
        found = next((kind for kind in ("cuda", "mps") if count_devices(kind)), "cpu")
        # Called last, and only if there is a choice: `is_worth_it` makes a module.
        if found == "cpu" or not is_worth_it():
            return torch.device("cpu")
        return torch.device(found)
    kind, _, number = name.partition(":")
    if kind in ("cuda", "mps") and int(number or 0) >= count_devices(kind):
        here = "there is none that this torch can use"
        if count_devices(kind):
            here = f"there are {count_devices(kind)}"
        raise ValueError(f"device is {name!r}, but {here}; use cpu, or auto for whatever there is")
    return torch.device(name)


def count_devices(kind: str) -> int:
    """The number of devices of a kind that this torch can use."""
    if kind == "cuda":
        if torch.cuda.is_available():
            return torch.cuda.device_count()
        return 0
    return int(torch.backends.mps.is_available())


def is_heavy(module: nn.Module, batch_size: int) -> bool:
    """Whether a step keeps a core busy: convolutions, recurrent layers, or enough operations a step.

    Two each for the forward pass and for the gradients of inputs and of weights, the last only of what is trained.
    """
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    weights = sum(p.numel() for p in module.parameters())
    kernels = any(isinstance(m, nn.modules.conv._ConvNd | nn.RNNBase) for m in module.modules())
    return kernels or (4 * weights + 2 * trained) * batch_size > HEAVY


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's weights."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def free_bytes(device: torch.device) -> float:
    """The free memory of a device; infinite if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return float("inf")


def random_state(device: torch.device) -> Tensor:
    """The states of the random generators of the CPU and of a device."""
    here = torch.get_rng_state()
    if device.type == "cpu":
        return here
    return torch.cat([here, backend_of(device).get_rng_state()])


def backend_of(device: torch.device) -> Any:
    """torch's module for a kind of device, such as `torch.cuda`."""
    return getattr(torch, device.type)


@contextlib.contextmanager
def seeded_at(device: torch.device, seed: int) -> Iterator[None]:
    """Seed a device's generator inside the context, and restore its state after it."""
    there = backend_of(device)
    here: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if device.type == "cuda":
        # torch.mps has a single device, and no such context.
        here = there.device(device)
    with here:
        before = there.get_rng_state()
        there.manual_seed(seed)
        try:
            yield
        finally:
            there.set_rng_state(before)


class DeviceCache:
    """Copies of tensors on a device, reused in the next round and dropped with their tensors."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.device], tuple[Any, Tensor]] = {}

    def bring(self, tensor: Tensor, device: torch.device) -> Tensor | None:
        """The tensor on that device; None if it does not fit."""
        if tensor.device == device:
            return tensor
        # By id: tensors compare number by number, so a WeakKeyDictionary cannot find them. The callback removes an
        # entry together with its tensor, before another one can have the same id.
        key = id(tensor), device
        if key not in self._held:
            if tensor.nbytes > MEMORY_SHARE * free_bytes(device):
                return None
            self._held[key] = weakref.ref(tensor, lambda _: self._held.pop(key, None)), tensor.to(device)
        return self._held[key][1]


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass and its loss: full precision, or bfloat16 where that pays."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
