"""Federated online learning to rank: users search, click, and share a ranker that learns from the clicks (FPDGD)."""

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
from mutirao.datasets.locations import find_data
from mutirao.errors import ConfigError
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.metrics import mrr, ndcg
from mutirao.privacy import build_privacy
from mutirao.randomness import rng
from mutirao.selection import how_many
from mutirao.systems.ranking.online.click_models import LOGGED, MIXED, NAMES, Cascade
from mutirao.systems.ranking.online.fpdgd_noise import Shares
from mutirao.systems.ranking.online.query_log import is_log, read_log
from mutirao.systems.ranking.online.rankers import make_ranker
from mutirao.systems.ranking.online.shown_lists import Lists, User, normalise
from mutirao.systems.ranking.online.users import Searching
from mutirao.systems.ranking.query_partition import deal
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import load_parts
from mutirao.training.lr_schedules import schedule_of


def load_users(config: Any) -> tuple[dict[ClientId, User], RankingData]:
    """The users with what they may ask, and what judges the model."""
    path = find_data(config.data)
    if config.data != "generated" and is_log(path):
        return load_log(config, path)
    if config.clicks == LOGGED:
        raise ConfigError("clicks=logged: these data have grades and no clicks; use perfect, or another model")
    if not config.clients:
        raise ConfigError("clients=0: only a log knows how many users there are")
    train, vali, test = load_parts(config)
    train, judged = (scaled(config, part) for part in (train, test if config.judge_by == "test" else vali))
    split = build("partition", config.partition)
    draw = rng(config.seed, 0, "partition")
    parts = deal(split, train.grades, train.queries, config.clients, draw, train.x)
    lists, owned = Lists.of(train, [np.arange(len(train))] if config.centralised else parts, config.shown)
    highest = max(1, int(train.grades.max()), int(judged.grades.max()))
    width = len(str(config.clients - 1))
    names = ["pooled"] if config.centralised else [f"u{i:0{width}}" for i in range(config.clients)]
    return {c: User(lists, own, clicks_of(config, c, highest)) for c, own in zip(names, owned, strict=True)}, judged


def load_log(config: Any, path: Path) -> tuple[dict[ClientId, User], RankingData]:
    """The same of a log: its most active users, each with its own queries in their order; later ones judge."""
    if config.clicks != LOGGED or config.noise or config.partition.name != "shared" or config.centralised:
        raise ConfigError(
            "a log has users and clicks of its own: use clicks=logged, noise=0, partition=shared, centralised=false"
        )
    earlier, later = read_log(path).split()
    if config.judge_by == "vali":
        earlier, later = earlier.split()
    if not len(later.users) or not len(earlier.users):
        raise ConfigError(f"{path}: {len(earlier.users) + len(later.users)} queries are too few to train and to judge")
    train, judged = scaled(config, earlier.data), scaled(config, later.data)
    lists, _ = Lists.of(train, [np.arange(len(train))], config.shown)
    clicks = Cascade.of(LOGGED, 1)
    names = earlier.most_active(config.clients or len(earlier.users))
    return {name: User(lists, earlier.queries_of(name), clicks, log=True) for name in sorted(names)}, judged


def scaled(config: Any, data: RankingData) -> RankingData:
    """The data with their features as the users' own lists give them."""
    return normalise(data) if config.scale == "query" else data


def clicks_of(config: Any, client: ClientId, highest: int) -> Cascade:
    """How a user clicks; of `mixed` ones each in a way of its own."""
    name = config.clicks
    if name == "mixed":
        name = MIXED[int(rng(config.seed, 0, "clicks", client).integers(len(MIXED)))]
    return Cascade.of(name, highest, config.noise)


TALLY = "online.tally"  # where they lie: interactions, nDCG discounted, regret


def add_up(run: Run, done: Round, interactions: int, discount: float) -> None:
    """Add a round to the sums, and their values to its row.

    `interactions` are all so far, each client that replied having had so many. `online_ndcg` is the sum over rounds t
    of discount^(t - 1) times the mean nDCG of the rankings shown, as FPDGD's authors have it (Hofmann et al., 2013, do
    so by interaction); `regret` the sum over interactions of 1 - nDCG, where there was something to find. The two are
    left out if clients may not tell what they saw.
    """
    total, seen, regret = run.memory.get(TALLY, np.zeros(3))
    now = interactions * sum(int(row["replied"]) for row in done.clients)
    figures = {"interactions": total + now}
    if "train_shown_ndcg" in done.row:
        seen += discount ** (run.round - 1) * float(done.row["train_shown_ndcg"])
        regret += now * float(done.row["train_shown_loss"])
        figures |= {"online_ndcg": seen, "regret": regret}
    run.memory = {**run.memory, TALLY: np.array([total + now, seen, regret])}
    done.row.update({name: float(value) for name, value in figures.items()})


CUT = 10
# Settings of training on samples, of which there are none.
UNUSED = ("epochs", "batch_size", "momentum", "weight_decay", "optimizer", "clip", "samples", "device", "precision")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of online learning to rank; the defaults are FPDGD's, but for the number of users and of rounds."""

    rounds: int = setting(100, "how many rounds", low=1)
    clients: int = setting(100, "how many users (0: of a log, all)", low=0)
    per_round: int | float = setting(1.0, "users that take part in a round: a count, or a share", low=1e-9)
    lr: float = setting(0.1, "learning rate of the users", low=1e-12)
    data: str = setting(
        "generated", "'generated', a folder or file as `ranking` takes them, or a log as AOL4FOLTR has it"
    )
    fold: int = setting(0, "which of the five folds (0: the one that data names, or else the first)", low=0, high=5)
    qrels: str = setting("", "judgements in place of the file's grades: a TREC qrels file, or irds:NAME")
    queries: int = setting(400, "queries of generated data, all five parts together", low=50)
    scale: str = setting("query", "features brought to 0 .. 1 in each query, or as they are", choices=("query", "none"))
    partition: Part = setting(
        Part("shared", home="mutirao.systems.ranking.online.shown_lists"), "which queries a user may ask"
    )
    clicks: str = setting("perfect", "how users click: by grades, or as a log says", choices=NAMES)
    noise: float = setting(0.0, "how far click probabilities are moved towards a half, 0 to 1", low=0, high=1)
    interactions: int = setting(4, "queries of a user in a round", low=1)
    shown: int = setting(10, "documents that a user is shown", low=1, high=1000)
    hidden: int = setting(0, "hidden units of the ranker (0: it is linear)", low=0)
    discount: float = setting(0.9995, "discount of what users see, by round", low=1e-9, high=1)
    judge_by: str = setting("test", "which part judges the model", choices=("test", "vali"))
    privacy: Part = setting(
        Part("none", home="mutirao.systems.ranking.online.fpdgd_noise"), "differential privacy, or FPDGD's own"
    )


def task(config: Config) -> Task:
    """Users as clients; the ranker is judged by queries that nobody has asked."""
    for key in UNUSED:
        if getattr(config, key) != Config.__dataclass_fields__[key].default:
            raise ConfigError(f"{key}: a user takes one step a query here, at the rate lr; leave it as it is")
    users, judged = load_users(config)
    lists = next(iter(users.values())).lists
    ranker = make_ranker(judged.features, config.hidden)
    together = how_many(config.per_round, config.clients if config.centralised else len(users))
    each = config.interactions * (together if config.centralised else 1)  # as many interactions a round as users have
    shares = build_privacy(config)
    own = shares if isinstance(shares, Shares) else None
    handler = Searching(ranker, config.lr, each, config.shown, schedule_of(config), together, own)

    def evaluate(arrays: Arrays) -> dict[str, float]:
        scores = np.nan_to_num(ranker.score(arrays, judged.x.astype(np.float64)))
        of = scores, judged.grades, judged.queries, CUT
        return {f"ndcg@{CUT}": ndcg(*of), f"mrr@{CUT}": mrr(*of)}

    return Task(
        handler=handler,
        population=users,
        initial=lambda: ranker.initial(config.seed),
        evaluate=evaluate,
        judge=f"ndcg@{CUT}",
        metrics=(f"ndcg@{CUT}", f"mrr@{CUT}", "online_ndcg", "regret"),  # the latter two are added by the flow
        directions={"online_ndcg": "higher", "regret": "lower", "shown_ndcg": "higher", "shown_loss": "lower"},
        knows=each,
        basis=cache(lambda: {"features": digest_of_set([config.scale], lists.x, lists.grades)}),
    )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """The ordinary flow; what users saw is added up by interactions."""
    for done in federate(fleet, config, task, run):
        add_up(run, done, task.knows, config.discount)
        yield done


recipe = Recipe(Config, task, flow, heeds=frozenset({"privacy", "secure", "compress"}))
