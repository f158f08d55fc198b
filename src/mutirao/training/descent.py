"""A module's weights on their way down: the optimisers, and the two conditions under which steps can be repeated."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from mutirao.core.arrays import Arrays
from mutirao.training.devices import seeded_at

CPU = torch.device("cpu")
OPTIMIZERS = ("sgd", "adam")


@dataclass(eq=False)
class Descent:
    """SGD or Adam, bit for bit as in torch.optim, whose first use would import torch's compiler, for seconds.

    FedProx's pull mu (w - w_start) is added to the gradients, and `clip` shortens them, before a step.
    """

    weights: list[nn.Parameter]
    mu: float = 0.0
    _: KW_ONLY
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        self.start = [p.detach().clone() for p in self.weights] if self.mu else []
        self.moments: dict[int, list[Tensor]] = {}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights along their gradients."""
        self.count += 1
        for p, origin in zip(self.weights, self.start, strict=False):
            if p.grad is not None:
                p.grad.add_(p - origin, alpha=self.mu)
        if self.clip:
            nn.utils.clip_grad_norm_(self.weights, self.clip)
        for i, p in enumerate(self.weights):
            if p.grad is None:
                continue
            g = p.grad.add(p, alpha=self.weight_decay) if self.weight_decay else p.grad
            if self.optimizer == "adam":
                m, v = self.moments.setdefault(i, [torch.zeros_like(p), torch.zeros_like(p)])
                m.lerp_(g, 0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                spread = (v.sqrt() / math.sqrt(1 - 0.999**self.count)).add_(1e-8)
                p.addcdiv_(m, spread, value=-self.lr / (1 - 0.9**self.count))
            elif self.momentum:
                if i in self.moments:
                    self.moments[i][0].mul_(self.momentum).add_(g)
                else:
                    self.moments[i] = [g.clone()]
                p.add_(self.moments[i][0], alpha=-self.lr)
            else:
                p.add_(g, alpha=-self.lr)


def arrays_of(model: nn.Module) -> Arrays:
    """Parameters and buffers of a module as NumPy copies."""
    return {k: v.detach().cpu().numpy().copy() for k, v in model.state_dict().items()}


@contextlib.contextmanager
def seeded(seed: int, place: torch.device = CPU) -> Iterator[None]:
    """Torch's own randomness (dropout, initialisation) from `seed`, leaving the global state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        with seeded_at(place, seed) if place.type != "cpu" else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: results do not depend on the number of cores, and small models are faster."""
    before = torch.get_num_threads()
    if before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before > 1:
            torch.set_num_threads(before)
