"""Federated learning on tables: clients have rows of the same columns and agree on a schema of kinds and scales."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mutirao.config import Common, Part, setting
from mutirao.core.agreement import AGREED, PROFILE, bytes_from_extra
from mutirao.core.arrays import Arrays
from mutirao.core.client_evaluation import weighted_client_metrics
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Round, Run
from mutirao.datasets.labelled import EVALUATION_SPLITS
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts, Picture
from mutirao.experiments.disclosure import Disclosure, check_validation_share, privacy_guarantee
from mutirao.experiments.grouping import has_groups
from mutirao.experiments.party_agreement import agree_on_profile, read_given
from mutirao.experiments.personal_models import as_global, personal_of
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.io import write_whole
from mutirao.personalization import OneModel
from mutirao.systems.tabular.schema import SCHEMA, parse_schema
from mutirao.systems.tabular.table_profile import schema_from_profiles

log = logging.getLogger("mutirao")

MEMORY = AGREED + SCHEMA  # where a run stores the schema that its clients agreed on
FIGURES = {
    "classification": ("accuracy", "balanced_accuracy", "auc", "f1", "log_loss", "loss"),
    "regression": ("rmse", "mae", "r2", "loss"),
}


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the tabular recipe."""

    rounds: int = setting(30, "number of rounds", low=1)
    clients: int = setting(5, "number of clients, unless the setting client names a column", low=1)
    per_round: int | float = setting(1.0, "clients selected a round: a count, or a share", low=1e-9)
    epochs: int = setting(5, "epochs: passes over its data a client makes in a round", low=1)
    batch_size: int = setting(16, "samples a step", low=1)
    lr: float = setting(0.05, "learning rate of the clients", low=1e-12)
    weight_decay: float = setting(0.001, "weight decay of the clients' optimiser", low=0)
    data: str = setting("breast_cancer", "a CSV or Parquet file, a folder of them, or breast_cancer, wine, diabetes")
    target: str = setting("", "the column that is predicted")
    client: str = setting("", "the column that says which client each row belongs to (default: rows are partitioned)")
    partition: Part = setting(Part("dirichlet", {"alpha": 0.5}), "how rows are partitioned over clients")
    task: str = setting("auto", "what is predicted", choices=("auto", "classification", "regression"))
    model: str = setting("dense", "a dense network, or a linear model", choices=("dense", "linear"))
    hidden: int = setting(64, "width of the hidden layers", low=1)
    layers: int = setting(1, "number of hidden layers", low=1, high=20)
    test: float = setting(0.2, "share of its rows that a client holds out for evaluation", low=0, high=0.9)
    judge_by: str = setting(
        "test",
        "rows to evaluate on: test, or vali for tuning: the same share of the others, with test rows set aside",
        choices=EVALUATION_SPLITS,
    )
    ignore: str = setting("", "columns that are left out, separated by commas")
    columns: str = setting("", "kinds of columns, where values suggest another one: ward=category,age=number")
    least: int = setting(5, "fewest values that a client reports in its profile", low=1)
    schema: str = setting("", "a file with a schema given beforehand, so that clients send no profile")
    sites: bool = setting(False, "deployed: each site has a file of its own (its --data), and the server has none")


@dataclass(frozen=True)
class TableContext:
    """What the flow needs besides the task: the handler of a client, and the clients' rows if they are here."""

    client: Any  # a TableClient
    population: Mapping[str, Any] | None  # None: the rows are elsewhere


def task(config: Config) -> Task:
    """The clients' tables; the model is made once the schema is agreed on."""
    from mutirao.systems.tabular.client import TableClient, TableTrainers
    from mutirao.systems.tabular.client_tables import load_source, pool_tables

    source = load_source(config)
    own = read_given("schema", config.schema, parse_schema)
    check_profiles_allowed(config, own)
    check_validation_share(config, "test", bool(privacy_guarantee(config)) and not source.has_all_rows)
    trainers = TableTrainers(config, config.model, config.hidden, config.layers)
    client = TableClient(trainers, source.target, source.task, config.least, own)
    population: Mapping[str, Any] = source.population
    if config.centralised:
        population = pool_tables(population)

    def initial() -> Arrays:
        # The inputs of the model are those of the schema: without one given beforehand, the flow makes the model.
        if own:
            return trainers(client.own_schema()).initial(config.seed)
        return {}

    def write(run: Run, path: Path) -> None:
        write_whole(path, (bytes_from_extra(MEMORY, run.memory) or own) + b"\n")

    pictures: dict[str, Picture] = {}
    if source.partition and not config.centralised:
        pictures["partition.png"] = Picture("partition", lambda run: source.partition)
    return Task(
        handler=client,
        population=population,
        initial=initial,
        judge=FIGURES[source.task][0],
        metrics=FIGURES[source.task],
        knows=TableContext(client, population if source.has_all_rows else None),
        exhibits=Artifacts(pictures, {"schema.json": write}),
    )


def check_profiles_allowed(config: Config, own: bytes) -> None:
    """Refuse a privacy guarantee that profiles in the clear would break."""
    if (guarantee := privacy_guarantee(config)) and not own:
        raise ConfigError(
            f"{guarantee}: clients would send counts, means and categories of their tables in the clear; "
            "name a schema agreed on beforehand: schema=FILE.json (every run without it writes one)"
        )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Agree on a schema, make the model for it, then train; sites evaluate where the server has no rows."""
    from mutirao.systems.tabular.client import pool_test_rows

    context = task.knows
    personal = personal_of(config)
    client: Any = personal.at_client(context.client)
    is_private = privacy_guarantee(config)
    check_profiles_allowed(config, bytes_from_extra(MEMORY, run.memory) or client.own)

    def combine(profiles: Any) -> bytes:
        return schema_from_profiles(client.target, client.task, profiles).content()

    fleet, task, content = agree_on_profile(fleet, config, task, run, SCHEMA, client.own, combine)
    schema = parse_schema(content)
    trainer = client.trainers(schema)
    run.arrays = run.arrays or client.initial(schema, config.seed)
    log.info("agreed on %d columns, %d inputs of the model, %s", len(schema.features), schema.inputs, schema.task)
    initial = partial(client.initial, schema, config.seed)
    task = replace(task, classes=len(schema.classes) or None, initial=initial)
    if context.population is not None and config.test and personal.whole:
        test = pool_test_rows({c: context.population[c] for c in task.population}, schema)
        evaluate = partial(evaluate_rows, trainer, test)
        if isinstance(personal, OneModel):
            task = replace(task, evaluate=evaluate)
        else:
            # Beside personal models the metrics of the common one have names of their own.
            task = replace(task, evaluate=as_global(evaluate))
    has_common_model = isinstance(personal, OneModel) and not has_groups(config)
    # The server has no rows in a deployment; the sites' own metrics are averaged instead, weighted by rows.
    sites_evaluate = task.evaluate is None and config.test and not is_private and has_common_model
    for done in federate(fleet, config, task, run):
        if sites_evaluate and (run.round % config.evaluate_every == 0 or run.round == config.rounds):
            done.row.update(weighted_client_metrics(fleet, run, task.metrics, config.size_cap))
        yield done


def evaluate_rows(trainer: Any, test: Any, arrays: Arrays) -> dict[str, float]:
    """The metrics of a model on test rows."""
    metrics: dict[str, float] = trainer.evaluate(arrays, test)
    return metrics


def disclosure(config: Config, task: Task) -> Disclosure:
    """Clients send a profile unless a schema is given, use the agreed schema, and may evaluate on held-out rows."""
    if privacy_guarantee(config):
        return Disclosure(request_extras=(SCHEMA,))
    profile = () if task.knows.client.own else (PROFILE,)
    requests: tuple[str, ...] = profile
    if config.test:
        requests = (*profile, "evaluate")
    return Disclosure(requests, (SCHEMA,), profile)


SUPPORTED = frozenset({"privacy", "secure", "compress", "personal", "cluster"})
recipe = Recipe(Config, task, flow, heeds=SUPPORTED, asks=disclosure)
