"""Federated learning to rank: search sites keep their queries and documents and train a shared ranking model."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from mutirao.config import Common, Part, build, setting
from mutirao.core.agreement import AGREED, PROFILE, bytes_from_extra
from mutirao.core.arrays import Arrays
from mutirao.core.client_evaluation import weighted_client_metrics
from mutirao.core.fleet import Fleet
from mutirao.core.moments import Transform
from mutirao.core.rounds import Round, Run
from mutirao.datasets.labelled import digest_of_set
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts, partition_of
from mutirao.experiments.disclosure import Disclosure, privacy_guarantee
from mutirao.experiments.grouping import has_one_model
from mutirao.experiments.party_agreement import agree_on_profile, read_given
from mutirao.experiments.personal_models import as_global, personal_of
from mutirao.experiments.simulated_parts import EarlyStopping, check_one_model
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.io import load_arrays, write_whole
from mutirao.partitioning import describe
from mutirao.personalization import OneModel
from mutirao.systems.ranking.feature_scale import (
    SCALE,
    FeatureScale,
    parse_scale,
    scale_from_profiles,
    scale_without_moments,
)
from mutirao.systems.ranking.lambdamart import PooledDocuments, TreeHandler, empty_forest, load_lightgbm, score_by_trees
from mutirao.systems.ranking.letor_parsing import MOST_FEATURES, MOST_GRADE
from mutirao.systems.ranking.metrics import (
    DIRECTIONS,
    EMPTY,
    USUAL,
    Metrics,
    build_metrics,
    evaluate_ranking,
    metric_names,
    write_query_metrics,
)
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import load_splits

log = logging.getLogger("mutirao")

LOSS_NAMES = ("grades", "listnet", "ranknet", "lambdarank", "approxndcg")
GAINS = ("exponential", "linear")
MEMORY = AGREED + SCALE  # where a run stores the scale that its clients agreed on
TREES = "lightgbm"
UNSUPPORTED_WITH_TREES = ("privacy", "drift", "screen", "available", "devices")  # settings of clients


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the ranking recipe; the defaults are the paper's, but for the learning rate."""

    rounds: int = setting(100, "number of rounds", low=1)
    clients: int = setting(100, "number of clients", low=1)
    lr: float = setting(0.01, "learning rate of the clients", low=1e-12)
    data: str = setting("generated", "'generated', a folder as published (Fold1 to Fold5, or client_*/), or one file")
    fold: int = setting(0, "which of the five folds (0: the one that data names, or the first)", low=0, high=5)
    qrels: str = setting("", "grades that replace those of the file: a TREC qrels file, or irds:NAME")
    queries: int = setting(400, "queries of generated data, all five parts together", low=50)
    transform: Transform = setting("none", "transform of the features before they are standardised")
    moments: bool = setting(True, "standardise by moments that clients send before the first round")
    scale: str = setting("", "a file with a scale given beforehand, so that clients send no moments")
    features: int = setting(0, "number of features (0: as most clients report)", low=0, high=MOST_FEATURES)
    grades: int = setting(0, "the highest grade (0: the highest that a client reports)", low=0, high=MOST_GRADE)
    least: int = setting(5, "fewest documents for which a client sends moments", low=1)
    partition: Part = setting(
        Part("dirichlet", {"alpha": 0.5}, home="mutirao.systems.ranking.query_partition"),
        "how documents are partitioned over clients",
    )
    aggregate: Part = setting(Part("fedrisk", {"memory": "momentum"}), "aggregation method")
    loss: str = setting("grades", "classify grades, or rank lists", choices=LOSS_NAMES)
    hidden: int = setting(64, "width of the hidden layers", low=1)
    layers: int = setting(1, "number of hidden layers (0: linear)", low=0, high=16)
    norm: str = setting("none", "normalisation of the hidden layers", choices=("none", "batch", "layer"))
    metrics: str = setting(USUAL, "metrics, such as ndcg@5,mrr@10,map,err@10,p@5; the first chooses the best round")
    gain: str = setting("exponential", "gain of a grade in nDCG: 2^grade - 1 or the grade", choices=GAINS)
    empty: str = setting("0", "value of the metrics for a query without relevant documents", choices=tuple(EMPTY))
    judge_by: str = setting("test", "part on which the model is evaluated", choices=("test", "vali"))
    test: float = setting(0.2, "share of its queries that a site without a test file holds out", low=0, high=0.9)
    sites: bool = setting(False, "deployed: each site has files of its own (its --data), and the server has none")
    patience: int = setting(
        0, "early stopping: rounds without improvement on the validation part that end a run (0: off)", low=0
    )
    centralised: bool | Literal["lightgbm"] = setting(  # type: ignore[assignment]
        False, "train on the pooled data instead, the network or LightGBM's trees: the reference"
    )
    trees: Part = setting(
        Part("lambdamart", home="mutirao.systems.ranking.lambdamart"), "how the trees of centralised=lightgbm are grown"
    )

    def __post_init__(self) -> None:
        """With pooled trees, set what the run does."""
        apply_tree_settings(self)


@dataclass(frozen=True)
class RankingContext:
    """What the flow needs besides the task: the handler of a client, and where documents are."""

    client: Any  # a RankingClient
    source: Any  # a RankingSource


def task(config: Config) -> Task:
    """The clients' documents; the model is made once the feature scale is agreed on."""
    from mutirao.systems.ranking.client import RankingClient, RankingTrainers
    from mutirao.systems.ranking.client_documents import (
        client_folders,
        folder_source,
        partition_set,
        pool_documents,
        site_source,
    )
    from mutirao.systems.ranking.encoding import EncodedDocuments

    names = metric_names(config.metrics)
    metrics = partial(build_metrics, config.metrics, config.gain, config.empty)
    check_one_model(config)
    if config.sites:
        source = site_source(config)
    elif folders := client_folders(config):
        source = folder_source(config, folders)
    else:
        train, vali, test = load_splits(config)
        highest = config.grades or max(1, *(int(data.grades.max()) for data in (train, vali, test)))
        if config.centralised == TREES:
            return tree_task(config, train, vali, test if config.judge_by == "test" else vali, metrics(highest))
        source = partition_set(config, train, vali, test, highest)
    if source.train is None and (config.patience or config.centralised == TREES):
        what = "patience" if config.patience else f"centralised={TREES}"
        raise ConfigError(f"{what}: this needs one set with a validation part, but clients have files of their own")
    own = given_scale(config, source)
    check_moments_allowed(config, own)
    encoded = EncodedDocuments(config.loss != "grades", config.samples, config.seed)
    client = RankingClient(RankingTrainers(config, metrics), encoded, config.transform, config.least, own)

    population = source.population
    if config.centralised:
        population = pool_documents(population)
    exhibits = Artifacts()
    if source.partition is not None and not config.centralised:
        exhibits = partition_of(partial(describe, *source.partition))
    monitor = names[0]
    final_evaluation = None
    if config.patience:
        # Validation metrics choose the round; the test part is used once, for the model of that round.
        monitor = f"vali_{names[0]}"
        final_evaluation = partial(evaluate_best_model, client, source)
    files = {
        "scale.json": partial(write_scale_json, client),
        "ranker.safetensors": partial(write_ranker, client),
        "queries.csv": partial(write_queries_csv, client, source, bool(config.patience)),
    }

    def initial() -> Arrays:
        # The number of features is that of the scale: without one given beforehand, the flow makes the model.
        if own:
            return client.initial(parse_scale(own), config.seed)
        return {}

    return Task(
        handler=client,
        population=population,
        initial=initial,
        evaluate=evaluate_without_scale if source.test_set is not None else None,
        ending=EarlyStopping(config.patience, final_evaluation),
        judge=monitor,
        basis=cache(partial(data_digest, source.train)),
        metrics=(*(f"vali_{name}" for name in names if config.patience), *names),
        directions=DIRECTIONS,
        knows=RankingContext(client, source),
        exhibits=replace(exhibits, files=files),
        classes=source.highest + 1 if source.highest else None,
    )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Agree on a scale, make the model for it, then train; sites evaluate where the server has no documents."""
    if task.knows is None:  # trees, which need no scale
        yield from federate(fleet, config, task, run)
        return
    source = task.knows.source
    personal = personal_of(config)
    client: Any = personal.at_client(task.knows.client)
    check_moments_allowed(config, bytes_from_extra(MEMORY, run.memory) or client.own)

    def combine(profiles: Any) -> bytes:
        highest = config.grades or source.highest
        return scale_from_profiles(profiles, config.transform, highest, config.features).content()

    fleet, task, content = agree_on_profile(fleet, config, task, run, SCALE, client.own, combine)
    scale = parse_scale(content)
    run.arrays = run.arrays or client.initial(scale, config.seed)
    log.info("agreed on %d features and grades from 0 to %d", scale.features, scale.highest)
    task = replace(task, classes=scale.highest + 1, initial=partial(client.initial, scale, config.seed))
    if source.test_set is not None and personal.whole:
        evaluate = partial(task.knows.client.evaluate, scale=scale)
        if config.patience:
            evaluate = partial(evaluate, data=source.vali, prefix="vali_")
        else:
            evaluate = partial(evaluate, data=source.test_set(scale))
        if isinstance(personal, OneModel):
            task = replace(task, evaluate=evaluate)
        else:
            # Beside personal models the metrics of the common one have names of their own.
            task = replace(task, evaluate=as_global(evaluate))
    # The server has no documents in a deployment; the sites' own metrics are averaged instead, weighted by queries.
    sites_evaluate = task.evaluate is None and config.test and not privacy_guarantee(config) and has_one_model(config)
    for done in federate(fleet, config, task, run):
        if sites_evaluate and (run.round % config.evaluate_every == 0 or run.round == config.rounds):
            done.row.update(weighted_client_metrics(fleet, run, task.metrics, config.size_cap))
        yield done


def disclosure(config: Config, task: Task) -> Disclosure:
    """Clients send moments unless a scale is given, use the agreed scale, and may evaluate on their test queries."""
    if task.knows is None:
        return Disclosure()
    profile = () if task.knows.client.own else (PROFILE,)
    requests: tuple[str, ...] = profile
    if task.evaluate is None and config.test and not privacy_guarantee(config):
        requests = (*profile, "evaluate")
    return Disclosure(requests, (SCALE,), profile)


def evaluate_without_scale(arrays: Arrays) -> dict[str, float]:
    """Stands for the evaluation until there is a scale; the flow replaces it."""
    raise ConfigError("the model cannot be evaluated before a feature scale is agreed on")


def data_digest(table: RankingData | None) -> dict[str, str]:
    """The digest of the set that is partitioned, if there is one."""
    if table is None:
        return {}
    return {"data": digest_of_set(["ranking"], table.x, table.grades, table.queries)}


def given_scale(config: Any, source: Any) -> bytes:
    """The scale that a setting names, or one without moments; empty if it is computed from the clients' profiles."""
    if given := read_given("scale", config.scale, parse_scale):
        if (found := parse_scale(given).transform) != config.transform:
            raise ConfigError(f"scale: {config.scale} has transform={found}, but transform={config.transform} is set")
        return given
    if config.moments:
        return b""
    tables = [] if config.sites else [source.population[name].table for name in source.population]
    features = config.features or max((table.features for table in tables), default=0)
    grades = config.grades or max((int(table.grades.max(initial=1)) for table in tables), default=0)
    if not (features and grades):
        raise ConfigError("moments=false: set features=N and grades=N, as the server has no file to derive them from")
    return scale_without_moments(features, grades, config.transform).content()


def check_moments_allowed(config: Any, own: bytes) -> None:
    """Refuse a privacy guarantee that moments in the clear would break."""
    if (guarantee := privacy_guarantee(config)) and not own:
        raise ConfigError(
            f"{guarantee}: clients would send counts, sums and squares of their features in the clear; name a scale "
            "agreed on beforehand, scale=FILE.json (every run writes one), or set moments=false"
        )


def agreed_scale(client: Any, run: Run) -> FeatureScale:
    """The scale that the clients of a run agreed on."""
    return parse_scale(bytes_from_extra(MEMORY, run.memory) or client.own)


def evaluate_best_model(client: Any, source: Any, run: Run, arrays: Arrays) -> dict[str, float]:
    """Test metrics, computed once, of the model that validation data selected."""
    scale = agreed_scale(client, run)
    found: dict[str, float] = client.evaluate(arrays, source.test_set(scale), scale)
    return found


def write_scale_json(client: Any, run: Run, path: Path) -> None:
    """Write `scale.json`, which saves the next run the profiles."""
    write_whole(path, agreed_scale(client, run).content() + b"\n")


def write_queries_csv(client: Any, source: Any, best: bool, run: Run, path: Path) -> None:
    """Write `queries.csv` of the model that the summary's final metrics are of, if test queries are here."""
    if source.test_set is None:
        return
    scale = agreed_scale(client, run)
    arrays = run.arrays
    if best:
        arrays, _ = load_arrays(path.parent / "checkpoints" / "best.safetensors")
    data = source.test_set(scale)
    write_query_metrics(client.score(arrays, data, scale), data, client.trainers.metrics(scale), path)


def write_ranker(client: Any, run: Run, path: Path) -> None:
    """Write `ranker.safetensors`: the model of the best round, or of the last, with its scale and settings."""
    from mutirao.systems.ranking.ranker import METRIC_SETTINGS, NETWORK_SETTINGS, Ranker

    best = path.parent / "checkpoints" / "best.safetensors"
    arrays = run.arrays
    number = run.round
    if best.is_file():
        arrays, facts = load_arrays(best)
        number = int(facts["round"])
    settings = {key: getattr(client.trainers.config, key) for key in (*NETWORK_SETTINGS, *METRIC_SETTINGS)}
    Ranker(agreed_scale(client, run), arrays, settings, number).save(path)


# The other reference: trees trained on the pooled documents (`centralised=lightgbm`), as an ordinary run.


def apply_tree_settings(config: Any) -> None:
    """Set what a run of pooled trees does: one site answers, and its answer is the model."""
    if config.centralised != TREES:
        return
    defaults = {f.name: f.default for f in fields(config)}
    for name in UNSUPPORTED_WITH_TREES:
        if getattr(config, name).name != defaults[name].name:
            raise ConfigError(f"{name}: centralised={TREES} has no clients; use {name}={defaults[name].name}")
    if config.patience:
        raise ConfigError(f"patience: centralised={TREES} stops by validation data of its own; use patience=0")
    # FedAvg of a single reply keeps it as it is. The settings are frozen, hence `object.__setattr__`.
    object.__setattr__(config, "aggregate", Part("fedavg"))
    object.__setattr__(config, "select", Part("uniform"))


def tree_task(config: Any, train: RankingData, vali: RankingData, test: RankingData, metrics: Metrics) -> Task:
    """One site with all documents; each round adds equally many trees, so that there is a learning curve."""
    # Refused here if it is missing: trees are grown in the first round.
    load_lightgbm()
    method = build("trees", config.trees)

    def evaluate(arrays: Arrays) -> dict[str, float]:
        return evaluate_ranking(score_by_trees(arrays, test.x), test, metrics)

    def write(run: Run, path: Path) -> None:
        write_query_metrics(score_by_trees(run.arrays, test.x), test, metrics, path)

    return Task(
        handler=TreeHandler(method, config.rounds),
        population={"pooled": PooledDocuments(train, vali)},
        initial=lambda: empty_forest(method.trees, method.leaves),
        evaluate=evaluate,
        judge=next(iter(metrics)),
        basis=cache(lambda: {"features": digest_of_set([TREES], train.x, train.grades)}),
        metrics=tuple(metrics),
        directions=DIRECTIONS,
        exhibits=Artifacts(files={"queries.csv": write}),
    )


SUPPORTED = frozenset({"privacy", "secure", "compress", "drift", "personal", "cluster"})
recipe = Recipe(Config, task, flow, heeds=SUPPORTED, asks=disclosure)
