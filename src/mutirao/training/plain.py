"""A torch module trained batch by batch, or probed: the plain path, and the reference for every faster one."""

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.config import Common
from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.parts import AnyHandler
from mutirao.errors import ConfigError
from mutirao.randomness import number, rng
from mutirao.training.descent import OPTIMIZERS, Descent, arrays_of, one_thread, seeded
from mutirao.training.figures import (
    PROBE_SAMPLES,
    PROBED,
    Loss,
    entropies,
    errors_of,
    extras_of,
    is_classes,
    mean_metrics,
    noted_losses,
    probe_samples,
    read_extras,
)
from mutirao.training.samples import Index, Samples

Requests = Mapping[ClientId, Request]
Sites = Mapping[ClientId, Site]
Outcomes = dict[ClientId, Reply | Failure]
Randomness = Callable[[int], contextlib.AbstractContextManager[Any]]
ENGINES = ("auto", "fused", "stacked", "threads", "plain")


@dataclass(frozen=True)
class PlainTrainer:
    """The settings of a `Trainer`, the batches it makes of a client's samples, and one client's training in turn."""

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
    figures: Callable[[Array, Array], Mapping[str, float]] | None = None  # of outputs and labels, when it judges
    workers: int = field(default=0, repr=False, compare=False)  # 0: one a core; no result depends on it
    _own: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)
    _recorded: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # by the engine

    def __post_init__(self) -> None:
        for name, right, words in (
            ("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
            ("lr", 0 < self.lr < math.inf, "a number above 0"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 (none) or above"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("steps", self.steps >= 0, "0 (whole epochs) or above"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("mu", 0 <= self.mu < math.inf, "0 (none) or above"),
            ("clip", 0 <= self.clip < math.inf, "0 (none) or above"),
            ("engine", self.engine in ENGINES, f"one of {', '.join(ENGINES)}"),
        ):
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but must be {words}")

    @classmethod
    def of(cls, config: Common, model: Callable[[], nn.Module], **more: Any) -> Self:
        """A trainer with the settings every recipe shares."""
        names = ("optimizer", "lr", "momentum", "weight_decay", "epochs", "batch_size", "clip", "engine")
        try:
            return cls(model, **{k: getattr(config, k) for k in names} | more)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def initial(self, seed: int) -> Arrays:
        """The arrays of a fresh model; the seed decides them."""
        with seeded(number(seed, 0, "initial")):
            return arrays_of(self.model())

    def probe(
        self, arrays: Arrays, samples: Samples, most: int = PROBE_SAMPLES, extras: frozenset[str] = frozenset()
    ) -> dict[str, float]:
        """Mean loss and mean entropy of the predicted classes, -sum p ln p, on the first `most` samples.

        If `extras` names them also `rms_loss`, sqrt(mean loss^2), and `gradient_norm`, |d mean loss / d weights|.
        """
        if len(samples) == 0:
            raise ValueError("has no samples to be probed on")
        model = self.fill(arrays).eval()
        x, y = samples.batch(slice(0, most))
        with one_thread(), torch.inference_mode():
            outputs = model(x)
            metrics = {"loss": float(self.loss(outputs, y))}
            if is_classes(y):
                metrics["entropy"] = float(entropies(outputs).mean())
            if "rms_loss" in extras:
                metrics["rms_loss"] = float(noted_losses(self.loss, outputs, y).double().square().mean().sqrt())
        if "gradient_norm" in extras:
            weights = [p for p in model.parameters() if p.requires_grad]
            with one_thread():
                slopes = torch.autograd.grad(self.loss(model(x), y), weights, allow_unused=True)
            metrics["gradient_norm"] = math.sqrt(sum(float(g.double().square().sum()) for g in slopes if g is not None))
        return metrics

    def train(self, request: Request, site: Site, randomness: Randomness | None = None) -> Reply:
        """One client's training, batch by batch."""
        samples, config = Samples.of(site.data), request.config
        seed, round, extras = int(config["seed"]), int(config["round"]), read_extras(config, samples)
        mu = float(config.get("mu", self.mu))
        probed = self.probe(request.arrays, samples, probe_samples(config), extras) if extras & PROBED else {}
        model = self.fill(request.arrays).train()
        weights = [p for p in model.parameters() if p.requires_grad]
        descent = self.descent(weights, mu)
        total, right, sizes = torch.zeros(()), torch.zeros((), dtype=torch.int64), []
        errors: list[Tensor] = []
        with one_thread(), (randomness or seeded)(number(seed, round, "torch", site.id)):
            for batch in self.plan(rng(seed, round, "batches", site.id), len(samples), needs_two(model)):
                x, y = samples.batch(batch)
                model.zero_grad()
                outputs = model(x)
                loss = self.loss(outputs, y)
                loss.backward()  # type: ignore[no-untyped-call]
                descent.step()
                total += loss.detach() * len(y)
                sizes.append(len(y))
                if is_classes(y):
                    found = outputs.detach().argmax(-1)
                    right += (found == y).sum()
                    if "squared_errors" in extras:
                        errors.append(errors_of(found, y))
        metrics = mean_metrics(float(total), int(right) if is_classes(samples.y) else None, sum(sizes))
        metrics |= {k: v for k, v in probed.items() if k in extras}
        noted = extras_of(torch.cat(errors).numpy(), sizes) if errors else {}
        return Reply(arrays_of(model), noted, metrics, len(samples))

    def descent(self, weights: list[nn.Parameter], mu: float) -> Descent:
        """The optimiser of these weights, at its first step."""
        names = ("optimizer", "lr", "momentum", "weight_decay", "clip")
        return Descent(weights, mu, **{k: getattr(self, k) for k in names})

    def plan(self, rng: np.random.Generator, n: int, at_least_two: bool = False) -> list[Index]:
        """Which samples make up each step: shuffled epochs cut into batches, the same for every engine."""
        order, ends = self.order(rng, n, at_least_two), np.cumsum(self.lengths(n, at_least_two)).tolist()
        return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def lengths(self, n: int, at_least_two: bool = False) -> list[int]:
        """How many samples each step takes: epoch by epoch whole batches, and what is left."""
        epoch = self._epoch(n, at_least_two)
        return (epoch * self._epochs(epoch))[: self.steps or None]

    def order(self, rng: np.random.Generator, n: int, at_least_two: bool = False) -> Index:
        """The samples of all steps, one after the other."""
        epoch = self._epoch(n, at_least_two)
        return np.concatenate([rng.permutation(n)[: sum(epoch)] for _ in range(self._epochs(epoch))])

    def _epoch(self, n: int, at_least_two: bool) -> list[int]:
        if n == 0:
            raise ValueError("has no samples to train on")
        whole, rest = divmod(n, self.batch_size)
        if rest == 1 and at_least_two and whole:
            rest = 0  # batch normalisation cannot train on a batch of one
        return [self.batch_size] * whole + ([rest] if rest else [])

    def _epochs(self, epoch: list[int]) -> int:
        return -(-self.steps // len(epoch)) if self.steps else self.epochs

    def make(self) -> nn.Module:
        """A module for one thread, whatever it holds, laid out as convolutions like it best."""
        with seeded(0):  # making it must not move anybody's randomness
            return self.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def blank(self) -> nn.Module:
        """This thread's own module, whatever it holds; made once."""
        if not hasattr(self._own, "module"):
            self._own.module = self.make()
        module: nn.Module = self._own.module
        return module

    def fill(self, arrays: Arrays) -> nn.Module:
        """This thread's own module, holding `arrays`."""
        module = self.blank()
        own = module.state_dict()
        if own.keys() != arrays.keys():
            raise ValueError(f"the model's arrays are {', '.join(own)}; received {', '.join(arrays)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(torch.from_numpy(np.require(arrays[name], requirements="W")))
        return module

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_own", "_recorded"}  # a thread's module stays with the thread, and programs with the process
        return {k: v for k, v in self.__dict__.items() if k not in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _own=threading.local(), _recorded={})


def needs_two(model: nn.Module) -> bool:
    """Whether the module cannot be trained on a single sample."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def attempt(handler: AnyHandler, request: Request, site: Site) -> Reply | Failure:
    """One client's answer, or why there is none."""
    try:
        return handler(request, site)
    except Exception as error:  # a client may raise anything: it is its own failure alone
        return failure_of(error)


def answer_in_turn(handler: AnyHandler, requests: Requests, sites: Sites) -> Outcomes:
    """What each client answers, sorted by client."""
    return {client: attempt(handler, requests[client], sites[client]) for client in sorted(requests)}
