"""Plain local training of a torch module, batch by batch: the reference for every faster engine."""

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.config import ENGINES, OPTIMIZERS, Common
from mutirao.core.agreement import agreed_of, check_agreed
from mutirao.core.arrays import Array, Arrays, digest
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, Site, failure_of
from mutirao.core.hyperparameters import read_hyperparameters
from mutirao.core.parts import AnyHandler
from mutirao.errors import ConfigError, Refused
from mutirao.randomness import derive_seed, rng
from mutirao.training.inputs import call_model
from mutirao.training.lr_schedules import Constant, Schedule, factor_of, schedule_of
from mutirao.training.measurements import (
    PROBE_SAMPLES,
    PROBED,
    Loss,
    concatenate_errors,
    has_error_measures,
    is_classes,
    losses_without_grad,
    predictive_entropies,
    probe_samples,
    read_extras,
    squared_errors,
    training_metrics,
)
from mutirao.training.optimizers import LocalOptimizer, Optimizer, arrays_of, one_thread, optimizer_fault, seeded
from mutirao.training.pull import LocalHyperparameters, Pull
from mutirao.training.samples import Samples
from mutirao.training.torch_device import DEVICES, PRECISIONS, DeviceCache, autocast, find_device, is_device, is_heavy
from mutirao.training.trainable_state import StateNames, find_state_names

Requests = Mapping[ClientId, Request]
Sites = Mapping[ClientId, Site]
Outcomes = dict[ClientId, Reply | Failure]
Randomness = Callable[[int], contextlib.AbstractContextManager[Any]]
Transform = Callable[[Any, np.random.Generator], Any]  # inputs of a batch -> other inputs, random by the generator only


@dataclass(frozen=True)
class PlainTrainer:
    """The settings of a `Trainer`, its batches, and the training of one client without any acceleration."""

    model: Callable[[], nn.Module]
    loss: Loss = functional.cross_entropy
    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    schedule: Schedule = Constant()
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int = 1
    steps: int = 0
    batch_size: int = 32
    mu: float = 0.0
    clip: float = 0.0
    share: str = ""  # patterns of shared arrays, separated by commas; by default the trained ones
    engine: str = "auto"
    device: str = "cpu"
    precision: str = "float32"
    figures: Callable[[Array, Array], Mapping[str, float]] | None = (
        None  # further metrics of outputs and labels in an evaluation
    )
    transform: Transform | None = None  # applied to training batches, never in an evaluation
    keep_optimizer: bool = False  # whether a client keeps its optimizer's state for the next round
    workers: int = field(default=0, repr=False, compare=False)  # 0: one a core; no result depends on it
    _thread: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # by the engine

    def __post_init__(self) -> None:
        for name, right, words in (
            ("lr", 0 < self.lr < math.inf, "a number above 0"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 (none) or above"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("steps", self.steps >= 0, "0 (whole epochs) or above"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("mu", 0 <= self.mu < math.inf, "0 (none) or above"),
            ("clip", 0 <= self.clip < math.inf, "0 (none) or above"),
            ("schedule", callable(self.schedule), "a function of the round"),
            ("engine", self.engine in ENGINES, f"one of {', '.join(ENGINES)}"),
            ("device", is_device(self.device), DEVICES),
            ("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
        ):
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but must be {words}")
        if fault := optimizer_fault(self.optimizer, self.momentum, self.weight_decay):
            raise ValueError(fault)
        if callable(self.optimizer) and self.engine in ("fused", "stacked"):
            raise ValueError(f"engine is {self.engine!r}, which supports optimizers by name only; use auto")
        if self.transform is not None and self.engine in ("fused", "stacked"):
            raise ValueError(f"engine={self.engine} cannot apply a transform; use auto, threads or plain")
        if self.keep_optimizer and self.engine in ("fused", "stacked"):
            raise ValueError(
                f"engine={self.engine} starts with a fresh optimizer; keep_optimizer needs threads or plain"
            )
        if self.keep_optimizer and callable(self.optimizer):
            raise ValueError(f"keep_optimizer needs an optimizer by name: {', '.join(OPTIMIZERS)}")

    @classmethod
    def of(cls, config: Common, model: Callable[[], nn.Module], **more: Any) -> Self:
        """A trainer with the settings that all recipes share."""
        names = ["optimizer", "lr", "momentum", "weight_decay", "epochs", "batch_size", "clip"]
        names += ["engine", "device", "precision"]
        more.setdefault("schedule", schedule_of(config))
        try:
            made = cls(model, **{k: getattr(config, k) for k in names} | more)
            if made.device != "auto":
                # Report a missing GPU before any data are read.
                made.torch_device()
            return made
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def initial(self, seed: int) -> Arrays:
        """The arrays of a freshly initialised model for this seed."""
        with seeded(derive_seed(seed, 0, "initial")):
            return arrays_of(self.model(), self.state_names.shared)

    def probe(
        self, arrays: Arrays, samples: Samples, most: int = PROBE_SAMPLES, extras: frozenset[str] = frozenset()
    ) -> dict[str, float]:
        """Mean loss and mean entropy of the predicted classes, -sum p ln p, on the first `most` samples.

        If `extras` names them also `rms_loss`, sqrt(mean loss^2), and `gradient_norm`, |d mean loss / d weights|.
        """
        if len(samples) == 0:
            raise ValueError("has no samples to probe the model on")
        model = self.fill(arrays).eval()
        x, y = self.to_device(samples).batch(slice(0, most))
        with one_thread(), torch.inference_mode():
            outputs = call_model(model, x)
            metrics = {"loss": float(self.loss(outputs, y))}
            if has_error_measures(self.loss, y):
                metrics["entropy"] = float(predictive_entropies(self.loss, outputs, y).mean())
            if "rms_loss" in extras:
                metrics["rms_loss"] = float(
                    losses_without_grad(self.loss, outputs, y).cpu().double().square().mean().sqrt()
                )
        if "gradient_norm" in extras:
            weights = [p for p in model.parameters() if p.requires_grad]
            with one_thread():
                slopes = torch.autograd.grad(self.loss(call_model(model, x), y), weights, allow_unused=True)
            metrics["gradient_norm"] = math.sqrt(
                sum(float(g.cpu().double().square().sum()) for g in slopes if g is not None)
            )
        return metrics

    def train(self, request: Request, site: Site, randomness: Randomness | None = None) -> Reply:
        """Train on one client's samples, batch by batch."""
        samples = self.to_device(Samples.of(site.data))
        config = request.config
        seed = int(config["seed"])
        round = int(config["round"])
        extras = read_extras(config, samples, self.loss)
        hyperparameters = self.hyperparameters(config)
        # Probes describe the received model, so they are computed before the first step.
        probed: dict[str, float] = {}
        if extras & PROBED:
            probed = self.probe(request.arrays, samples, probe_samples(config), extras)
        model = self.state_names.prepare(self.fill(request.arrays))
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        optimizer = self.make_optimizer(list(named.values()), hyperparameters, **self.pulls(named, request))
        if self.keep_optimizer:
            optimizer.load_state(site.state)
        place = self.torch_device()
        # Sums stay on the device: to read a number after each step would make Python wait for a GPU.
        total = torch.zeros((), device=place)
        right = torch.zeros((), dtype=torch.int64, device=place)
        errors = list[Tensor]()
        sizes = list[int]()
        draw = rng(seed, round, "transform", site.id) if self.transform is not None else None
        with one_thread(), (randomness or partial(seeded, device=place))(derive_seed(seed, round, "torch", site.id)):
            for batch in hyperparameters.plan(
                rng(seed, round, "batches", site.id), len(samples), self.needs_two_samples()
            ):
                x, y = samples.batch(batch)
                if self.transform is not None and draw is not None:
                    x = self.transform(x, draw)
                model.zero_grad()
                # Forward pass and loss only: torch advises against a backward pass under autocast.
                with autocast(place, self.precision):
                    outputs = call_model(model, x)
                    loss = self.loss(outputs, y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += loss.detach() * len(y)
                sizes.append(len(y))
                if is_classes(y):
                    right += (outputs.detach().argmax(-1) == y).sum()
                if "squared_errors" in extras:
                    errors.append(squared_errors(self.loss, outputs.detach(), y))
        metrics = training_metrics(float(total), int(right) if is_classes(samples.y) else None, sum(sizes))
        metrics |= {k: v for k, v in probed.items() if k in extras}
        if self.keep_optimizer:
            site.state.update(optimizer.state())
        noted: Arrays = {}
        if errors:
            noted = concatenate_errors([some.cpu().numpy() for some in errors])
        return Reply(arrays_of(model, self.state_names.shared), noted, metrics, len(samples))

    def hyperparameters(self, config: Mapping[str, Scalar]) -> LocalHyperparameters:
        """The hyperparameters of a round: those that the server sends, otherwise the configured and scheduled ones."""
        requested = read_hyperparameters(config)
        if self.steps and "epochs" in requested:
            raise Refused("told.epochs", f"this client trains {self.steps} steps, whatever the number of epochs")
        # A rate that the server sends is used as it is: the schedule multiplies the configured one only.
        lr = requested.get("lr")
        if lr is None:
            lr = self.lr * factor_of(self.schedule, int(config["round"]))
        epochs = requested.get("epochs", self.epochs)
        size = requested.get("batch_size", self.batch_size)
        return LocalHyperparameters(lr, epochs, self.steps, size, requested.get("mu", self.mu))

    def make_optimizer(
        self, weights: list[nn.Parameter], hyperparameters: LocalHyperparameters, **pulls: Any
    ) -> LocalOptimizer:
        """A new optimizer for these weights."""
        names = ("optimizer", "momentum", "weight_decay", "clip")
        given = {k: getattr(self, k) for k in names}
        return LocalOptimizer(
            weights, hyperparameters.mu, lr=hyperparameters.lr, scale=hyperparameters.lr / self.lr, **given, **pulls
        )

    def pulls(self, named: Mapping[str, nn.Parameter], request: Request) -> dict[str, list[Tensor]]:
        """The request's anchors and corrections of these weights as tensors on the training device."""
        pull = Pull.of(request)
        found = dict[str, list[Tensor]]()
        for key, arrays in (("anchors", pull.anchor), ("corrections", pull.correction)):
            if arrays:
                usual = request.arrays if key == "anchors" else {}
                values = [arrays.get(n, usual.get(n)) for n in named]
                pairs = zip(named.values(), values, strict=True)
                found[key] = [torch.zeros_like(p) if v is None else torch.from_numpy(v.copy()).to(p) for p, v in pairs]
        return found

    def make(self) -> nn.Module:
        """A new module for one thread, on the training device and in the memory layout that convolutions prefer."""
        # Initialisation draws from torch's global generator, which must stay as it is.
        with seeded(0):
            module: nn.Module = self.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.torch_device().type != "cpu":
            return module.to(self.torch_device())
        return module

    def torch_device(self) -> torch.device:
        """The device for training and evaluation, resolved once."""
        if "place" not in self._cache:

            def is_worth_it() -> bool:
                with seeded(0):
                    return is_heavy(self.model(), self.batch_size)

            place = find_device(self.device, is_worth_it)
            if self.precision != "float32" and place.type == "cpu":
                raise ValueError(f"precision={self.precision} is for a GPU; on the CPU it is slower: use float32")
            self._cache["place"] = place
        return self._cache["place"]  # type: ignore[no-any-return]

    def generator(self, seed: int) -> torch.Generator:
        """A generator with this seed on the training device."""
        return torch.Generator(self.torch_device()).manual_seed(seed)

    def to_device(self, samples: Samples) -> Samples:
        """The samples on the training device."""
        return samples.at(self.torch_device(), self._cache.setdefault("copies", DeviceCache()))

    def thread_module(self) -> nn.Module:
        """The module of this thread, created once; its weights are arbitrary."""
        if not hasattr(self._thread, "module"):
            self._thread.module = self.make()
        module: nn.Module = self._thread.module
        return module

    def fill(self, arrays: Arrays, module: nn.Module | None = None) -> nn.Module:
        """Load `arrays` into this thread's module, or into `module`; arrays that are not shared stay as they are."""
        module = module or self.thread_module()
        own = module.state_dict()
        names = self.state_names.shared
        if set(names) != arrays.keys():
            raise ValueError(f"the model's arrays are {', '.join(names)}; received {', '.join(arrays)}")
        with torch.no_grad():
            # torch.from_numpy warns about read-only arrays; "W" copies only those.
            for name in names:
                own[name].copy_(torch.from_numpy(np.require(arrays[name], requirements="W")))
        return module

    @property
    def state_names(self) -> StateNames:
        """Which arrays of the model are shared and which are frozen, determined once."""
        if "travel" not in self._cache:
            self._cache["travel"] = find_state_names(self.thread_module(), self.share)
        found: StateNames = self._cache["travel"]
        return found

    def frozen(self) -> Arrays:
        """The frozen arrays, which are never trained or shared."""
        if not self.state_names.frozen:
            return {}
        if "frozen" not in self._cache:
            self._cache["frozen"] = arrays_of(self.thread_module(), self.state_names.frozen)
        found: Arrays = self._cache["frozen"]
        return found

    def agreed(self) -> dict[str, str]:
        """Digests of what all parties must have in common: the frozen arrays' names, shapes and values."""
        if not self.state_names.frozen:
            return {}
        if "agreed" not in self._cache:
            self._cache["agreed"] = {"frozen": digest(self.frozen())}
        found: dict[str, str] = self._cache["agreed"]
        return found

    def check_request(self, config: Mapping[str, Scalar], data: Any = None) -> None:
        """Raise Refused, naming the entry, for an unknown hyperparameter or a different frozen part or class list."""
        read_hyperparameters(config)
        check_agreed(config, {**self.agreed(), **agreed_of(data)})

    def needs_two_samples(self) -> bool:
        """Whether the module cannot be trained on a batch of one sample (batch normalisation)."""
        if "two" not in self._cache:
            named = self.thread_module().named_modules()
            norms = {path for path, m in named if isinstance(m, nn.modules.batchnorm._BatchNorm)}
            self._cache["two"] = bool(norms - self.state_names.frozen_modules)
        return bool(self._cache["two"])

    def __getstate__(self) -> dict[str, Any]:
        # Modules belong to their threads, and compiled programs to their process.
        kept = {"_thread", "_cache"}
        return {k: v for k, v in self.__dict__.items() if k not in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _thread=threading.local(), _cache={})


def answer_or_failure(handler: AnyHandler, request: Request, site: Site) -> Reply | Failure:
    """One client's reply, or the failure that stands for its exception."""
    try:
        return handler(request, site)
    except Exception as error:  # a client may raise anything: it is its own failure alone
        return failure_of(error)


def answer_sequentially(handler: AnyHandler, requests: Requests, sites: Sites) -> Outcomes:
    """All clients' replies one after the other, sorted by client."""
    return {client: answer_or_failure(handler, requests[client], sites[client]) for client in sorted(requests)}
