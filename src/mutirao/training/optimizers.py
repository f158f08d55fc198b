"""Local optimizers, bit for bit those of torch.optim, and the conditions under which results repeat."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mutirao.config import OPTIMIZERS
from mutirao.core.arrays import Arrays
from mutirao.core.cpu_threads import one_thread as one_thread
from mutirao.training.torch_device import seeded_at

STATE_PREFIX = "optimizer."  # before the names of what a site's state holds of it
CPU = torch.device("cpu")
Optimizer = str | Callable[..., Any]  # a name, a class of torch.optim, or a function that makes one of the weights
WITH_MOMENTUM = ("sgd", "rmsprop")


@dataclass(eq=False)
class LocalOptimizer:
    """A local optimizer: by name, bit for bit as in torch.optim, or one of torch's own.

    The named ones are ours because the first use of torch.optim imports torch's compiler, which takes seconds. A class
    is created with these settings; a function creates its optimizer from the weights, and its rates are multiplied by
    `scale`. Before each step, b + mu (w - a) is added to the gradients: a are the `anchors` or the initial weights, b
    the `corrections`. Then gradients are clipped to length `clip`.
    """

    weights: list[nn.Parameter]
    mu: float = 0.0
    _: KW_ONLY
    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    scale: float = 1.0
    anchors: Sequence[Tensor] = ()
    corrections: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        self.start: Sequence[Tensor] = []
        if self.mu:
            self.start = self.anchors or [p.detach().clone() for p in self.weights]
        self.moments: dict[int, list[Tensor]] = {}
        self.count = 0
        if callable(self.optimizer):
            self.move = self.step_of_torch()
        else:
            self.move = partial(RULES[self.optimizer], self)

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights along their gradients."""
        self.count += 1
        # Without mu, or corrections, these lists are empty, hence `strict=False`.
        for p, origin in zip(self.weights, self.start, strict=False):
            if p.grad is not None:
                p.grad.add_(p - origin, alpha=self.mu)
        for p, correction in zip(self.weights, self.corrections, strict=False):
            if p.grad is not None:
                p.grad.add_(correction)
        if self.clip:
            nn.utils.clip_grad_norm_(self.weights, self.clip)
        self.move()

    def gradients(self, decay: float) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """Each weight that has a gradient, with its index and the gradient including weight decay."""
        for i, p in enumerate(self.weights):
            if p.grad is None:
                continue
            g = p.grad
            if decay:
                g = g.add(p, alpha=decay)
            yield i, p, g

    def moments_of(self, i: int, p: Tensor, count: int) -> list[Tensor]:
        """The moment tensors of a weight, initially 0."""
        return self.moments.setdefault(i, [torch.zeros_like(p) for _ in range(count)])

    def state(self) -> Arrays:
        """The optimizer's state: the number of steps, and the moments of each weight."""
        state: Arrays = {f"{STATE_PREFIX}count": np.array(self.count, np.int64)}
        for i, moments in self.moments.items():
            for j, moment in enumerate(moments):
                state[f"{STATE_PREFIX}{i}.{j}"] = moment.cpu().numpy().copy()
        return state

    def load_state(self, state: Arrays) -> None:
        """Continue from a stored `state`; without one, start fresh."""
        stored = {k.removeprefix(STATE_PREFIX): v for k, v in state.items() if k.startswith(STATE_PREFIX)}
        if not stored:
            return
        self.count = int(stored.pop("count", 0))
        for name in sorted(stored, key=lambda name: [int(part) for part in name.split(".")]):
            i = int(name.partition(".")[0])
            if i >= len(self.weights) or stored[name].shape != tuple(self.weights[i].shape):
                raise ValueError("the optimizer's stored state is of another model")
            self.moments.setdefault(i, []).append(torch.from_numpy(stored[name].copy()).to(self.weights[i]))

    def step_sgd(self) -> None:
        """SGD: v = m v + g, w = w - lr v; without momentum v = g."""
        for i, p, g in self.gradients(self.weight_decay):
            if self.momentum and i in self.moments:
                g = self.moments[i][0].mul_(self.momentum).add_(g)
            elif self.momentum:
                # v begins as g, as in torch.optim; a copy, since g may be p.grad itself.
                self.moments[i] = [g.clone()]
            p.add_(g, alpha=-self.lr)

    def step_adam(self, decay: float | None = None) -> None:
        """Adam: Kingma and Ba, 2015."""
        for i, p, g in self.gradients(self.weight_decay if decay is None else decay):
            m, v = self.moments_of(i, p, 2)
            # These operations in this order are torch's: an equal formula would differ in the last bits.
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            spread = (v.sqrt() / math.sqrt(1 - 0.999**self.count)).add_(1e-8)
            p.addcdiv_(m, spread, value=-self.lr / (1 - 0.9**self.count))

    def step_adamw(self) -> None:
        """AdamW: weights decay by w (1 - lr decay) before a step of Adam. Loshchilov and Hutter, 2019."""
        for _, p, _ in self.gradients(0.0):
            p.mul_(1 - self.lr * self.weight_decay)
        self.step_adam(decay=0.0)

    def step_rmsprop(self) -> None:
        """RMSprop: w = w - lr g / sqrt(mean of g^2), with momentum of that direction. Hinton, 2012."""
        for i, p, g in self.gradients(self.weight_decay):
            v, b = self.moments_of(i, p, 2)
            v.mul_(0.99).addcmul_(g, g, value=1 - 0.99)
            spread = v.sqrt().add_(1e-8)
            if self.momentum:
                p.add_(b.mul_(self.momentum).addcdiv_(g, spread), alpha=-self.lr)
            else:
                p.addcdiv_(g, spread, value=-self.lr)

    def step_adagrad(self) -> None:
        """Adagrad: w = w - lr g / sqrt(sum of g^2). Duchi, Hazan and Singer, 2011."""
        for i, p, g in self.gradients(self.weight_decay):
            (v,) = self.moments_of(i, p, 1)
            p.addcdiv_(g, v.addcmul_(g, g).sqrt().add_(1e-10), value=-self.lr)

    def step_of_torch(self) -> Callable[[], Any]:
        """The step of an optimizer of torch.optim, or of a user's own."""
        make: Any = self.optimizer
        if isinstance(make, type):
            given = {k: v for k in ("momentum", "weight_decay") if (v := getattr(self, k))}
            made: Any = partial(make, lr=self.lr, **given)(self.weights)
        else:
            made = make(self.weights)
            for group in made.param_groups:
                group["lr"] = group["lr"] * self.scale
        step: Callable[[], Any] = made.step
        return step


RULES: dict[str, Callable[[LocalOptimizer], None]] = {
    "sgd": LocalOptimizer.step_sgd,
    "adam": LocalOptimizer.step_adam,
    "adamw": LocalOptimizer.step_adamw,
    "rmsprop": LocalOptimizer.step_rmsprop,
    "adagrad": LocalOptimizer.step_adagrad,
}


def optimizer_fault(optimizer: Optimizer, momentum: float, weight_decay: float) -> str:
    """Why an optimizer, or a setting that it would ignore, is refused; empty if it can be used."""
    given = {k: v for k, v in (("momentum", momentum), ("weight_decay", weight_decay)) if v}
    if isinstance(optimizer, str) or not callable(optimizer):
        if optimizer not in OPTIMIZERS:
            return f"optimizer is {optimizer!r}, but must be one of {', '.join(OPTIMIZERS)}, or make one"
        if momentum and optimizer not in WITH_MOMENTUM:
            return f"momentum is {momentum!r}, which {optimizer} ignores; it must be 0"
        return ""
    if not inspect.isclass(optimizer):
        said = [
            f"{k} is {v!r}, which a function that makes an optimiser has to say by itself" for k, v in given.items()
        ]
        return "".join(said[:1])
    takes = inspect.signature(optimizer.__init__).parameters
    step = getattr(optimizer, "step", None)
    needs = inspect.signature(step).parameters.values() if step else ()
    if "lr" not in takes or not step or any(p.default is p.empty and p.name != "self" for p in needs):
        return f"optimizer is {optimizer.__name__}, but must take a `lr`, and steps without a closure"
    lost = [f"{k} is {v!r}, which {optimizer.__name__} does not take" for k, v in given.items() if k not in takes]
    return "".join(lost[:1])


def arrays_of(model: nn.Module, names: Iterable[str] | None = None) -> Arrays:
    """Parameters and buffers of a module as NumPy copies: all, or those of these names."""
    state = model.state_dict()
    return {k: state[k].detach().cpu().numpy().copy() for k in (state if names is None else names)}


@contextlib.contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed torch's global generator (dropout, initialisation) inside the context, and restore its state after it."""
    with torch.random.fork_rng(devices=[]):
        # The same bits as torch.manual_seed, which would also record its call site.
        torch.default_generator.manual_seed(seed)
        if device.type == "cpu":
            yield
            return
        with seeded_at(device, seed):
            yield
