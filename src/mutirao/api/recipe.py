"""A model and data from Python as a recipe: an object without a name, known by what was handed over."""

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

from mutirao.api.input_data import Given, own_labels, read_given
from mutirao.api.input_model import Model
from mutirao.config import OPTIMIZERS, Common, Part, build, nearest, setting
from mutirao.core.arrays import Array
from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Exhibits, partition_of
from mutirao.experiments.task import PYTHON, Recipe, Task
from mutirao.metrics import evaluate_logits, regression_metrics
from mutirao.partitioning import PartitionSummary, describe, split_test_set
from mutirao.randomness import derive_seed, rng
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import ClientData, Index, Samples, virtual_clients
from mutirao.training.trainer import Trainer

Labels = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Deal:
    """Clients with their data, the samples that judge the model, and who has how many of which class."""

    population: Mapping[ClientId, Any]
    test: Samples
    about: PartitionSummary | None


def deal(given: Given, config: Any, share: float) -> Deal:
    """The clients of a run; without a common test set, a `share` of the samples is kept back for it."""
    return deal_out(given, given.whole, config, share) if given.whole is not None else hand_out(given, config, share)


def deal_out(given: Given, whole: Samples, config: Any, share: float) -> Deal:
    """One set dealt by the configuration's partition; clients judge by test samples of their own classes."""
    rows, test = rows_of(whole), given.test
    if test is None:
        rows, kept = hold_back(rows, share, rng(config.seed, 0, "test"))
        test = Samples(whole.x, whole.y, kept)
    y = whole.y.numpy()[rows]
    by = config.partition.name
    if not given.classes and by != "iid" and ":" not in by:
        raise ConfigError(f"partition={by}: it deals by class, and these labels are no classes; use iid")
    labels = y if y.ndim == 1 else np.zeros(len(y), np.int64)
    parts = build("partition", config.partition)(labels, clients=config.clients, rng=rng(config.seed, 0, "partition"))
    own = split_test_set(y, parts, own_labels(test), config.seed) if given.classes else []
    if not given.classes and len(test) >= len(parts):  # numbers have no classes to be alike in: each gets its share
        own = np.array_split(rng(config.seed, 0, "own test").permutation(len(test)), len(parts))
    places, storage = rows_of(test), Samples(test.x, test.y)
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
    return Deal(clients, test, describe(y, parts) if given.classes else None)


def hand_out(given: Given, config: Any, share: float) -> Deal:
    """Sets that come dealt; who has no test samples keeps a share of its own back, if there is no common test set."""
    clients: dict[ClientId, Samples | ClientData] = {}
    for name in sorted(given.sets):
        train, own = given.sets[name]
        if own is None and given.test is None and len(train) > 1:
            rows, kept = hold_back(rows_of(train), share, rng(config.seed, 0, "test", name))
            train, own = Samples(train.x, train.y, rows), Samples(train.x, train.y, kept)
        if config.samples and len(train) > config.samples:
            drawn = rng(config.seed, 0, "samples", name).choice(len(train), config.samples, replace=False)
            train = Samples(train.x, train.y, rows_of(train)[np.sort(drawn)])
        clients[name] = train if own is None else ClientData(train, own)
    tests = [c.test for c in clients.values() if isinstance(c, ClientData)]
    test = given.test or join(tests, "tests of clients")
    trained = [Samples.of(c) for c in clients.values()]
    about = describe_sets([own_labels(samples) for samples in trained]) if given.classes else None
    return Deal(pool(trained, test) if config.centralised else clients, test, about)


def rows_of(samples: Samples) -> Index:
    """Where the samples lie in their storage."""
    return np.arange(len(samples.y)) if samples.index is None else samples.index


def pool(trained: Sequence[Samples], test: Samples) -> dict[ClientId, ClientData]:
    """One client with all that the others have: the centralised reference."""
    return {"pooled": ClientData(join(trained, "samples of clients"), test)}


def hold_back(rows: Index, share: float, rng: np.random.Generator) -> tuple[Index, Index]:
    """The rows to train on and a share of them to judge by, one of each at least."""
    if len(rows) < 2:
        raise ConfigError("test: one sample cannot be parted into some to train on and some to judge by")
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    kept = np.zeros(len(rows), bool)
    kept[rng.permutation(len(rows))[:count]] = True
    return rows[~kept], rows[kept]


def join(sets: Sequence[Samples], what: str) -> Samples:
    """Several sets as one, without a copy if they share a storage."""
    if not sets:
        raise ConfigError("test: no client has samples to judge by; give test= a data set")
    first = sets[0]
    if all(one.y is first.y for one in sets) and all(one.index is not None for one in sets):
        return Samples(first.x, first.y, np.concatenate([one.index for one in sets if one.index is not None]))
    if any(isinstance(one.x, LazyInputs) for one in sets):
        raise ConfigError(f"data: {what} that do not fit in memory cannot be put together; give test= a set of its own")
    if any(one.kind != first.kind for one in sets):
        raise ConfigError(f"data: {what} differ in shape or type: {first.kind} and others")
    batches = [one.batch(slice(0, len(one))) for one in sets]
    x, y = batches[0][0], torch.cat([labels for _, labels in batches])
    if isinstance(x, dict):
        return Samples({name: torch.cat([b[name] for b, _ in batches]) for name in x}, y)
    if isinstance(x, tuple):
        return Samples(tuple(torch.cat(parts) for parts in zip(*(b for b, _ in batches), strict=True)), y)
    return Samples(torch.cat([b for b, _ in batches]), y)


def describe_sets(labels: Sequence[Labels]) -> PartitionSummary:
    """Who has how many of which class, of sets that come dealt."""
    ends = np.cumsum([len(y) for y in labels])
    return describe(np.concatenate(labels), [np.arange(end - len(y), end) for y, end in zip(labels, ends, strict=True)])


log = logging.getLogger("mutirao")

OBJECTS = ("model", "data", "test", "loss", "transform")
CLASSES = ("accuracy", "balanced_accuracy", "f1", "log_loss", "auc")  # what is told of each, the judge first
NUMBERS = ("rmse", "mae", "r2")
SHARE = 0.2  # of the samples, kept back to judge by


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of a run from Python; what was handed over is named by kind and digest."""

    data: str = setting("", "the data that were handed over: kind, sizes and digest")
    model: str = setting("", "the module that was handed over: its class and digest")
    test: str = setting("", "what the model is judged by: a share kept back, or a set handed over with the data")
    loss: str = setting("", "the loss that was handed over, or the usual one of such labels")
    transform: str = setting("", "the change of batches that was handed over")
    optimizer: str = setting("sgd", "optimiser of the clients, or the name of the one that was handed over")
    partition: Part = setting(
        Part("dirichlet", {"alpha": 0.5}, "mutirao.api.partitions"), "how samples are dealt to clients"
    )


@dataclass(frozen=True)
class Handed:
    """What was handed over, and the settings that tell of it."""

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
        dealer: Any = None,
    ) -> "Handed":
        """Read it all once; ConfigError, in one line, for what cannot be used."""
        if data is None:
            raise ConfigError("data: there are none; mutirao.run(model, data) takes both, or a recipe's name alone")
        for name, given in (("loss", loss), ("transform", transform)):
            if given is not None and not callable(given):
                raise ConfigError(f"{name}: {given!r} cannot be called; give a function")
        share, tests = (SHARE, None) if test is None else (test, None) if is_number(test) else (SHARE, test)
        if not 0 < share < 1:
            raise ConfigError(f"test: {share!r} is no share of the samples; give one between 0 and 1, or a data set")
        found = read_given(data, target, client, tests, dealer)
        usual = functional.cross_entropy if found.counts else squared_error
        return cls(Model.of(model), found, float(share), loss or usual, transform)

    @property
    def settings(self) -> dict[str, Any]:
        """What the configuration says of it."""
        dealt: dict[str, Any] = {"clients": len(self.given.sets), "partition": "dealt"}
        told = {
            "model": self.model.told,
            "data": self.given.told,
            "test": "handed over" if self.given.test is not None else f"{self.share:g}",
            "loss": called(self.loss),
            "transform": called(self.transform) if self.transform else "",
        }
        if self.given.whole is None:
            return told | dealt
        return told if self.given.classes else told | {"partition": "iid"}

    def take(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords as settings: an optimiser of one's own by its name, and nothing that the data have decided."""
        decided = self.settings
        if taken := [key for key in OBJECTS if key in keywords]:
            raise ConfigError(f"{taken[0]}: it is handed over once, and no setting")
        for key in ("clients", "partition") if self.given.whole is None else ():
            if keywords.get(key, decided[key]) != decided[key]:
                raise ConfigError(f"{key}: the data come dealt to {len(self.given.sets)} clients; leave it out")
        optimizer = keywords.get("optimizer", "sgd")
        if callable(optimizer):
            name = called(optimizer)
            if self.optimizers.setdefault(name, optimizer) is not optimizer:
                raise ConfigError(f"optimizer: two are called {name!r}; give each a function of its own name")
            return {**keywords, "optimizer": name}
        if optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer: {optimizer!r} is not a choice{nearest(str(optimizer), OPTIMIZERS)}")
        return dict(keywords)

    def recipe(self) -> Recipe:
        """The recipe of these objects; its runs are made as those of any other."""
        return Recipe(Config, self.task, name=PYTHON)

    def task(self, config: Config) -> Task:
        """The clients with their data, the trainer, and the figures that are usual for such labels."""
        found = deal(self.given, config, self.share)
        own: dict[str, Any] = {"transform": self.transform} if self.transform else {}
        own["optimizer"] = self.optimizers.get(config.optimizer, config.optimizer)
        trainer = Trainer.of(config, self.model.make, loss=self.loss, figures=figures_of(self.given), **own)
        log.info("%s; %s; %s", config.model, config.data, f"loss {config.loss}, judged by {len(found.test)} samples")
        names = CLASSES if self.given.counts else NUMBERS
        about = found.about
        return Task(
            handler=trainer,
            population=found.population,
            initial=lambda: trainer.initial(config.seed),
            evaluate=lambda arrays: trainer.evaluate(arrays, found.test),
            judge=names[0],
            metrics=(*names, "loss"),
            exhibits=Exhibits() if about is None or config.centralised else partition_of(lambda: about),
            classes=len(self.given.classes) or None,
        )


def figures_of(given: Given) -> Callable[[Array, Array], Mapping[str, float]]:
    """What is usually asked of a model of such labels; accuracy alone where an output is no row of classes."""

    def judge(outputs: Array, labels: Array) -> dict[str, float]:
        return evaluate_logits(outputs, labels) if outputs.ndim == 2 and labels.ndim == 1 else {}

    return judge if given.counts else regression_metrics


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean squared error; an output of one column is that column, where plain broadcasting would compare all pairs."""
    same = outputs.shape != y.shape and outputs.numel() == y.numel()
    return functional.mse_loss(outputs.reshape(y.shape) if same else outputs, y)


def is_number(value: Any) -> bool:
    """Whether it is one number, and not data."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and not math.isnan(value)


def called(what: Any) -> str:
    """The name of a function, or how an object prints, without line breaks."""
    text = getattr(what, "__qualname__", "") or repr(what)
    return " ".join(text.replace(":", " ").split())[:200]  # with a colon it would look like the name of code
