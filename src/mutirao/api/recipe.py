"""The recipe behind `mutirao.run(model, data)`: the user's objects become a task.

The recipe has no name; a run folder identifies it by the kinds and digests of what was passed.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mutirao.api.input_data import Given, Model, own_labels, read_given
from mutirao.config import OPTIMIZERS, Common, Part, build, nearest, setting
from mutirao.core.arrays import Array
from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts, partition_of
from mutirao.experiments.task import PYTHON, Recipe, Task
from mutirao.metrics import evaluate_logits, regression_metrics
from mutirao.partitioning import PartitionSummary, describe, split_test_set
from mutirao.randomness import derive_seed, rng
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import ClientData, Index, Samples, virtual_clients
from mutirao.training.trainer import Trainer

Labels = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class PartitionedData:
    """Clients with their data, the common test samples, and every client's samples by class."""

    population: Mapping[ClientId, Any]
    test: Samples
    about: PartitionSummary | None


def partition_data(given: Given, config: Any, share: float) -> PartitionedData:
    """The clients of a run; without a common test set, a `share` of the samples is held out as one."""
    if given.whole is not None:
        return partition_whole(given, given.whole, config, share)
    return assign_sets(given, config, share)


def partition_whole(given: Given, whole: Samples, config: Any, share: float) -> PartitionedData:
    """Split one data set by the configured partition; each client gets test samples of its own classes."""
    rows = rows_of(whole)
    test = given.test
    if test is None:
        rows, kept = hold_back(rows, share, rng(config.seed, 0, "test"))
        test = Samples(whole.x, whole.y, kept)
    y = whole.y.numpy()[rows]
    by = config.partition.name
    if not given.classes and by != "iid" and ":" not in by:
        raise ConfigError(
            f"partition={by}: this partition splits by class, but the labels are not classes; use partition=iid"
        )
    labels = y if y.ndim == 1 else np.zeros(len(y), np.int64)
    parts = build("partition", config.partition)(labels, clients=config.clients, rng=rng(config.seed, 0, "partition"))
    own = split_test_set(y, parts, own_labels(test), config.seed) if given.classes else []
    if not given.classes and len(test) >= len(parts):
        # Regression targets have no classes to match, so test samples are split evenly at random.
        own = np.array_split(rng(config.seed, 0, "own test").permutation(len(test)), len(parts))
    places = rows_of(test)
    storage = Samples(test.x, test.y)
    clients: Mapping[ClientId, Any] = virtual_clients(
        whole.x,
        whole.y,
        [rows[part] for part in parts],
        config.samples,
        derive_seed(config.seed, 0, "samples"),
        storage if own else None,
        [places[part] for part in own],
    )
    if config.centralised:
        clients = pool([Samples.of(clients[name]) for name in clients], test)
    return PartitionedData(clients, test, describe(y, parts) if given.classes else None)


def assign_sets(given: Given, config: Any, share: float) -> PartitionedData:
    """Take data that are already assigned to clients.

    Without a common test set, a client that has no test samples holds out a share of its own.
    """
    clients: dict[ClientId, Samples | ClientData] = {}
    for name in sorted(given.sets):
        train, own = given.sets[name]
        if own is None and given.test is None and len(train) > 1:
            rows, kept = hold_back(rows_of(train), share, rng(config.seed, 0, "test", name))
            own = Samples(train.x, train.y, kept)
            train = Samples(train.x, train.y, rows)
        if config.samples and len(train) > config.samples:
            sampled = rng(config.seed, 0, "samples", name).choice(len(train), config.samples, replace=False)
            train = Samples(train.x, train.y, rows_of(train)[np.sort(sampled)])
        clients[name] = train if own is None else ClientData(train, own)
    tests = [c.test for c in clients.values() if isinstance(c, ClientData)]
    test = given.test or join(tests, "tests of clients")
    trained = [Samples.of(c) for c in clients.values()]
    about = describe_sets([own_labels(samples) for samples in trained]) if given.classes else None
    return PartitionedData(pool(trained, test) if config.centralised else clients, test, about)


def rows_of(samples: Samples) -> Index:
    """Positions of the samples in their storage."""
    if samples.index is None:
        return np.arange(len(samples.y))
    return samples.index


def pool(trained: Sequence[Samples], test: Samples) -> dict[ClientId, ClientData]:
    """One client with the data of all others: the centralised reference."""
    return {"pooled": ClientData(join(trained, "samples of clients"), test)}


def hold_back(rows: Index, share: float, rng: np.random.Generator) -> tuple[Index, Index]:
    """Split rows at random into training rows and a test share, at least one of each."""
    if len(rows) < 2:
        raise ConfigError("test: one sample cannot be split into training and test samples")
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    kept = np.zeros(len(rows), bool)
    kept[rng.permutation(len(rows))[:count]] = True
    return rows[~kept], rows[kept]


def join(sets: Sequence[Samples], what: str) -> Samples:
    """Concatenate data sets, without a copy if they share one storage."""
    if not sets:
        raise ConfigError("test: no client has test samples; pass test= a data set")
    first = sets[0]
    if all(one.y is first.y for one in sets) and all(one.index is not None for one in sets):
        return Samples(first.x, first.y, np.concatenate([one.index for one in sets if one.index is not None]))
    if any(isinstance(one.x, LazyInputs) for one in sets):
        raise ConfigError(f"data: {what} that do not fit in memory cannot be put together; give test= a set of its own")
    if any(one.kind != first.kind for one in sets):
        raise ConfigError(f"data: {what} differ in shape or type: {first.kind} and others")
    batches = [one.batch(slice(0, len(one))) for one in sets]
    x = batches[0][0]
    y = torch.cat([labels for _, labels in batches])
    if isinstance(x, dict):
        return Samples({name: torch.cat([b[name] for b, _ in batches]) for name in x}, y)
    if isinstance(x, tuple):
        return Samples(tuple(torch.cat(parts) for parts in zip(*(b for b, _ in batches), strict=True)), y)
    return Samples(torch.cat([b for b, _ in batches]), y)


def describe_sets(labels: Sequence[Labels]) -> PartitionSummary:
    """How many samples of each class every client has."""
    ends = np.cumsum([len(y) for y in labels])
    return describe(np.concatenate(labels), [np.arange(end - len(y), end) for y, end in zip(labels, ends, strict=True)])


log = logging.getLogger("mutirao")

OBJECTS = ("model", "data", "test", "loss", "transform")
# Reported metrics; the first chooses the best round.
CLASSES = ("accuracy", "balanced_accuracy", "f1", "log_loss", "auc")
NUMBERS = ("rmse", "mae", "r2")
SHARE = 0.2  # of the samples, held out for testing


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of a run from Python; the objects that were passed are recorded by kind and digest."""

    data: str = setting("", "the data that were passed: kind, sizes and digest")
    model: str = setting("", "the module that was passed: its class and digest")
    test: str = setting("", "what the model is evaluated on: a held-out share, or a test set passed with the data")
    loss: str = setting("", "the loss that was passed, or the usual one for such labels")
    transform: str = setting("", "the transform of batches that was passed")
    optimizer: str = setting("sgd", "optimizer of the clients, or the name of the one that was passed")
    partition: Part = setting(
        Part("dirichlet", {"alpha": 0.5}, "mutirao.api.partitions"), "how samples are assigned to clients"
    )


@dataclass(frozen=True)
class Handed:
    """The objects that were passed to `mutirao.run`, and the settings that record them."""

    model: Model
    given: Given
    share: float
    loss: Callable[[Tensor, Tensor], Tensor]
    transform: Callable[..., Any] | None
    optimizers: dict[str, Callable[..., Any]] = field(default_factory=dict)  # of one's own, by name

    @classmethod
    def of(
        cls,
        model: Any,
        data: Any,
        *,
        target: str | None = None,
        client: str | None = None,
        test: Any = None,
        loss: Any = None,
        transform: Any = None,
        partitioner: Any = None,
    ) -> "Handed":
        """Read everything once; raises ConfigError, in one line, for what cannot be used."""
        if data is None:
            raise ConfigError("data: expected data for the model, got None; call mutirao.run(model, data)")
        for name, given in (("loss", loss), ("transform", transform)):
            if given is not None and not callable(given):
                raise ConfigError(f"{name}: {given!r} cannot be called; give a function")
        # `test` is a share of the data, or a data set.
        share = SHARE
        tests = test
        if is_number(test):
            share = test
            tests = None
        if not 0 < share < 1:
            raise ConfigError(f"test: expected a share between 0 and 1 or a data set, got {share!r}")
        found = read_given(data, target, client, tests, partitioner)
        usual = functional.cross_entropy if found.counts else squared_error
        return cls(Model.of(model), found, float(share), loss or usual, transform)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that record these objects in config.toml."""
        assigned: dict[str, Any] = {"clients": len(self.given.sets), "partition": "dealt"}
        settings = {
            "model": self.model.summary,
            "data": self.given.summary,
            "test": "handed over" if self.given.test is not None else f"{self.share:g}",
            "loss": display_name(self.loss),
            "transform": display_name(self.transform) if self.transform else "",
        }
        if self.given.whole is None:
            return settings | assigned
        if self.given.classes:
            return settings
        return settings | {"partition": "iid"}

    def take(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords as settings: a custom optimizer by its name, and nothing that the data decide."""
        decided = self.settings
        if taken := [key for key in OBJECTS if key in keywords]:
            raise ConfigError(f"{taken[0]}: it is an argument of mutirao.run, not a setting")
        for key in ("clients", "partition"):
            if self.given.whole is None and keywords.get(key, decided[key]) != decided[key]:
                raise ConfigError(
                    f"{key}: the data are already assigned to {len(self.given.sets)} clients; leave it out"
                )
        optimizer = keywords.get("optimizer", "sgd")
        if callable(optimizer):
            name = display_name(optimizer)
            if self.optimizers.setdefault(name, optimizer) is not optimizer:
                raise ConfigError(f"optimizer: two are called {name!r}; give each a function of its own name")
            return {**keywords, "optimizer": name}
        if optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer: {optimizer!r} is not a choice{nearest(str(optimizer), OPTIMIZERS)}")
        return dict(keywords)

    def recipe(self) -> Recipe:
        """The recipe of these objects."""
        return Recipe(Config, self.task, name=PYTHON)

    def task(self, config: Config) -> Task:
        """Clients with their data, the trainer, and the usual metrics for such labels."""
        found = partition_data(self.given, config, self.share)
        own: dict[str, Any] = {"transform": self.transform} if self.transform else {}
        own["optimizer"] = self.optimizers.get(config.optimizer, config.optimizer)
        trainer = Trainer.of(config, self.model.make, loss=self.loss, figures=metrics_of(self.given), **own)
        log.info("%s; %s; %s", config.model, config.data, f"loss {config.loss}, evaluated on {len(found.test)} samples")
        names = CLASSES if self.given.counts else NUMBERS
        about = found.about
        exhibits = Artifacts()
        if about is not None and not config.centralised:
            exhibits = partition_of(lambda: about)
        return Task(
            handler=trainer,
            population=found.population,
            initial=lambda: trainer.initial(config.seed),
            evaluate=lambda arrays: trainer.evaluate(arrays, found.test),
            judge=names[0],
            metrics=(*names, "loss"),
            exhibits=exhibits,
            classes=len(self.given.classes) or None,
        )


def metrics_of(given: Given) -> Callable[[Array, Array], Mapping[str, float]]:
    """The usual metrics for such labels; only accuracy where an output is not a row of class scores."""

    def class_metrics(outputs: Array, labels: Array) -> dict[str, float]:
        if outputs.ndim == 2 and labels.ndim == 1:
            return evaluate_logits(outputs, labels)
        return {}

    if given.counts:
        return class_metrics
    return regression_metrics


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean squared error; a single output column is flattened, where broadcasting would compare all pairs."""
    if outputs.shape != y.shape and outputs.numel() == y.numel():
        outputs = outputs.reshape(y.shape)
    return functional.mse_loss(outputs, y)


def is_number(value: Any) -> bool:
    """Whether it is one number, and not a data set."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and not math.isnan(value)


def display_name(what: Any) -> str:
    """The name of a function, or how an object prints, without line breaks."""
    text = getattr(what, "__qualname__", "") or repr(what)
    # With a colon it would look like the name of code, which a configuration must not name without consent.
    return " ".join(text.replace(":", " ").split())[:200]
