"""What a client does with a torch module: train it on its own samples, or judge it on them."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.arrays import Arrays
from mutirao.config import Common
from mutirao.fleet import Reply, Request, Site
from mutirao.randomness import number, rng
from mutirao.samples import Samples

Loss = Callable[[Tensor, Tensor], Tensor]
EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class Trainer:
    """A handler that trains `model()` by mini-batches on `site.data` and returns the trained arrays.

    With a proximal weight mu (its own, or the one the server tells) the local objective is
    F_k(w) + mu/2 |w - w_global|^2 (Li et al., 2020). `steps` > 0 replaces whole epochs.

    >>> trainer = Trainer(lambda: nn.Linear(2, 2), lr=0.5)
    >>> site = Site("ana", Samples(np.eye(2, dtype=np.float32), np.array([0, 1])))
    >>> reply = trainer(Request("train", trainer.initial(seed=0), {"seed": 0, "round": 1}), site)
    >>> sorted(reply.arrays), reply.n
    (['bias', 'weight'], 2)
    """

    model: Callable[[], nn.Module]
    loss: Loss = functional.cross_entropy
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int = 1
    steps: int = 0
    batch_size: int = 32
    mu: float = 0.0
    clip: float = 0.0
    engine: str = "auto"
    _own: threading.local = field(default_factory=threading.local, repr=False, compare=False)

    provides = frozenset({"metrics:loss", "metrics:accuracy"})

    @classmethod
    def of(cls, config: Common, model: Callable[[], nn.Module], **more: Any) -> "Trainer":
        """A trainer with the settings every recipe shares."""
        names = ("optimizer", "lr", "momentum", "weight_decay", "epochs", "batch_size", "clip", "engine")
        return cls(model, **{k: getattr(config, k) for k in names} | more)

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer a request to `train` or to `evaluate`."""
        if request.do == "train":
            return self.train(request, site)
        if request.do == "evaluate":
            samples = Samples.of(site.data)
            return Reply({}, metrics=self.evaluate(request.arrays, samples), n=len(samples))
        raise ValueError(f"a Trainer can train and evaluate, not {request.do!r}")

    def initial(self, seed: int) -> Arrays:
        """The arrays of a fresh model; the seed decides them."""
        with seeded(number(seed, 0, "initial")):
            return arrays_of(self.model())

    def evaluate(self, arrays: Arrays, samples: Samples) -> dict[str, float]:
        """Mean loss, and accuracy where the labels are classes."""
        model = self._module(arrays).eval()
        total = right = 0.0
        with one_thread(), torch.inference_mode():
            for start in range(0, len(samples), EVALUATION_BATCH):
                x, y = samples.batch(slice(start, start + EVALUATION_BATCH))
                outputs = model(x)
                total += float(self.loss(outputs, y)) * len(y)
                right += float(hits(outputs, y)) if is_classes(y) else 0.0
        metrics = {"loss": total / len(samples)}
        return metrics | ({"accuracy": right / len(samples)} if is_classes(samples.y) else {})

    def train(self, request: Request, site: Site) -> Reply:
        """The plain path, and the reference for every faster one: one client, batch by batch."""
        samples, config = Samples.of(site.data), request.config
        seed, round = int(config["seed"]), int(config["round"])
        mu = float(config.get("mu", self.mu))
        model = self._module(request.arrays).train()
        weights = [p for p in model.parameters() if p.requires_grad]
        start = [p.detach().clone() for p in weights] if mu else []
        optimizer = self._optimizer(weights)
        total, right, seen = torch.zeros(()), torch.zeros((), dtype=torch.int64), 0
        with one_thread(), seeded(number(seed, round, "torch", site.id)):
            for batch in self.plan(rng(seed, round, "batches", site.id), len(samples), needs_two(model)):
                x, y = samples.batch(batch)
                optimizer.zero_grad()
                outputs = model(x)
                loss = self.loss(outputs, y)
                loss.backward()  # type: ignore[no-untyped-call]
                for p, origin in zip(weights, start, strict=False):
                    if p.grad is not None:
                        p.grad.add_(p.detach() - origin, alpha=mu)
                if self.clip:
                    nn.utils.clip_grad_norm_(weights, self.clip)
                optimizer.step()
                total += loss.detach() * len(y)
                right += hits(outputs, y) if is_classes(y) else 0
                seen += len(y)
        metrics = {"loss": float(total) / seen}
        if is_classes(samples.y):
            metrics["accuracy"] = int(right) / seen
        return Reply(arrays_of(model), metrics=metrics, n=len(samples))

    def plan(self, rng: np.random.Generator, n: int, at_least_two: bool = False) -> list[npt.NDArray[np.intp]]:
        """Which samples make up each step: shuffled epochs cut into batches, the same for every engine."""
        if n == 0:
            raise ValueError("has no samples to train on")
        batches: list[npt.NDArray[np.intp]] = []
        epoch = 0
        while (len(batches) < self.steps) if self.steps else (epoch < self.epochs):
            order, epoch = rng.permutation(n), epoch + 1
            batches += [order[i : i + self.batch_size] for i in range(0, n, self.batch_size)]
            if at_least_two and len(batches[-1]) == 1 and n > 1:
                batches.pop()  # batch normalisation cannot train on a batch of one
        return batches[: self.steps] if self.steps else batches

    def _module(self, arrays: Arrays) -> nn.Module:
        """A module of this thread's own that holds `arrays`; made once, then filled again."""
        if not hasattr(self._own, "module"):
            with torch.random.fork_rng(devices=[]):  # initialisation must not move anybody's randomness
                self._own.module = self.model()
        module: nn.Module = self._own.module
        own = module.state_dict()
        if own.keys() != arrays.keys():
            raise ValueError(f"the model's arrays are {', '.join(own)}; received {', '.join(arrays)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(torch.from_numpy(np.require(arrays[name], requirements="W")))
        return module

    def _optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(weights, lr=self.lr, weight_decay=self.weight_decay)
        if self.optimizer == "sgd":
            return torch.optim.SGD(weights, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        raise ValueError(f"optimizer {self.optimizer!r} is not one of sgd, adam")

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_own"}  # a thread's module stays with the thread

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _own=threading.local())


def arrays_of(model: nn.Module) -> Arrays:
    """Parameters and buffers of a module as NumPy copies."""
    return {k: v.detach().cpu().numpy().copy() for k, v in model.state_dict().items()}


def hits(outputs: Tensor, y: Tensor) -> Tensor:
    """How many samples get the right class."""
    return (outputs.argmax(-1) == y).sum()


def is_classes(y: Tensor) -> bool:
    """Whether labels are class numbers."""
    return not y.is_floating_point()


def needs_two(model: nn.Module) -> bool:
    """Whether the module cannot be trained on a single sample."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's own randomness (dropout, initialisation) from `seed`, leaving the global state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: results do not depend on the number of cores, and small models are faster."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
