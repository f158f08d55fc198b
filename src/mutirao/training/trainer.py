"""What a client does with a torch module: train it on its own samples, or judge it on them."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.config import Common
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, Site
from mutirao.randomness import number, rng
from mutirao.training.samples import Index, Samples

Loss = Callable[[Tensor, Tensor], Tensor]
Randomness = Callable[[int], contextlib.AbstractContextManager[Any]]
PROBE_SAMPLES = 100
PROBED = frozenset({"entropy", "rms_loss", "gradient_norm"})  # what is measured on the model as it was received
EXTRAS = PROBED | {"squared_errors"}  # what a request to train may ask for


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
    workers: int = field(default=0, repr=False, compare=False)  # 0: one a core; no result depends on it
    _own: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)
    _recorded: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # by the engine

    provides = frozenset(
        {"metrics:loss", "metrics:accuracy", "extras:squared_errors", "config:mu", "config:probe_samples"}
        | {f"metrics:{name}" for name in PROBED}
    )

    @classmethod
    def of(cls, config: Common, model: Callable[[], nn.Module], **more: Any) -> "Trainer":
        """A trainer with the settings every recipe shares."""
        names = ("optimizer", "lr", "momentum", "weight_decay", "epochs", "batch_size", "clip", "engine")
        return cls(model, **{k: getattr(config, k) for k in names} | more)

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer a request to `train`, to `evaluate` or to `probe`."""
        if request.do == "train":
            return self.train(request, site)
        samples = Samples.of(site.data)
        if request.do == "evaluate":
            return Reply({}, metrics=self.evaluate(request.arrays, samples), n=len(samples))
        if request.do == "probe":
            most, extras = probe_samples(request.config), wanted(request.config, samples)
            return Reply({}, metrics=self.probe(request.arrays, samples, most, extras), n=len(samples))
        raise ValueError(f"a Trainer can train, evaluate and probe, not {request.do!r}")

    def many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        """The same answers for many clients at once, the fastest way; `engine` may name another way."""
        from mutirao.training.engine import answer_many  # late: the engine is written in terms of this module

        return answer_many(self, requests, sites)

    def initial(self, seed: int) -> Arrays:
        """The arrays of a fresh model; the seed decides them."""
        with seeded(number(seed, 0, "initial")):
            return arrays_of(self.model())

    def evaluate(self, arrays: Arrays, samples: Samples) -> dict[str, float]:
        """Mean loss, and accuracy where the labels are classes."""
        from mutirao.training.engine import judge  # late, as above

        return judge(self, arrays, samples)

    def probe(
        self, arrays: Arrays, samples: Samples, most: int = PROBE_SAMPLES, extras: frozenset[str] = frozenset()
    ) -> dict[str, float]:
        """Mean loss and mean entropy of the predicted classes, -sum p ln p, on the first `most` samples.

        If `extras` names them also `rms_loss`, sqrt(mean loss^2), and `gradient_norm`, |d mean loss / d weights|.
        """
        if len(samples) == 0:
            raise ValueError("has no samples to be probed on")
        model = self.filled(arrays).eval()
        x, y = samples.batch(slice(0, most))
        with one_thread(), torch.inference_mode():
            outputs = model(x)
            metrics = {"loss": float(self.loss(outputs, y))}
            if is_classes(y):
                metrics["entropy"] = float(entropies(outputs).mean())
            if "rms_loss" in extras:
                from mutirao.training.engine.rows import noted_losses  # late, as above

                metrics["rms_loss"] = float(noted_losses(self.loss, outputs, y).double().square().mean().sqrt())
        if "gradient_norm" in extras:
            weights = [p for p in model.parameters() if p.requires_grad]
            with one_thread():
                slopes = torch.autograd.grad(self.loss(model(x), y), weights, allow_unused=True)
            metrics["gradient_norm"] = math.sqrt(sum(float(g.double().square().sum()) for g in slopes if g is not None))
        return metrics

    def train(self, request: Request, site: Site, randomness: "Randomness | None" = None) -> Reply:
        """The plain path, and the reference for every faster one: one client, batch by batch."""
        samples, config = Samples.of(site.data), request.config
        seed, round, extras = int(config["seed"]), int(config["round"]), wanted(config, samples)
        mu = float(config.get("mu", self.mu))
        probed = self.probe(request.arrays, samples, probe_samples(config), extras) if extras & PROBED else {}
        model = self.filled(request.arrays).train()
        weights = [p for p in model.parameters() if p.requires_grad]
        descent = Descent(self, weights, mu)
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
        metrics = metrics_of(float(total), int(right) if is_classes(samples.y) else None, sum(sizes))
        metrics |= {k: v for k, v in probed.items() if k in extras}
        noted = extras_of(torch.cat(errors).numpy(), sizes) if errors else {}
        return Reply(arrays_of(model), noted, metrics, len(samples))

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

    def blank(self) -> nn.Module:
        """This thread's own module, whatever it holds; made once, laid out as convolutions like it best."""
        if not hasattr(self._own, "module"):
            with seeded(0):  # making it must not move anybody's randomness
                self._own.module = self.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if self.engine in ("auto", "threads"):
                from mutirao.training.engine.winograd import hastened  # late, as above

                hastened(self._own.module)
        module: nn.Module = self._own.module
        return module

    def filled(self, arrays: Arrays) -> nn.Module:
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


class Descent:
    """SGD or Adam, bit for bit as in torch.optim, whose first use would import torch's compiler, for seconds.

    FedProx's pull mu (w - w_start) is added to the gradients, and the trainer's `clip` shortens them, before a step.
    """

    def __init__(self, trainer: Trainer, weights: list[nn.Parameter], mu: float = 0.0) -> None:
        if trainer.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer {trainer.optimizer!r} is not one of sgd, adam")
        self.trainer, self.weights, self.mu = trainer, weights, mu
        self.start = [p.detach().clone() for p in weights] if mu else []
        self.moments: dict[int, list[Tensor]] = {}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights along their gradients."""
        trainer, self.count = self.trainer, self.count + 1
        for p, origin in zip(self.weights, self.start, strict=False):
            if p.grad is not None:
                p.grad.add_(p - origin, alpha=self.mu)
        if trainer.clip:
            nn.utils.clip_grad_norm_(self.weights, trainer.clip)
        for i, p in enumerate(self.weights):
            if p.grad is None:
                continue
            g = p.grad.add(p, alpha=trainer.weight_decay) if trainer.weight_decay else p.grad
            if trainer.optimizer == "adam":
                m, v = self.moments.setdefault(i, [torch.zeros_like(p), torch.zeros_like(p)])
                m.lerp_(g, 0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                spread = (v.sqrt() / math.sqrt(1 - 0.999**self.count)).add_(1e-8)
                p.addcdiv_(m, spread, value=-trainer.lr / (1 - 0.9**self.count))
            elif trainer.momentum:
                if i in self.moments:
                    self.moments[i][0].mul_(trainer.momentum).add_(g)
                else:
                    self.moments[i] = [g.clone()]
                p.add_(self.moments[i][0], alpha=-trainer.lr)
            else:
                p.add_(g, alpha=-trainer.lr)


def arrays_of(model: nn.Module) -> Arrays:
    """Parameters and buffers of a module as NumPy copies."""
    return {k: v.detach().cpu().numpy().copy() for k, v in model.state_dict().items()}


def metrics_of(total: float, right: int | None, seen: int) -> dict[str, float]:
    """Mean loss and, where the labels are classes, accuracy, from sums over samples."""
    metrics = {"loss": float(total) / seen}
    return metrics if right is None else metrics | {"accuracy": right / seen}


def errors_of(found: Tensor, y: Tensor) -> Tensor:
    """The squared error of each sample, (predicted class - grade)^2, as a byte."""
    errors = (found - y).square()
    if errors.numel() and int(errors.max()) > 255:
        raise ValueError("squared errors do not fit a byte: they are for up to 16 grades")
    return errors.to(torch.uint8)


def extras_of(errors: npt.NDArray[np.uint8], sizes: Sequence[int] | npt.NDArray[np.int64]) -> Arrays:
    """Squared errors in the order of the batches, and how many samples each batch had."""
    return {"squared_errors": errors, "batch_sizes": np.asarray(sizes, np.int32)}


def entropies(outputs: Tensor) -> Tensor:
    """The entropy of each sample's predicted classes, -sum p ln p."""
    logs = functional.log_softmax(outputs, -1)
    return -(logs.exp() * logs).sum(-1)


def wanted(config: Mapping[str, Scalar], samples: Samples) -> frozenset[str]:
    """What a training request wants besides arrays: its `extras`, separated by commas."""
    names = frozenset(name.strip() for name in str(config.get("extras", "")).split(",") if name.strip())
    if names - EXTRAS:
        raise ValueError(f"there are no extras {', '.join(sorted(names - EXTRAS))}, only {', '.join(sorted(EXTRAS))}")
    if (classes := names & {"entropy", "squared_errors"}) and not is_classes(samples.y):
        raise ValueError(f"{', '.join(sorted(classes))}: only where the labels are classes")
    return names


def probe_samples(config: Mapping[str, Scalar]) -> int:
    """On how many samples at most a model is probed."""
    return int(config.get("probe_samples", PROBE_SAMPLES))


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
