"""Any table: parties with rows of the same columns train a model together, on a scale and categories they agree on."""

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
from mutirao.experiments.artifacts import Exhibits, Picture
from mutirao.experiments.disclosure import Disclosure, check_validation_share, privacy_guarantee
from mutirao.experiments.grouping import has_groups
from mutirao.experiments.party_agreement import agree_on_profile, read_given
from mutirao.experiments.personal_models import as_global, personal_of
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.io import write_whole
from mutirao.personalization import OneModel
from mutirao.systems.tabular.schema import SCHEMA, read_schema
from mutirao.systems.tabular.table_profile import join_profiles

log = logging.getLogger("mutirao")

MEMORY = AGREED + SCHEMA  # where a run keeps what its clients have agreed on
FIGURES = {
    "classification": ("accuracy", "balanced_accuracy", "auc", "f1", "log_loss", "loss"),
    "regression": ("rmse", "mae", "r2", "loss"),
}


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the tabular recipe."""

    rounds: int = setting(30, "how many rounds", low=1)
    clients: int = setting(5, "how many clients, if no column says to which client a row belongs", low=1)
    per_round: int | float = setting(1.0, "clients selected a round: a count, or a share", low=1e-9)
    epochs: int = setting(5, "epochs: passes over its data a client makes in a round", low=1)
    batch_size: int = setting(16, "samples a step", low=1)
    lr: float = setting(0.05, "learning rate of the clients", low=1e-12)
    weight_decay: float = setting(0.001, "weight decay of the clients' optimiser", low=0)
    data: str = setting("breast_cancer", "a CSV or Parquet file, a folder of them, or breast_cancer, wine, diabetes")
    target: str = setting("", "the column that is predicted")
    client: str = setting("", "the column that says whose a row is (default: rows are dealt by partition)")
    partition: Part = setting(Part("dirichlet", {"alpha": 0.5}), "how rows are dealt to clients")
    task: str = setting("auto", "what is predicted", choices=("auto", "classification", "regression"))
    model: str = setting("dense", "a dense network, or a linear model", choices=("dense", "linear"))
    hidden: int = setting(64, "width of the hidden layers", low=1)
    layers: int = setting(1, "how many hidden layers", low=1, high=20)
    test: float = setting(0.2, "share of its rows that a client holds out for evaluation", low=0, high=0.9)
    judge_by: str = setting(
        "test",
        "which rows judge: test, or vali, the same share of the others, test rows then being put aside (to tune by)",
        choices=EVALUATION_SPLITS,
    )
    ignore: str = setting("", "columns that are left out, separated by commas")
    columns: str = setting("", "kinds of columns that are not as they look: ward=category,age=number")
    least: int = setting(5, "fewest values that a client reports in its profile", low=1)
    schema: str = setting("", "a file with a schema agreed on beforehand: then no client is asked for its profile")
    sites: bool = setting(False, "deployed: each site has a file of its own (its --data), and the server has none")


@dataclass(frozen=True)
class Known:
    """What the flow has to know: who answers at a client, who keeps rows back here, and whether nothing may be told."""

    client: Any  # a TableClient
    population: Mapping[str, Any] | None  # None: the rows are elsewhere


def task(config: Config) -> Task:
    """Tables at the clients; the model is made when they have agreed on columns and categories."""
    from mutirao.systems.tabular.client import TableClient, Trainers
    from mutirao.systems.tabular.client_tables import find_source, pool_held

    source, own = find_source(config), read_given("schema", config.schema, read_schema)
    check_private(config, own)
    check_validation_share(config, "test", bool(privacy_guarantee(config)) and not source.everything)
    trainers = Trainers(config, config.model, config.hidden, config.layers)
    client = TableClient(trainers, source.target, source.task, config.least, own)
    population: Mapping[str, Any] = pool_held(source.holders) if config.centralised else source.holders

    def initial() -> Arrays:
        return trainers(client.own_schema()).initial(config.seed) if own else {}

    def write(run: Run, path: Path) -> None:
        write_whole(path, (bytes_from_extra(MEMORY, run.memory) or own) + b"\n")

    pictures = {"partition.png": Picture("partition", lambda run: source.dealt)}
    return Task(
        handler=client,
        population=population,
        initial=initial,
        judge=FIGURES[source.task][0],
        metrics=FIGURES[source.task],
        knows=Known(client, population if source.everything else None),
        exhibits=Exhibits(pictures if source.dealt and not config.centralised else {}, {"schema.json": write}),
    )


def check_private(config: Config, own: bytes) -> None:
    """Refuse a promise that profiles in the clear would break."""
    if (promised := privacy_guarantee(config)) and not own:
        raise ConfigError(
            f"{promised}: clients would tell counts, means and categories of their tables in the clear; "
            "name a schema agreed on beforehand: schema=FILE.json (every run without it leaves one)"
        )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Agree on a schema, make the model it asks for, then rounds; sites judge where the server has no rows."""
    from mutirao.systems.tabular.client import join_tests

    known, personal = task.knows, personal_of(config)
    client: Any = personal.at_client(known.client)
    private = privacy_guarantee(config)
    check_private(config, bytes_from_extra(MEMORY, run.memory) or client.own)
    fleet, task, content = agree_on_profile(
        *(fleet, config, task, run, SCHEMA, client.own),
        lambda told: join_profiles(client.target, client.task, told).content(),
    )
    schema = read_schema(content)
    trainer = client.trainers(schema)
    run.arrays = run.arrays or client.initial(schema, config.seed)
    log.info("agreed on %d columns, %d inputs of the model, %s", len(schema.features), schema.inputs, schema.task)
    fresh = partial(client.initial, schema, config.seed)
    task = replace(task, classes=len(schema.classes) or None, initial=fresh)
    if known.population is not None and config.test and personal.whole:
        test = join_tests({c: known.population[c] for c in task.population}, schema)
        judge = partial(judge_by, trainer, test)
        task = replace(task, evaluate=judge if isinstance(personal, OneModel) else as_global(judge))
    for done in federate(fleet, config, task, run):
        due = run.round % config.evaluate_every == 0 or run.round == config.rounds
        one = isinstance(personal, OneModel) and not has_groups(config)
        if task.evaluate is None and due and config.test and not private and one:
            done.row.update(weighted_client_metrics(fleet, run, task.metrics, config.size_cap))
        yield done


def judge_by(trainer: Any, test: Any, arrays: Arrays) -> dict[str, float]:
    """The figures of a model on test rows."""
    found: dict[str, float] = trainer.evaluate(arrays, test)
    return found


def asks(config: Config, task: Task) -> Disclosure:
    """Clients tell a profile unless a schema is given, keep to what came of it, and judge by rows they kept back."""
    if privacy_guarantee(config):
        return Disclosure(comes=(SCHEMA,))
    profile = () if task.knows.client.own else (PROFILE,)
    return Disclosure((*profile, *(("evaluate",) if config.test else ())), (SCHEMA,), profile)


HEEDS = frozenset({"privacy", "secure", "compress", "personal", "cluster"})
recipe = Recipe(Config, task, flow, heeds=HEEDS, asks=asks)
