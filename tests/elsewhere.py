"""A second device without hardware: its tensors keep their numbers in the CPU's memory, and refuse to meet the CPU's.

No GPU is at hand, and torch's fake tensors cannot be trained on a device that this build of torch was not made for:
autograd asks for the device's guard and ends the process. This device is registered from Python, so that modules,
autograd and vmap take it for a real one. What is computed there are real numbers, which can be compared with the
CPU's, and a tensor left behind raises, as on a GPU.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
aten = torch.ops.aten
CARRY = {aten._to_copy.default, aten.copy_.default}  # what may bring numbers from one device to the other


class Elsewhere(Tensor):
    """A tensor of the other device around one of the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        about = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, device=device(), **about)
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Elsewhere({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def device() -> torch.device:
    """The device, registered when it is first asked for."""
    install()
    return torch.device(f"{NAME}:0")


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do the operation on the CPU; refuse one whose tensors lie on both devices, but for single numbers."""

    def look_in(value: Any) -> Any:
        if isinstance(value, Elsewhere):
            return value.inner
        if isinstance(value, Tensor) and func not in CARRY and value.dim():
            raise RuntimeError(f"{func}: a tensor of the CPU, of shape {tuple(value.shape)}, meets one of {NAME}")
        return torch.device("cpu") if isinstance(value, torch.device) else value

    with torch.inference_mode(False):  # or what is made could not be part of what was there before
        made = CELLS.get(func, func)(*tree_map(look_in, args), **tree_map(look_in, kwargs))
        return put_back(func, args, kwargs, made)


def put_back(func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> Any:
    """What an operation made, at the place where it belongs."""
    written = func._schema.arguments[0].alias_info
    if written is not None and written.is_write:
        if torch.Tag.inplace_view in func.tags:
            with no_dispatch():
                func(*args, **kwargs)  # the shape of what is around it changes, too
        return args[0]
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    if torch.device(kwargs.get("device") or device()).type != NAME:
        return made
    return tree_map(lambda value: Elsewhere(value) if isinstance(value, Tensor) else value, made)


class Randomness(backend_registration._DummyBackendModule):
    """The module of the device, `torch.elsewhere`: its random numbers are the CPU's."""

    def get_rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


@functools.cache
def install() -> torch.library.Library:
    """Register the device; what makes tensors out of nothing is given here, all else goes through `compute`."""
    _setup_privateuseone_for_python_backend(NAME, Randomness())

    def empty(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
        return Elsewhere(torch.empty(*args, **kwargs))

    def empty_strided(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
        return Elsewhere(torch.empty_strided(*args, **kwargs))

    def copy(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
        plain, other = (t.inner if isinstance(t, Elsewhere) else t for t in (into, source))
        plain.copy_(other)
        return into

    library = torch.library.Library("aten", "IMPL")
    library.impl("_copy_from", copy, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return library


# Recurrent cells in one operation, which torch has for GPUs alone: their formulas, forward and backward.


def lstm(given: Tensor, hidden: Tensor, cx: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = sum((b for b in biases if b is not None), given + hidden).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = workspace.chunk(4, 1)
    dh = torch.zeros_like(cy) if grad_hy is None else grad_hy
    dc = dh * o * (1 - cy.tanh().square()) + (0 if grad_cy is None else grad_cy)
    slopes = [dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g.square()), dh * cy.tanh() * o * (1 - o)]
    gates = torch.cat(slopes, 1)
    return gates, dc * f, gates.sum(0) if has_bias else torch.empty(0)


def gru(
    given: Tensor, hidden: Tensor, hx: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    a, b = (
        (given if bias is None else given + bias).chunk(3, 1),
        (hidden if other is None else hidden + other).chunk(3, 1),
    )
    r, z = (a[0] + b[0]).sigmoid(), (a[1] + b[1]).sigmoid()
    n = (a[2] + r * b[2]).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, b[2]], 1)


def gru_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    r, z, n, hx, b = workspace.chunk(5, 1)
    dn = grad * (1 - z) * (1 - n.square())
    dz, dr = grad * (hx - n) * z * (1 - z), dn * b * r * (1 - r)
    given, hidden = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    biases = (given.sum(0), hidden.sum(0)) if has_bias else (torch.empty(0), torch.empty(0))
    return given, hidden, grad * z, *biases


CELLS = {
    aten._thnn_fused_lstm_cell.default: lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_backward,
    aten._thnn_fused_gru_cell.default: gru,
    aten._thnn_fused_gru_cell_backward.default: gru_backward,
}
