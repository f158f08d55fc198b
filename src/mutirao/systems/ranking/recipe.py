"""Federated learning to rank: search sites keep their queries and documents, and share a model that orders them."""

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
from mutirao.experiments.artifacts import Exhibits, partition_of
from mutirao.experiments.disclosure import Disclosure, privacy_guarantee
from mutirao.experiments.early_stopping import EarlyStopping, check_one_model
from mutirao.experiments.grouping import has_one_model
from mutirao.experiments.party_agreement import agree_on_profile, read_given
from mutirao.experiments.personal_models import as_global, personal_of
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.io import load_arrays, write_whole
from mutirao.partitioning import describe
from mutirao.personalization import OneModel
from mutirao.systems.ranking.feature_scale import SCALE, Scale, join_profiles, plain_scale, read_scale
from mutirao.systems.ranking.lambdamart import Grower, Pool, bare_forest, load_lightgbm, score_by_trees
from mutirao.systems.ranking.letor_parsing import MOST_FEATURES, MOST_GRADE
from mutirao.systems.ranking.metrics import (
    DIRECTIONS,
    EMPTY,
    USUAL,
    Metrics,
    judge,
    measures_of,
    metric_names,
    write_queries,
)
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import load_parts

TREES = "lightgbm"
NOT_OF_TREES = ("privacy", "drift", "screen", "available", "devices")  # what clients do, of which there are none


def only_trees(config: Any) -> None:
    """Make the settings of a pooled forest say what is done: one site answers, and its answer is the model."""
    if config.centralised != TREES:
        return
    usual = {f.name: f.default for f in fields(config)}
    for name in NOT_OF_TREES:
        if getattr(config, name).name != usual[name].name:
            raise ConfigError(f"{name}: centralised={TREES} has no clients; use {name}={usual[name].name}")
    if config.patience:
        raise ConfigError(f"patience: centralised={TREES} has validation data of its own to stop by; use 0")
    object.__setattr__(config, "aggregate", Part("fedavg"))  # of one, as it is
    object.__setattr__(config, "select", Part("uniform"))


def grow_trees(config: Any, train: RankingData, vali: RankingData, judged: RankingData, measures: Metrics) -> Task:
    """One site with all documents; a round adds as many trees as the others, so that there is a curve to look at."""
    load_lightgbm()  # refused before the first round where it is missing
    how = build("trees", config.trees)

    def scored(arrays: Any) -> Any:
        return score_by_trees(arrays, judged.x)

    def write(run: Any, path: Any) -> None:
        write_queries(scored(run.arrays), judged, measures, path)

    return Task(
        handler=Grower(how, config.rounds),
        population={"pooled": Pool(train, vali)},
        initial=lambda: bare_forest(how.trees, how.leaves),
        evaluate=lambda arrays: judge(scored(arrays), judged, measures),
        judge=next(iter(measures)),
        basis=cache(lambda: {"features": digest_of_set([TREES], train.x, train.grades)}),
        metrics=tuple(measures),
        directions=DIRECTIONS,
        exhibits=Exhibits(
            files={"queries.csv": lambda run, path: write_queries(scored(run.arrays), judged, measures, path)}
        ),
    )


MEMORY = AGREED + SCALE  # where a run keeps what its clients have agreed on


def not_yet(arrays: Arrays) -> dict[str, float]:
    """How models are judged before there is a scale; the flow puts the real judge in its place."""
    raise ConfigError("no scale of features is agreed on yet, so that no model can be judged")


def digest_of_dealt(table: RankingData | None) -> dict[str, str]:
    """The set that is dealt to all, if there is one, by its digest."""
    return {} if table is None else {"data": digest_of_set(["ranking"], table.x, table.grades, table.queries)}


def own_scale(config: Any, source: Any) -> bytes:
    """The scale that a setting names, or one without moments, as it travels; empty if clients have to find it."""
    if given := read_given("scale", config.scale, read_scale):
        if (found := read_scale(given).transform) != config.transform:
            raise ConfigError(f"scale: {config.scale} has transform={found}, and transform={config.transform} is set")
        return given
    if config.moments:
        return b""
    tables = [] if config.sites else [source.holders[name].table for name in source.holders]
    features = config.features or max((table.features for table in tables), default=0)
    grades = config.grades or max((int(table.grades.max(initial=1)) for table in tables), default=0)
    if not (features and grades):
        raise ConfigError("moments=false: say features=N and grades=N, as the server has no file to see them from")
    return plain_scale(features, grades, config.transform).content()


def check_private(config: Any, own: bytes) -> None:
    """Refuse a promise that moments in the clear would break."""
    if (promised := privacy_guarantee(config)) and not own:
        raise ConfigError(
            f"{promised}: clients would tell counts, sums and squares of their features in the clear; name a scale "
            "agreed on beforehand, scale=FILE.json (every run leaves one), or set moments=false"
        )


def scale_of(client: Any, run: Run) -> Scale:
    """What the clients of a run have agreed on."""
    return read_scale(bytes_from_extra(MEMORY, run.memory) or client.own)


def judge_at_end(client: Any, source: Any, run: Run, arrays: Arrays) -> dict[str, float]:
    """What is said, once, of a model that validation data have chosen."""
    scale = scale_of(client, run)
    found: dict[str, float] = client.judge(arrays, source.judged(scale), scale)
    return found


def write_scale(client: Any, run: Run, path: Path) -> None:
    """Write `scale.json`, with which another run need not ask its clients."""
    write_whole(path, scale_of(client, run).content() + b"\n")


def write_judged(client: Any, source: Any, best: bool, run: Run, path: Path) -> None:
    """Write `queries.csv` of the model that the summary's final figures are of, where queries are here to judge by."""
    if source.judged is None:
        return
    scale = scale_of(client, run)
    arrays = load_arrays(path.parent / "checkpoints" / "best.safetensors")[0] if best else run.arrays
    judged = source.judged(scale)
    write_queries(client.score(arrays, judged, scale), judged, client.trainers.metrics(scale), path)


def write_ranker(client: Any, run: Run, path: Path) -> None:
    """Write `ranker.safetensors`: the model of the best round, or the last, with all it takes to score documents."""
    from mutirao.systems.ranking.ranker import JUDGING, SHAPE, Ranker

    best = path.parent / "checkpoints" / "best.safetensors"
    arrays, number = run.arrays, run.round
    if best.is_file():
        arrays, facts = load_arrays(best)
        number = int(facts["round"])
    settings = {key: getattr(client.trainers.config, key) for key in (*SHAPE, *JUDGING)}
    Ranker(scale_of(client, run), arrays, settings, number).save(path)


log = logging.getLogger("mutirao")

LOSS_NAMES = ("grades", "listnet", "ranknet", "lambdarank", "approxndcg")
GAINS = ("exponential", "linear")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the ranking recipe; the defaults are the paper's, but for the learning rate."""

    rounds: int = setting(100, "how many rounds", low=1)
    clients: int = setting(100, "how many clients", low=1)
    lr: float = setting(0.01, "learning rate of the clients", low=1e-12)
    data: str = setting("generated", "'generated', a folder as published (Fold1 to Fold5, or client_*/), or one file")
    fold: int = setting(0, "which of the five folds (0: the one that data names, or else the first)", low=0, high=5)
    qrels: str = setting("", "judgements in place of the file's grades: a TREC qrels file, or irds:NAME")
    queries: int = setting(400, "queries of generated data, all five parts together", low=50)
    transform: Transform = setting("none", "what is done to features before they are standardised")
    moments: bool = setting(True, "standardise by moments that clients send before the first round")
    scale: str = setting("", "a file with a scale agreed on beforehand: then no client is asked for its moments")
    features: int = setting(
        0, "how many features documents have (0: as most clients report)", low=0, high=MOST_FEATURES
    )
    grades: int = setting(0, "the highest grade (0: the highest that a client reports)", low=0, high=MOST_GRADE)
    least: int = setting(5, "fewest documents for which a client sends moments", low=1)
    partition: Part = setting(
        Part("dirichlet", {"alpha": 0.5}, home="mutirao.systems.ranking.query_partition"),
        "how documents are dealt to clients",
    )
    aggregate: Part = setting(Part("fedrisk", {"memory": "momentum"}), "how updates are joined")
    loss: str = setting("grades", "classify grades, or rank lists", choices=LOSS_NAMES)
    hidden: int = setting(64, "width of the hidden layers", low=1)
    layers: int = setting(1, "how many hidden layers (0: linear)", low=0, high=16)
    norm: str = setting("none", "what normalises the hidden layers", choices=("none", "batch", "layer"))
    metrics: str = setting(USUAL, "metrics, such as ndcg@5,mrr@10,map,err@10,p@5; the first chooses the best round")
    gain: str = setting("exponential", "what a grade is worth in nDCG: 2^grade - 1 or the grade", choices=GAINS)
    empty: str = setting("0", "what a query without relevant documents counts in metrics", choices=tuple(EMPTY))
    judge_by: str = setting("test", "which part judges the model", choices=("test", "vali"))
    test: float = setting(0.2, "share of its queries that a site without a test file holds out", low=0, high=0.9)
    sites: bool = setting(False, "deployed: each site has files of its own (its --data), and the server has none")
    patience: int = setting(
        0, "early stopping: rounds without gain on the validation part that end a run (0: off)", low=0
    )
    centralised: bool | Literal["lightgbm"] = setting(  # type: ignore[assignment]
        False, "train on the pooled data instead, the network or LightGBM's trees: the reference"
    )
    trees: Part = setting(
        Part("lambdamart", home="mutirao.systems.ranking.lambdamart"), "centralised=lightgbm: how trees are grown"
    )

    def __post_init__(self) -> None:
        """Settings of a pooled forest say what is done."""
        only_trees(self)


@dataclass(frozen=True)
class Known:
    """What the flow has to know: who answers at a client, and where documents are."""

    client: Any  # a RankingClient
    source: Any  # a Source


def task(config: Config) -> Task:
    """Documents at the clients; the model is made when they have agreed on the scale of its features."""
    from mutirao.systems.ranking.client import RankingClient, Trainers
    from mutirao.systems.ranking.client_documents import client_folders, deal_set, own_files, pool_held, read_clients
    from mutirao.systems.ranking.encoding import Encoded

    names, measures = metric_names(config.metrics), partial(measures_of, config.metrics, config.gain, config.empty)
    check_one_model(config)
    if config.sites:
        source = own_files(config)
    elif folders := client_folders(config):
        source = read_clients(config, folders)
    else:
        parts = load_parts(config)
        highest = config.grades or max(1, *(int(data.grades.max()) for data in parts))
        if config.centralised == TREES:
            return grow_trees(config, *parts[:2], parts[2 if config.judge_by == "test" else 1], measures(highest))
        source = deal_set(config, *parts, highest)
    if source.set is None and (config.patience or config.centralised == TREES):
        what = "patience" if config.patience else f"centralised={TREES}"
        raise ConfigError(f"{what}: it is for one set with a validation part; clients have files of their own here")
    own = own_scale(config, source)
    check_private(config, own)
    encoded = Encoded(config.loss != "grades", config.samples, config.seed)
    client = RankingClient(Trainers(config, measures), encoded, config.transform, config.least, own)

    shown = None if config.centralised else source.dealt
    return Task(
        handler=client,
        population=pool_held(source.holders) if config.centralised else source.holders,
        initial=lambda: client.initial(read_scale(own), config.seed) if own else {},
        evaluate=not_yet if source.judged is not None else None,
        ending=EarlyStopping(config.patience, partial(judge_at_end, client, source) if config.patience else None),
        judge=f"vali_{names[0]}" if config.patience else names[0],
        basis=cache(partial(digest_of_dealt, source.set)),
        metrics=(*(f"vali_{name}" for name in names if config.patience), *names),
        directions=DIRECTIONS,
        knows=Known(client, source),
        exhibits=replace(
            Exhibits() if shown is None else partition_of(lambda: describe(*shown)),
            files={
                "scale.json": partial(write_scale, client),
                "ranker.safetensors": partial(write_ranker, client),
                "queries.csv": partial(write_judged, client, source, bool(config.patience)),
            },
        ),
        classes=source.highest + 1 if source.highest else None,
    )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Agree on a scale, make the model it asks for, then rounds; sites judge where the server has no documents."""
    if task.knows is None:  # trees, which need no scale
        yield from federate(fleet, config, task, run)
        return
    known, source, personal = task.knows, task.knows.source, personal_of(config)
    client: Any = personal.at_client(known.client)
    check_private(config, bytes_from_extra(MEMORY, run.memory) or client.own)
    fleet, task, content = agree_on_profile(
        *(fleet, config, task, run, SCALE, client.own),
        lambda told: join_profiles(told, config.transform, config.grades or source.highest, config.features).content(),
    )
    scale = read_scale(content)
    run.arrays = run.arrays or client.initial(scale, config.seed)
    log.info("agreed on %d features and grades from 0 to %d", scale.features, scale.highest)
    task = replace(task, classes=scale.highest + 1, initial=partial(client.initial, scale, config.seed))
    if source.judged is not None and personal.whole:
        by, named = (source.vali, "vali_") if config.patience else (source.judged(scale), "")
        judge = partial(known.client.judge, data=by, scale=scale, named=named)
        task = replace(task, evaluate=judge if isinstance(personal, OneModel) else as_global(judge))
    here = task.evaluate is not None or privacy_guarantee(config) or not config.test or not has_one_model(config)
    for done in federate(fleet, config, task, run):
        if not here and (run.round % config.evaluate_every == 0 or run.round == config.rounds):
            done.row.update(weighted_client_metrics(fleet, run, task.metrics, config.size_cap))
        yield done


def asks(config: Config, task: Task) -> Disclosure:
    """Clients tell their moments unless a scale is given, keep to what came of it, and sites judge by their queries."""
    if task.knows is None:
        return Disclosure()
    judged = task.evaluate is None and config.test and not privacy_guarantee(config)
    told = () if task.knows.client.own else (PROFILE,)
    return Disclosure((*told, *(("evaluate",) if judged else ())), (SCALE,), told)


HEEDS = frozenset({"privacy", "secure", "compress", "drift", "personal", "cluster"})
recipe = Recipe(Config, task, flow, heeds=HEEDS, asks=asks)
