"""Federated online learning to rank: users search, click, and share a ranker that learns from their clicks (FPDGD)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import Common, Part, build, setting
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.rounds import Round, Run
from mutirao.datasets.labelled import digest_of_set
from mutirao.datasets.published import find_data
from mutirao.errors import ConfigError
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.metrics import mrr, ndcg
from mutirao.privacy import build_privacy
from mutirao.randomness import rng
from mutirao.selection import how_many
from mutirao.systems.ranking.online.click_models import LOGGED, MIXED, NAMES, Cascade
from mutirao.systems.ranking.online.fpdgd_noise import Shares
from mutirao.systems.ranking.online.pdgd import make_ranker
from mutirao.systems.ranking.online.query_log import is_log, read_log
from mutirao.systems.ranking.online.shown_lists import QueryLists, User, normalize_per_query
from mutirao.systems.ranking.online.users import SearchHandler
from mutirao.systems.ranking.query_partition import partition_documents
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import load_splits
from mutirao.training.lr_schedules import schedule_of

CUT = 10
TOTALS = "online.tally"  # the run's memory of interactions, discounted nDCG and regret
# Settings of training on samples, which users do not have.
UNUSED = ("epochs", "batch_size", "momentum", "weight_decay", "optimizer", "clip", "samples", "device", "precision")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of online learning to rank; the defaults are FPDGD's, but for the number of users and of rounds."""

    rounds: int = setting(100, "number of rounds", low=1)
    clients: int = setting(100, "number of users (0: all of a log)", low=0)
    per_round: int | float = setting(1.0, "users selected a round: a count, or a share", low=1e-9)
    lr: float = setting(0.1, "learning rate of the users", low=1e-12)
    data: str = setting(
        "generated", "'generated', a folder or file as `ranking` takes them, or a log as AOL4FOLTR has it"
    )
    fold: int = setting(0, "which of the five folds (0: the one that data names, or the first)", low=0, high=5)
    qrels: str = setting("", "grades that replace those of the file: a TREC qrels file, or irds:NAME")
    queries: int = setting(400, "queries of generated data, all five parts together", low=50)
    scale: str = setting("query", "features scaled to 0 .. 1 in each query, or as they are", choices=("query", "none"))
    partition: Part = setting(
        Part("shared", home="mutirao.systems.ranking.online.shown_lists"), "which queries a user may ask"
    )
    clicks: str = setting("perfect", "how users click: by grades, or as a log says", choices=NAMES)
    noise: float = setting(0.0, "how far click probabilities are moved towards a half, 0 to 1", low=0, high=1)
    interactions: int = setting(4, "queries of a user in a round", low=1)
    shown: int = setting(10, "documents that a user is shown", low=1, high=1000)
    hidden: int = setting(0, "hidden units of the ranker (0: it is linear)", low=0)
    discount: float = setting(0.9995, "discount of what users see, by round", low=1e-9, high=1)
    judge_by: str = setting("test", "part on which the model is evaluated", choices=("test", "vali"))
    privacy: Part = setting(
        Part("none", home="mutirao.systems.ranking.online.fpdgd_noise"), "differential privacy, or FPDGD's own"
    )


def task(config: Config) -> Task:
    """Users as clients; the ranker is evaluated on queries of no user."""
    for key in UNUSED:
        if getattr(config, key) != Config.__dataclass_fields__[key].default:
            raise ConfigError(f"{key}: a user takes one step a query, with learning rate lr; leave {key} unset")
    users, test_set = load_users(config)
    lists = next(iter(users.values())).lists
    ranker = make_ranker(test_set.features, config.hidden)
    count = len(users)
    if config.centralised:
        count = config.clients
    together = how_many(config.per_round, count)
    interactions = config.interactions
    if config.centralised:
        # The pooled user has as many interactions a round as all selected users would have together.
        interactions *= together
    privacy = build_privacy(config)
    shares = privacy if isinstance(privacy, Shares) else None
    handler = SearchHandler(ranker, config.lr, interactions, config.shown, schedule_of(config), together, shares)

    def evaluate(arrays: Arrays) -> dict[str, float]:
        scores = np.nan_to_num(ranker.score(arrays, test_set.x.astype(np.float64)))
        ranking = (scores, test_set.grades, test_set.queries)
        return {f"ndcg@{CUT}": ndcg(*ranking, CUT), f"mrr@{CUT}": mrr(*ranking, CUT)}

    return Task(
        handler=handler,
        population=users,
        initial=lambda: ranker.initial(config.seed),
        evaluate=evaluate,
        judge=f"ndcg@{CUT}",
        metrics=(f"ndcg@{CUT}", f"mrr@{CUT}", "online_ndcg", "regret"),  # the flow adds the latter two
        directions={"online_ndcg": "higher", "regret": "lower", "shown_ndcg": "higher", "shown_loss": "lower"},
        knows=interactions,
        basis=cache(lambda: {"features": digest_of_set([config.scale], lists.x, lists.grades)}),
    )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """The ordinary flow, with metrics summed over interactions."""
    for done in federate(fleet, config, task, run):
        add_interactions(run, done, task.knows, config.discount)
        yield done


def add_interactions(run: Run, done: Round, interactions: int, discount: float) -> None:
    """Add a round to the run's totals, and the totals to its row.

    `interactions` counts all so far, the same number for each client that replied. `online_ndcg` is the sum over rounds
    t of discount^(t - 1) times the mean nDCG of the rankings shown, as FPDGD's authors compute it (Hofmann et al.,
    2013, sum over interactions). `regret` is the sum over interactions of 1 - nDCG, where there were relevant
    documents. Both are left out if clients may not report metrics.
    """
    total, online_ndcg, regret = run.memory.get(TOTALS, np.zeros(3))
    new = interactions * sum(int(row["replied"]) for row in done.clients)
    total += new
    done.row["interactions"] = float(total)
    if "train_shown_ndcg" in done.row:
        online_ndcg += discount ** (run.round - 1) * float(done.row["train_shown_ndcg"])
        regret += new * float(done.row["train_shown_loss"])
        done.row["online_ndcg"] = float(online_ndcg)
        done.row["regret"] = float(regret)
    run.memory = {**run.memory, TOTALS: np.array([total, online_ndcg, regret])}


def load_users(config: Any) -> tuple[dict[ClientId, User], RankingData]:
    """The users of a set with grades or of a log, and the data to evaluate on."""
    path = find_data(config.data)
    if config.data != "generated" and is_log(path):
        return load_log(config, path)
    if config.clicks == LOGGED:
        raise ConfigError("clicks=logged: these data have grades and no clicks; use perfect, or another click model")
    if not config.clients:
        raise ConfigError("clients=0: only a log has a number of users of its own; set the number of clients")
    train, vali, test = load_splits(config)
    train = apply_query_scale(config, train)
    test_set = apply_query_scale(config, test if config.judge_by == "test" else vali)
    split = build("partition", config.partition)
    draw = rng(config.seed, 0, "partition")
    parts = partition_documents(split, train.grades, train.queries, config.clients, draw, train.x)
    digits = len(str(config.clients - 1))
    names = [f"u{i:0{digits}}" for i in range(config.clients)]
    if config.centralised:
        parts = [np.arange(len(train))]
        names = ["pooled"]
    lists, owned = QueryLists.of(train, parts, config.shown)
    highest = max(1, int(train.grades.max()), int(test_set.grades.max()))
    users: dict[ClientId, User] = {}
    for name, queries in zip(names, owned, strict=True):
        users[name] = User(lists, queries, click_model(config, name, highest))
    return users, test_set


def load_log(config: Any, path: Path) -> tuple[dict[ClientId, User], RankingData]:
    """The most active users of a log, each with its own queries in their order; later queries are for evaluation."""
    if config.clicks != LOGGED or config.noise or config.partition.name != "shared" or config.centralised:
        raise ConfigError(
            "a log has users and clicks of its own: use clicks=logged, noise=0, partition=shared, centralised=false"
        )
    earlier, later = read_log(path).split()
    if config.judge_by == "vali":
        earlier, later = earlier.split()
    if not len(later.users) or not len(earlier.users):
        found = len(earlier.users) + len(later.users)
        raise ConfigError(f"{path}: {found} queries are too few to train and to evaluate on")
    train = apply_query_scale(config, earlier.data)
    test_set = apply_query_scale(config, later.data)
    lists, _ = QueryLists.of(train, [np.arange(len(train))], config.shown)
    clicks = Cascade.of(LOGGED, 1)
    names = earlier.most_active(config.clients or len(earlier.users))
    return {name: User(lists, earlier.queries_of(name), clicks, is_log=True) for name in sorted(names)}, test_set


def apply_query_scale(config: Any, data: RankingData) -> RankingData:
    """The data with features scaled as the setting `scale` says."""
    if config.scale == "query":
        return normalize_per_query(data)
    return data


def click_model(config: Any, client: ClientId, highest: int) -> Cascade:
    """A user's click model; with `mixed` it is sampled for each user."""
    name = config.clicks
    if name == "mixed":
        name = MIXED[int(rng(config.seed, 0, "clicks", client).integers(len(MIXED)))]
    return Cascade.of(name, highest, config.noise)


recipe = Recipe(Config, task, flow, heeds=frozenset({"privacy", "secure", "compress"}))
