"""The users of a run, from a set with grades or from a log: what each may ask, how it clicks, and what judges."""

from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import build
from mutirao.core.fleet import ClientId
from mutirao.datasets.locations import find_data
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.ranking.online.click_models import LOGGED, MIXED, Cascade
from mutirao.systems.ranking.online.query_log import is_log, read_log
from mutirao.systems.ranking.online.shown_lists import Lists, User, normalise
from mutirao.systems.ranking.query_partition import deal
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import load_parts


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
