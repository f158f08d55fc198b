"""The client of the tabular recipe: it sends its profile, and trains on rows encoded by the agreed schema.

The schema comes with every request and is not stored at the site, so that one that restarts needs no memory.
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
from mutirao.core.needs import Capabilities
from mutirao.core.parts import AnyHandler
from mutirao.errors import Refused
from mutirao.metrics import evaluate_logits, regression_metrics
from mutirao.personalization import Settings as Personal
from mutirao.personalization.handler import WHOLE_MODEL_ONLY, PersonalTrainer
from mutirao.privacy import DPSGD, SPENT
from mutirao.systems.tabular.client_tables import ClientTables
from mutirao.systems.tabular.schema import SCHEMA, Schema, Task, parse_schema
from mutirao.systems.tabular.table_profile import profile_table
from mutirao.training.samples import ClientData, Samples
from mutirao.training.shared_encoding import agreed_content, answer_many, without_agreement
from mutirao.training.trainer import Trainer

log = logging.getLogger("mutirao")

KEPT = 4096  # most clients for which a process keeps encoded rows


def dense_network(model: str, inputs: int, outputs: int, hidden: int, layers: int) -> nn.Module:
    """A linear model, or a dense network with ReLU between its layers."""
    if model == "linear":
        return nn.Linear(inputs, outputs)
    widths = [inputs, *[hidden] * layers]
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        modules += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*modules, nn.Linear(widths[-1], outputs))


def target_metrics(mean: float, std: float, outputs: npt.ArrayLike, targets: npt.ArrayLike) -> dict[str, float]:
    """Metrics of predictions in the units of the target."""
    predicted = mean + std * np.asarray(outputs, np.float64)
    actual = mean + std * np.asarray(targets, np.float64)
    return regression_metrics(predicted, actual)


@dataclass(frozen=True, eq=False)
class TableTrainers:
    """Trainers by schema, from the recipe's settings."""

    config: Common
    model: str
    hidden: int
    layers: int

    def __call__(self, schema: Schema) -> Trainer:
        """One trainer for all schemas of one shape."""
        return trainer_for(self, schema)


@lru_cache(maxsize=16)
def trainer_for(trainers: TableTrainers, schema: Schema) -> Trainer:
    """The trainer, made once, because it caches modules and compiled programs."""
    network = partial(dense_network, trainers.model, schema.inputs, schema.outputs, trainers.hidden, trainers.layers)
    if schema.task == "classification":
        return Trainer.of(trainers.config, network, figures=evaluate_logits)
    metrics = partial(target_metrics, schema.mean, schema.std)
    return Trainer.of(trainers.config, network, loss=functional.mse_loss, figures=metrics)


@lru_cache(maxsize=16)
def personal_for(trainers: TableTrainers, schema: Schema, personal: Personal) -> PersonalTrainer:
    """The same for clients with personal models."""
    trainer: PersonalTrainer = trainer_for(trainers, schema).personal_training(personal)
    return trainer


class EncodedTables:
    """Cache of encoded rows, of the clients used last: they are the same in every round."""

    def __init__(self) -> None:
        self.made: OrderedDict[tuple[ClientId, str], tuple[ClientTables, ClientData]] = OrderedDict()
        self.lock = threading.Lock()

    def __call__(self, client: ClientId, tables: ClientTables, schema: Schema, digest: str) -> ClientData:
        """A client's samples."""
        with self.lock:
            found = self.made.get((client, digest))
            if found is not None and found[0] is tables:
                return found[1]
        samples = encode_tables(client, tables, schema)
        # Encoded outside the lock, so that threads encode different clients at the same time.
        with self.lock:
            self.made[client, digest] = (tables, samples)
            while len(self.made) > KEPT:
                self.made.popitem(last=False)
        return samples

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot be pickled, and another process encodes the clients that it trains.
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def encode_tables(client: ClientId, tables: ClientTables, schema: Schema) -> ClientData:
    """A client's training and test samples."""
    x, y, unknown = schema.encode(tables.train, tables.train_targets)
    x_test, y_test, unknown_test = schema.encode(tables.test, tables.test_targets)
    if unknown + unknown_test:
        log.warning("%s: %d rows have a target outside the schema and are left out", client, unknown + unknown_test)
    return ClientData(Samples(x, y), Samples(x_test, y_test))


@dataclass(frozen=True)
class TableClient:
    """A handler around a `Trainer`: it answers `profile` and `agree`, and trains by the schema in the request.

    With `own`, a schema given to this party beforehand, every other schema and every request for a profile is refused.
    """

    trainers: TableTrainers
    target: str
    task: Task
    least: int
    own: bytes = b""
    privacy: DPSGD | None = None
    personal: Personal | None = None
    encoded: EncodedTables = field(default_factory=EncodedTables, compare=False, repr=False)

    @property
    def figures(self) -> Any:
        """The metrics of its trainers besides loss and accuracy."""
        if self.task == "classification":
            return evaluate_logits
        return regression_metrics

    @property
    def capabilities(self) -> Capabilities:
        """What the trainer does; a regression has no accuracy."""
        if self.privacy is not None:
            return Capabilities(metrics=SPENT, config={"mu"})
        plain = Trainer.of(self.trainers.config, nn.Identity)  # capabilities depend on the settings alone
        capabilities = plain.capabilities
        if self.personal is not None and not self.personal.whole:
            capabilities -= WHOLE_MODEL_ONLY
        if self.task == "regression":
            capabilities -= Capabilities(metrics={"accuracy"})
        return capabilities

    def agreed(self) -> Mapping[str, str]:
        """The digest of the schema given to this party."""
        if self.own:
            return {SCHEMA: digest_of(self.own)}
        return {}

    def own_schema(self) -> Schema:
        """The schema given to this party."""
        return parse_schema(self.own)

    def private_training(self, privacy: DPSGD) -> AnyHandler:
        """The same with private gradients."""
        return replace(self, privacy=privacy)

    def personal_training(self, personal: Personal) -> AnyHandler:
        """The same with a model of each client's own."""
        return replace(self, personal=personal)

    def initial(self, schema: Schema, seed: int) -> Arrays:
        """The shared arrays of a new model."""
        if self.personal is not None:
            return personal_for(self.trainers, schema, self.personal).initial(seed)
        return self.trainers(schema).initial(seed)

    def shared(self, arrays: Arrays) -> Arrays:
        """The shared arrays of a whole model, if there is one yet."""
        if self.personal is None or not arrays:
            return arrays
        return personal_for(self.trainers, self.own_schema(), self.personal).shared(arrays)

    def handler(self, schema: Schema) -> AnyHandler:
        """The handler that trains."""
        if self.personal is not None:
            return personal_for(self.trainers, schema, self.personal)
        trainer = self.trainers(schema)
        if self.privacy is None:
            return trainer
        return trainer.private_training(self.privacy)

    def schema_in(self, request: Request) -> Schema:
        """The schema of a request; Refused if it is not the one agreed on, or is about another target."""
        content = agreed_content(request, SCHEMA, self.own)
        try:
            schema = parse_schema(content)
        except ValueError as error:
            raise Refused("agreed.schema", str(error)) from error
        if (schema.target, schema.task) != (self.target, self.task):
            here = f"{self.task} of {self.target!r}"
            raise Refused("agreed.schema", f"it is about {schema.task} of {schema.target!r}, but here it is {here}")
        return schema

    def prepare(self, request: Request, site: Site) -> tuple[Schema, Request, Site]:
        """The trainer's request: without the schema, on samples instead of a table."""
        schema = self.schema_in(request)
        data = self.encoded(site.id, site.data, schema, digest_of(schema.content()))
        return schema, without_agreement(request, SCHEMA), Site(site.id, data, site.state)

    def agree(self, request: Request, site: Site) -> None:
        """Refused if the table has other columns than the schema, or numbers that overflow on its scale."""
        self.prepare(request, site)

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer one request."""
        tables: ClientTables = site.data
        if request.do == PROFILE:
            if self.own or self.privacy is not None:
                raise Refused("agreed.schema", "a schema is already agreed on: no profile of the table is sent")
            profile = profile_table(tables.train, tables.train_targets, self.task, self.least)
            return Reply({}, bytes_to_extra(PROFILE, profile), n=len(tables.train))
        schema, request, samples = self.prepare(request, site)
        if request.do == AGREE:
            return Reply({}, n=1)
        return self.handler(schema)(request, samples)

    def many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        """The same replies, with all clients of one schema trained at once."""
        return answer_many(self, self.prepare, self.handler, requests, sites)


def pool_test_rows(population: Mapping[ClientId, ClientTables], schema: Schema) -> Samples:
    """The test rows of all clients, by name, on which a simulation evaluates the global model."""
    parts = [schema.encode(tables.test, tables.test_targets) for _, tables in sorted(population.items())]
    return Samples(np.concatenate([x for x, _, _ in parts]), np.concatenate([y for _, y, _ in parts]))
