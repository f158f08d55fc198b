"""A client with a table: it tells its profile, keeps to the schema agreed on, and trains on what that makes of it.

The schema comes with every request and nothing is kept at the site, so that one that restarts needs no memory.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.nn import functional

from mutirao.config import Common
from mutirao.core.agreement import AGREE, PROFILE, bytes_to_extra, digest_of
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply, Request, Site
from mutirao.core.parts import AnyHandler
from mutirao.errors import Refused
from mutirao.metrics import evaluate_logits, regression_metrics
from mutirao.personalization import Settings as Personal
from mutirao.personalization.handler import WHOLE_MODEL_ONLY, PersonalTrainer
from mutirao.privacy import DPSGD
from mutirao.systems.tabular.client_tables import Held
from mutirao.systems.tabular.schema import SCHEMA, Schema, Task, read_schema
from mutirao.systems.tabular.table_profile import tell_profile
from mutirao.training.samples import ClientData, Samples
from mutirao.training.shared_encoding import agreed_content, answer_many, without_agreement
from mutirao.training.trainer import Trainer

log = logging.getLogger("mutirao")

KEPT = 4096  # clients whose encoded rows a process keeps


def make_network(model: str, inputs: int, outputs: int, hidden: int, layers: int) -> nn.Module:
    """A linear model, or a dense network with ReLU between its layers."""
    if model == "linear":
        return nn.Linear(inputs, outputs)
    widths = [inputs, *[hidden] * layers]
    body = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(widths[-1], outputs))


def judge_numbers(mean: float, std: float, outputs: npt.ArrayLike, targets: npt.ArrayLike) -> dict[str, float]:
    """Figures of predictions in the units of the target."""
    p, t = (mean + std * np.asarray(v, np.float64) for v in (outputs, targets))
    return regression_metrics(p, t)


@dataclass(frozen=True, eq=False)
class Trainers:
    """The trainer for a schema, by the recipe's settings."""

    config: Common
    model: str
    hidden: int
    layers: int

    def __call__(self, schema: Schema) -> Trainer:
        """One trainer for all schemas of one shape."""
        return trainer_for(self, schema)


@lru_cache(maxsize=16)
def trainer_for(made: Trainers, schema: Schema) -> Trainer:
    """The trainer, made once, because it keeps modules and programs."""
    network = partial(make_network, made.model, schema.inputs, schema.outputs, made.hidden, made.layers)
    if schema.task == "classification":
        return Trainer.of(made.config, network, figures=evaluate_logits)
    judge = partial(judge_numbers, schema.mean, schema.std)
    return Trainer.of(made.config, network, loss=functional.mse_loss, figures=judge)


@lru_cache(maxsize=16)
def personal_for(made: Trainers, schema: Schema, personal: Personal) -> PersonalTrainer:
    """The same for clients with a model of their own."""
    trainer: PersonalTrainer = trainer_for(made, schema).personal_training(personal)
    return trainer


class Encoded:
    """Rows as the schema makes them, of the clients asked last: they are the same in every round."""

    def __init__(self) -> None:
        self.made: OrderedDict[tuple[ClientId, str], tuple[Held, ClientData]] = OrderedDict()
        self.lock = threading.Lock()

    def __call__(self, client: ClientId, held: Held, schema: Schema, digest: str) -> ClientData:
        """A client's samples."""
        with self.lock:
            found = self.made.get((client, digest))
            if found is not None and found[0] is held:
                return found[1]
        made = encode_held(client, held, schema)
        with self.lock:
            self.made[client, digest] = held, made
            while len(self.made) > KEPT:
                self.made.popitem(last=False)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def encode_held(client: ClientId, held: Held, schema: Schema) -> ClientData:
    """What a client trains on and judges by."""
    x, y, lost = schema.encode(held.train, held.targets)
    x_test, y_test, lost_test = schema.encode(held.test, held.kept)
    if lost + lost_test:
        log.warning("%s: %d rows have a target that is not agreed on, and are left out", client, lost + lost_test)
    return ClientData(Samples(x, y), Samples(x_test, y_test))


@dataclass(frozen=True)
class TableClient:
    """A handler around a `Trainer`: it answers `profile` and `agree`, and the rest by the schema in the request.

    With `own`, a schema that this party was given beforehand, no other one is taken, and no profile is told.
    """

    trainers: Trainers
    target: str
    task: Task
    least: int
    own: bytes = b""
    privacy: DPSGD | None = None
    personal: Personal | None = None
    encoded: Encoded = field(default_factory=Encoded, compare=False, repr=False)

    @property
    def figures(self) -> Any:
        """What its trainers judge by besides loss and accuracy."""
        return evaluate_logits if self.task == "classification" else regression_metrics

    @property
    def provides(self) -> frozenset[str]:
        """What the trainer does: of numbers there is no accuracy."""
        if self.privacy is not None:
            return frozenset({"metrics:epsilon", "metrics:epsilon_next", "config:mu"})
        plain = Trainer.of(self.trainers.config, nn.Identity)  # what is provided depends on the settings alone
        whole = self.personal is None or self.personal.whole
        given = plain.provides if whole else plain.provides - WHOLE_MODEL_ONLY
        return given - ({"metrics:accuracy"} if self.task == "regression" else set())

    def agreed(self) -> Mapping[str, str]:
        """The schema this party was given, by its digest."""
        return {SCHEMA: digest_of(self.own)} if self.own else {}

    def own_schema(self) -> Schema:
        """The schema this party was given."""
        return read_schema(self.own)

    def private_training(self, privacy: DPSGD) -> AnyHandler:
        """The same with private gradients."""
        return replace(self, privacy=privacy)

    def personal_training(self, personal: Personal) -> AnyHandler:
        """The same with a model of each client's own."""
        return replace(self, personal=personal)

    def initial(self, schema: Schema, seed: int) -> Arrays:
        """What travels of a fresh model."""
        if self.personal is not None:
            return personal_for(self.trainers, schema, self.personal).initial(seed)
        return self.trainers(schema).initial(seed)

    def shared(self, arrays: Arrays) -> Arrays:
        """What travels of a whole model, if there is one yet."""
        if self.personal is None or not arrays:
            return arrays
        return personal_for(self.trainers, self.own_schema(), self.personal).shared(arrays)

    def handler(self, schema: Schema) -> AnyHandler:
        """Who trains."""
        if self.personal is not None:
            return personal_for(self.trainers, schema, self.personal)
        trainer = self.trainers(schema)
        return trainer if self.privacy is None else trainer.private_training(self.privacy)

    def schema_in(self, request: Request) -> Schema:
        """The schema that goes with a request, if it is the one agreed on and about what is predicted here."""
        content = agreed_content(request, SCHEMA, self.own)
        try:
            schema = read_schema(content)
        except ValueError as error:
            raise Refused("agreed.schema", str(error)) from error
        if (schema.target, schema.task) != (self.target, self.task):
            here = f"{self.task} of {self.target!r}"
            raise Refused("agreed.schema", f"it is about {schema.task} of {schema.target!r}, and here it is {here}")
        return schema

    def prepare(self, request: Request, site: Site) -> tuple[Schema, Request, Site]:
        """What the trainer is asked: the request without the schema, on samples instead of a table."""
        schema = self.schema_in(request)
        data = self.encoded(site.id, site.data, schema, digest_of(schema.content()))
        return schema, without_agreement(request, SCHEMA), Site(site.id, data, site.state)

    def agree(self, request: Request, site: Site) -> None:
        """Refused if the table has other columns than the schema, or numbers beyond all measure on its scale."""
        self.prepare(request, site)

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer to one request."""
        held: Held = site.data
        if request.do == PROFILE:
            if self.own or self.privacy is not None:
                raise Refused("agreed.schema", "a schema is agreed on already: nothing is told of the table")
            told = tell_profile(held.train, held.targets, self.task, self.least)
            return Reply({}, bytes_to_extra(PROFILE, told), n=len(held.train))
        schema, asked, samples = self.prepare(request, site)
        if request.do == AGREE:
            return Reply({}, n=1)
        return self.handler(schema)(asked, samples)

    def many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        """The same answers, all clients of one schema trained at once."""
        return answer_many(self, self.prepare, self.handler, requests, sites)


def join_tests(population: Mapping[ClientId, Held], schema: Schema) -> Samples:
    """What all clients keep back, in the order of their names: what judges the global model in a simulation."""
    parts = [schema.encode(held.test, held.kept) for _, held in sorted(population.items())]
    return Samples(*(np.concatenate([part[k] for part in parts]) for k in (0, 1)))
