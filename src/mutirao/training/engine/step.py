"""One local optimiser step of several clients as a function of tensors: what the engine records."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mutirao.training.devices import autocast
from mutirao.training.figures import row_losses
from mutirao.training.plain import PlainTrainer

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults for Adam


class Form(NamedTuple):
    """How a step is written: for a stack or for one client alone, loss by rows or by whole batches, samples a batch."""

    stacked: bool
    by_rows: bool
    batch: int


@dataclass
class Layout:
    """What is trained, what is not, and under which other names the model holds them (tied weights)."""

    trained: list[str]
    other: list[str]
    held: dict[str, str]  # every name of the state dict -> the name used here
    places: list[str]  # the names without those of modules that are reached on two paths

    @classmethod
    def of(cls, module: nn.Module, unused: set[str]) -> "Layout":
        """The layout of a module; a weight the loss does not depend on stays as it is, as with torch's optimisers."""
        state = module.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        held = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        trained = [n for n in first.values() if state[n].requires_grad and n not in unused]
        modules = {path for path, _ in module.named_modules()}  # each module once
        places = [n for n in held if n.rpartition(".")[0] in modules]
        return cls(trained, [n for n in first.values() if n not in trained], held, places)


@dataclass
class Step:
    """Forward, backward, proximal term, clipping and update, as the plain path does them, for k clients at once.

    Its inputs are `[trained, other, moments, start (with mu), x, y, rows, weights, scalars]`. `rows` says which samples
    of x and y each client takes, `weights` how much each counts in its client's loss, `scalars` what else of the
    optimiser changes from step to step.
    """

    trainer: PlainTrainer
    module: nn.Module
    layout: Layout
    mu: float
    form: Form

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Move the clients' state in place; return their outputs and, with whole batches, losses before the step."""
        given, count = iter(inputs), len(self.layout.trained)
        sizes = (count, len(self.layout.other), moments_of(self.trainer) * count, count if self.mu else 0)
        trained, other, moments, start = (list(itertools.islice(given, size)) for size in sizes)
        x, y, rows, weights, scalars = given
        flat = rows.reshape(-1)
        x, y = (t.index_select(0, flat).view(*rows.shape, *t.shape[1:]) for t in (x, y))
        outputs, losses, gradients = self.gradients(trained, other, x, y, weights)
        with torch.no_grad():
            gradients = self.bound(trained, gradients, start)
            if self.trainer.optimizer == "adam":
                follow_adam(self.trainer, trained, gradients, moments, scalars)
            else:
                follow_sgd(self.trainer, trained, gradients, moments)
        return [outputs] if self.form.by_rows else [outputs, losses]

    def gradients(
        self, trained: Sequence[Tensor], other: Sequence[Tensor], x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Outputs, losses and each client's gradient; as clients share nothing, one backward pass gives them all."""
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in trained]
            if self.form.stacked:
                outputs, losses = vmap(self.forward)(leaves, list(other), x, y)
            else:
                outputs, losses = self.forward([p[0] for p in leaves], [b[0] for b in other], x[0], y[0])
                outputs, losses = outputs[None], losses[None]
            gradients = torch.autograd.grad((losses * weights).sum(), leaves)
        return outputs.detach(), losses.detach(), list(gradients)

    def forward(self, trained: list[Tensor], other: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and loss of one client; its buffers, such as running means, are written to."""
        layout = self.layout
        held = dict(zip([*layout.trained, *layout.other], [*trained, *other], strict=True))
        state = {place: held[layout.held[place]] for place in layout.places}
        with autocast(self.trainer.place(), self.trainer.precision):
            outputs: Tensor = functional_call(self.module, state, (x,), tie_weights=False)
            loss = self.trainer.loss
            losses = row_losses(loss, outputs, y) if self.form.by_rows else loss(outputs, y)
        for place, value in state.items():
            if (buffer := held[layout.held[place]]) is not value:  # replaced instead of written to
                buffer.copy_(value)
        return outputs, losses

    def bound(self, trained: list[Tensor], gradients: list[Tensor], start: list[Tensor]) -> list[Tensor]:
        """Gradients with the proximal term mu (w - w_global), no longer than `clip` for any client."""
        if self.mu:
            gradients = [g + self.mu * (p - s) for g, p, s in zip(gradients, trained, start, strict=True)]
        if not self.trainer.clip:
            return gradients
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients])
        scale = (self.trainer.clip / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        return [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in gradients]


def moments_of(trainer: PlainTrainer) -> int:
    """How many tensors the optimiser keeps beside each weight."""
    return 2 if trainer.optimizer == "adam" else int(trainer.momentum > 0)


def follow_sgd(t: PlainTrainer, trained: list[Tensor], gradients: list[Tensor], moments: list[Tensor]) -> None:
    """torch's SGD with momentum and weight decay: v = m v + (g + d w), w = w - lr v."""
    for i, (weight, g) in enumerate(zip(trained, gradients, strict=True)):
        direction = g.add(weight, alpha=t.weight_decay) if t.weight_decay else g
        if t.momentum:
            direction = moments[i].mul_(t.momentum).add_(direction)
        weight.sub_(direction, alpha=t.lr)


def follow_adam(
    t: PlainTrainer, trained: list[Tensor], gradients: list[Tensor], moments: list[Tensor], scalars: Tensor
) -> None:
    """torch's Adam; `scalars` are lr / (1 - beta1^t) and sqrt(1 - beta2^t) of the step."""
    size, root = scalars.unbind()
    for weight, g, m, v in zip(trained, gradients, moments[::2], moments[1::2], strict=True):
        direction = g.add(weight, alpha=t.weight_decay) if t.weight_decay else g
        m.lerp_(direction, 1 - BETA1)
        v.mul_(BETA2).addcmul_(direction, direction, value=1 - BETA2)
        weight.sub_(size * m / (v.sqrt() / root + EPSILON))


def scalars_of(trainer: PlainTrainer, steps: int) -> list[tuple[float, float]]:
    """The two numbers of Adam that depend on the step, which counts from 1."""
    if trainer.optimizer != "adam":
        return [(0.0, 0.0)] * steps
    counts = range(1, steps + 1)
    return [(trainer.lr / (1 - BETA1**t), float((1 - BETA2**t) ** 0.5)) for t in counts]
