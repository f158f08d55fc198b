"""Accelerated LSTM layers: one call of a kernel in C (`recurrent.c`) each way for all time steps.

The results are torch's except for rounding. Only `engine=plain` and `engine=stacked` keep torch's own layers.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

try:
    from mutirao.training.engine import _recurrent as kernel  # type: ignore[attr-defined]  # compiled
except ImportError:  # installed without a C compiler
    kernel = None

MIN_UNITS = 16  # units of a layer, one vector of the widest kind

State = tuple[Tensor, Tensor]


def accelerate_recurrent(module: nn.Module) -> nn.Module:
    """The module with its LSTM layers computed by the kernel where possible; names and weights stay the same."""
    if kernel is None:
        return module
    for layers in module.modules():
        if type(layers) is nn.LSTM and supports_lstm(layers):
            layers.forward = partial(run_lstm, layers)  # type: ignore[assignment, method-assign]
    return module


def supports_lstm(layers: nn.LSTM) -> bool:
    """Whether the kernel can compute these layers: one direction, no projection, no dropout between them."""
    return (
        not layers.bidirectional
        and layers.proj_size == 0
        and (layers.num_layers == 1 or not layers.dropout)
        and layers.hidden_size >= MIN_UNITS
    )


def run_lstm(layers: nn.LSTM, x: Tensor, hx: State | None = None) -> tuple[Tensor, State]:
    """The layers' output for x: the states of the last layer, and each layer's final state and cell."""
    if not accepts_input(layers, x, hx):
        return nn.LSTM.forward(layers, x, hx)
    y = (x.transpose(0, 1) if layers.batch_first else x).contiguous()  # step by step
    states = []
    cells = []
    for i in range(layers.num_layers):
        h, c = (None, None) if hx is None else (hx[0][i].contiguous(), hx[1][i].contiguous())
        y, cell = LSTMKernel.apply(y, h, c, *lstm_weights(layers, i))  # type: ignore[no-untyped-call]
        states.append(y[-1])
        cells.append(cell)
    return y.transpose(0, 1) if layers.batch_first else y, (torch.stack(states), torch.stack(cells))


def accepts_input(layers: nn.LSTM, x: Tensor, hx: State | None) -> bool:
    """Whether the kernel can compute this input and initial state; torch handles or refuses all others."""
    if not isinstance(x, Tensor) or x.dim() != 3 or not x.numel() or x.shape[2] != layers.input_size:
        return False
    state = (layers.num_layers, x.shape[1 - layers.batch_first], layers.hidden_size)
    tensors = [x, *(hx or ()), *(w for w in lstm_weights(layers, 0) if w is not None)]
    return (
        all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and (hx is None or hx[0].shape == hx[1].shape == state)
        and not torch.is_autocast_enabled("cpu")
    )


def lstm_weights(layers: nn.LSTM, i: int) -> list[Tensor | None]:
    """Weights and biases of one layer under torch's names."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [getattr(layers, f"{name}_l{i}", None) for name in names]


class LSTMKernel(torch.autograd.Function):
    """One layer as an autograd function; x is steps x batch x features."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor | None,
        c: Tensor | None,
        w_in: Tensor,
        w: Tensor,
        b_in: Tensor | None,
        b: Tensor | None,
    ) -> State:
        """The states of all steps, and the last cell state."""
        states, cells = torch.empty(2, *x.shape[:2], w.shape[1])
        gates = torch.empty(*x.shape[:2], len(w))
        bias = None if b_in is None or b is None else b_in + b
        w_in = w_in.contiguous()
        w = w.contiguous()
        kernel.forth(*map(array, (x, w_in, w, bias, h, c, gates, states, cells)))
        ctx.save_for_backward(x, w_in, w, h, c, gates, states, cells)
        ctx.set_materialize_grads(False)
        return states, cells[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor | None, cell_slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        """The requested gradients."""
        x, w_in, w, *rest = ctx.saved_tensors
        asked = ctx.needs_input_grad
        given = [None if s is None else s.contiguous() for s in (slopes, cell_slopes)]
        x_slopes = torch.empty_like(x) if asked[0] else None
        weights = [torch.empty_like(w_in), torch.empty_like(w)]
        bias = torch.empty(len(w))
        first = list(torch.empty(2, x.shape[1], w.shape[1]))
        kernel.back(*map(array, (x, w_in, w, bias, *rest, *given, x_slopes, *weights, *first)), asked[1])
        found = x_slopes, *first, *weights, bias, bias
        return tuple(slope if wanted else None for slope, wanted in zip(found, asked, strict=True))


def array(x: Tensor | None) -> Any:
    """The tensor as a NumPy view, which the kernel takes."""
    if x is None:
        return None
    return x.detach().numpy()
