"""A model and data from Python as a recipe: an object without a name, known by what was handed over."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional

from mutirao.api.data_partition import deal
from mutirao.api.input_data import Given, read_given
from mutirao.api.input_model import Model
from mutirao.config import OPTIMIZERS, Common, Part, nearest, setting
from mutirao.core.arrays import Array
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Exhibits, partition_of
from mutirao.experiments.task import PYTHON, Recipe, Task
from mutirao.metrics import evaluate_logits, regression_metrics
from mutirao.training.trainer import Trainer

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
