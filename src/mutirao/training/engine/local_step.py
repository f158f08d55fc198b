"""One local optimizer step of several clients as a function of tensors, which can be traced."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mutirao.training.measurements import per_sample_losses
from mutirao.training.plain import PlainTrainer
from mutirao.training.torch_device import autocast

# torch's defaults for Adam.
BETA1 = 0.9
BETA2 = 0.999
EPSILON = 1e-8
# torch's defaults for RMSprop and Adagrad.
ALPHA = 0.99
TINY = 1e-10


class StepForm(NamedTuple):
    """The form of a step: stacked or one client, per-sample losses or whole batches, and the batch size."""

    stacked: bool
    by_rows: bool
    batch: int


@dataclass
class StateLayout:
    """Which tensors of a module are trained, which are not, and their other names (tied weights)."""

    trained: list[str]
    other: list[str]
    held: dict[str, str]  # every name of the state dict -> the name used here
    places: list[str]  # the names without those of modules that are reached on two paths

    @classmethod
    def of(cls, module: nn.Module, unused: set[str]) -> "StateLayout":
        """The layout of a module; weights that the loss does not use stay as they are, as in torch's optimizers."""
        state = module.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        held = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        trained = [n for n in first.values() if state[n].requires_grad and n not in unused]
        modules = {path for path, _ in module.named_modules()}  # each module once
        places = [n for n in held if n.rpartition(".")[0] in modules]
        return cls(trained, [n for n in first.values() if n not in trained], held, places)


@dataclass
class LocalStep:
    """Forward, backward, proximal term, clipping and update as in plain training, for k clients at once.

    Its inputs are `[trained, other, moments, anchors (with mu), corrections (if corrected), x, y, rows, weights,
    scalars, masks]`. `rows` says which samples of x and y each client takes, `weights` how much each counts in its
    client's loss, `scalars` the numbers of the optimiser that change from step to step, or from round to round: nothing
    is recorded anew for each rate. `masks` are those of the layers in `masked`.
    """

    trainer: PlainTrainer
    module: nn.Module
    layout: StateLayout
    mu: float
    corrected: bool
    has_varying_lr: bool  # whether the rate is a number of its own, or SGD's steps always have the trainer's
    form: StepForm
    masked: list[str]  # the buffers through which layers are given their masks

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Update the clients' state in place; return outputs and, with whole batches, losses before the step."""
        given = iter(inputs)
        count = len(self.layout.trained)
        pulls = (count if self.mu else 0, count if self.corrected else 0)
        sizes = (count, len(self.layout.other), moments_of(self.trainer) * count, *pulls)
        trained, other, moments, anchors, corrections = (list(itertools.islice(given, size)) for size in sizes)
        x, y, rows, weights, scalars, *masks = given
        flat = rows.reshape(-1)
        x, y = (t.index_select(0, flat).view(*rows.shape, *t.shape[1:]) for t in (x, y))
        outputs, losses, gradients = self.gradients(trained, other, x, y, weights, masks)
        with torch.no_grad():
            gradients = self.bound(trained, gradients, anchors, corrections)
            if self.trainer.optimizer == "sgd":
                update_sgd(self.trainer, trained, gradients, moments, scalars[0] if self.has_varying_lr else None)
            else:
                UPDATES[str(self.trainer.optimizer)](self.trainer, trained, gradients, moments, scalars)
        if self.form.by_rows:
            return [outputs]
        return [outputs, losses]

    def gradients(
        self,
        trained: Sequence[Tensor],
        other: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        masks: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Outputs, losses and each client's gradient; one backward pass, as clients share no weights."""
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in trained]
            if self.form.stacked:
                outputs, losses = vmap(self.forward)(leaves, list(other), x, y, list(masks))
            else:
                outputs, losses = self.forward(first_of(leaves), first_of(other), x[0], y[0], first_of(masks))
                outputs = outputs[None]
                losses = losses[None]
            gradients = torch.autograd.grad((losses * weights).sum(), leaves)
        return outputs.detach(), losses.detach(), list(gradients)

    def forward(
        self, trained: list[Tensor], other: list[Tensor], x: Tensor, y: Tensor, masks: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Outputs and loss of one client; buffers such as running means are updated."""
        layout = self.layout
        held = dict(zip([*layout.trained, *layout.other], [*trained, *other], strict=True))
        state = {place: held[layout.held[place]] for place in layout.places}
        state |= zip(self.masked, masks, strict=True)
        with autocast(self.trainer.torch_device(), self.trainer.precision):
            outputs: Tensor = functional_call(self.module, state, (x,), tie_weights=False)
            loss = self.trainer.loss
            losses = per_sample_losses(loss, outputs, y) if self.form.by_rows else loss(outputs, y)
        for place in layout.places:
            if (buffer := held[layout.held[place]]) is not state[place]:  # replaced instead of written to
                buffer.copy_(state[place])
        return outputs, losses

    def bound(
        self, trained: list[Tensor], gradients: list[Tensor], anchors: list[Tensor], corrections: list[Tensor]
    ) -> list[Tensor]:
        """Gradients plus b + mu (w - a), clipped to `clip` for each client."""
        if self.mu:
            gradients = [g + self.mu * (p - a) for g, p, a in zip(gradients, trained, anchors, strict=True)]
        if self.corrected:
            gradients = [g + b for g, b in zip(gradients, corrections, strict=True)]
        if not self.trainer.clip:
            return gradients
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients])
        scale = (self.trainer.clip / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        return [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in gradients]


def first_of(stacks: Sequence[Tensor]) -> list[Tensor]:
    """The first client's tensor of each stack."""
    return [stack[0] for stack in stacks]


def moments_of(trainer: PlainTrainer) -> int:
    """The number of tensors that the optimizer keeps per weight."""
    return {"sgd": 0, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}[str(trainer.optimizer)] + (
        trainer.momentum > 0
    )


Tensors = Sequence[Tensor]


def with_weight_decay(t: PlainTrainer, weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with weight decay added."""
    if t.weight_decay:
        return gradient.add(weight, alpha=t.weight_decay)
    return gradient


def update_sgd(t: PlainTrainer, trained: Tensors, gradients: Tensors, moments: Tensors, rate: Tensor | None) -> None:
    """torch's SGD with momentum and weight decay: v = m v + (g + d w), w = w - lr v.

    With the trainer's own rate, a plain number, a gradient and the step along it become one operation on the tape.
    """
    for i, (weight, g) in enumerate(zip(trained, gradients, strict=True)):
        direction = with_weight_decay(t, weight, g)
        if t.momentum:
            direction = moments[i].mul_(t.momentum).add_(direction)
        if rate is None:
            weight.sub_(direction, alpha=t.lr)
        else:
            weight.addcmul_(direction, rate, value=-1)


def update_adam(t: PlainTrainer, trained: Tensors, gradients: Tensors, moments: Tensors, scalars: Tensor) -> None:
    """torch's Adam, or AdamW; `scalars` are lr / (1 - beta1^t), sqrt(1 - beta2^t) and 1 - lr decay of the step."""
    size, root, shrink = scalars.unbind()
    for weight, g, m, v in zip(trained, gradients, moments[::2], moments[1::2], strict=True):
        if t.optimizer == "adamw":
            direction = g
            weight.mul_(shrink)
        else:
            direction = with_weight_decay(t, weight, g)
        m.lerp_(direction, 1 - BETA1)
        v.mul_(BETA2).addcmul_(direction, direction, value=1 - BETA2)
        weight.sub_(size * m / (v.sqrt() / root + EPSILON))


def update_rmsprop(t: PlainTrainer, trained: Tensors, gradients: Tensors, moments: Tensors, scalars: Tensor) -> None:
    """torch's RMSprop; `scalars` begin with lr."""
    each = 1 + (t.momentum > 0)
    for i, (weight, g) in enumerate(zip(trained, gradients, strict=True)):
        direction = with_weight_decay(t, weight, g)
        v = moments[each * i]
        v.mul_(ALPHA).addcmul_(direction, direction, value=1 - ALPHA)
        direction = direction / (v.sqrt() + EPSILON)
        if t.momentum:
            direction = moments[each * i + 1].mul_(t.momentum).add_(direction)
        weight.addcmul_(direction, scalars[0], value=-1)


def update_adagrad(t: PlainTrainer, trained: Tensors, gradients: Tensors, moments: Tensors, scalars: Tensor) -> None:
    """torch's Adagrad; `scalars` begin with lr."""
    for weight, g, v in zip(trained, gradients, moments, strict=True):
        direction = with_weight_decay(t, weight, g)
        v.addcmul_(direction, direction)
        weight.addcmul_(direction / (v.sqrt() + TINY), scalars[0], value=-1)


UPDATES = {
    "adam": update_adam,
    "adamw": update_adam,
    "rmsprop": update_rmsprop,
    "adagrad": update_adagrad,
}


def scalars_of(trainer: PlainTrainer, steps: int, lr: float) -> list[tuple[float, float, float]]:
    """The optimizer's numbers in each step, counted from 1: the rate and Adam's bias corrections."""
    if trainer.optimizer not in ("adam", "adamw"):
        return [(lr, 0.0, 0.0)] * steps
    shrink = 1 - lr * trainer.weight_decay
    return [(lr / (1 - BETA1**t), float((1 - BETA2**t) ** 0.5), shrink) for t in range(1, steps + 1)]
