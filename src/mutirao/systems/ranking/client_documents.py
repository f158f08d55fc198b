"""What search sites hold: documents as rows of a table, which simulated clients may share, and others to judge by."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import build
from mutirao.core.exclusion import parse_names
from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.partitioning import split_test_set
from mutirao.randomness import derive_seed, rng
from mutirao.systems.ranking.feature_scale import Scale
from mutirao.systems.ranking.letor_layouts import Parts, fold_folders, locate, parts_in
from mutirao.systems.ranking.query_partition import deal
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import ENDINGS, is_qrels, join, judgements_for, read_one, widen
from mutirao.training.samples import Index, Population


@dataclass(frozen=True, eq=False)
class Held:
    """Documents to train on, as rows of a table, and documents that a client only judges by, if it has any."""

    table: RankingData
    rows: Index
    test: "Held | None" = None

    @classmethod
    def whole(cls, table: RankingData, test: RankingData | None = None) -> "Held":
        """All documents of a table."""
        return cls(table, np.arange(len(table)), None if test is None else cls.whole(test))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def x(self) -> npt.NDArray[np.float32]:
        """Its features as they were read."""
        return self.table.x[self.rows]

    @property
    def highest(self) -> int:
        """Its highest grade."""
        own = int(self.table.grades[self.rows].max(initial=0))
        return own if self.test is None else max(own, self.test.highest)


@dataclass
class Holders(Population):
    """Clients by name, whose documents are read when they are first asked for.

    `accepts_any_client`: whether any name is accepted. A site with a file of its own has all of it, whatever its name.
    """

    names: Sequence[ClientId]
    read: Callable[[ClientId], Held]
    tests: bool = False
    accepts_any_client: bool = False
    _made: dict[ClientId, Held] = field(default_factory=dict)

    @property
    def has_tests(self) -> bool:
        """Whether clients keep anything back."""
        return self.tests

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return self.accepts_any_client or name in self.names

    def __getitem__(self, name: ClientId) -> Held:
        if name not in self:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self.read(name)
        return self._made[name]


def names_of_dealt(many: int) -> list[ClientId]:
    """c0, c1, ... with equally many digits."""
    return [f"c{i:0{len(str(many - 1))}d}" for i in range(many)]


def deal_rows(
    table: RankingData,
    parts: Sequence[Index],
    most: int,
    seed: int,
    test: RankingData,
    tests: Sequence[Index] | None = None,
) -> Holders:
    """Clients c0, c1, ... over one table, each with its rows, at most `most` of them (0: all), drawn once.

    With `tests` each judges by those rows of the `test` table.
    """
    draw, held = np.random.default_rng(seed), {}
    for i, (name, part) in enumerate(zip(names_of_dealt(len(parts)), parts, strict=True)):
        rows = part if not most or len(part) <= most else np.sort(draw.choice(part, most, replace=False))
        held[name] = Held(table, rows.astype(np.intp), None if tests is None else Held(test, tests[i]))
    return Holders(list(held), held.__getitem__, tests is not None)


def pool_held(population: Mapping[ClientId, Held]) -> Holders:
    """One client that holds what all the others do: the pooled reference."""
    parts = [population[name] for name in population]
    if all(p.table is parts[0].table for p in parts):
        one = replace(parts[0], rows=np.sort(np.concatenate([p.rows for p in parts])))
        if one.test is not None:
            one = replace(one, test=Held.whole(one.test.table))
    else:
        kept = [p.test.table for p in parts if p.test is not None]
        one = Held.whole(join_tables([p.table.take(p.rows) for p in parts]), join_tables(kept) if kept else None)
    return Holders(["pooled"], lambda name: one, one.test is not None)


def join_tables(tables: Sequence[RankingData], names: Sequence[str] = ()) -> RankingData:
    """All documents in one table, queries kept apart; with `names` their ids say whose they are."""
    firsts = np.cumsum([0, *(len(t.query_ids) for t in tables)])
    queries = [t.queries + first for t, first in zip(tables, firsts, strict=False)]
    ids = (
        [[f"{name}/{i}" for i in t.query_ids.tolist()] for name, t in zip(names, tables, strict=True)]
        if names
        else [t.query_ids.astype(str).tolist() for t in tables]
    )
    return RankingData(
        np.concatenate([t.x for t in tables]),
        np.concatenate([t.grades for t in tables]),
        np.concatenate(queries),
        np.array([i for own in ids for i in own]),
    )


log = logging.getLogger("mutirao")

OWN_TEST = 200  # documents that a client with a personal model is judged by at most
OWN_LISTS = 20  # and queries, where it ranks lists
RIGHT = "one ranking file, or train.txt and, if there are, vali.txt and test.txt"


@dataclass(frozen=True)
class Source:
    """Who holds what, and what this party has to judge by: nothing if the documents are elsewhere."""

    holders: Holders
    judged: Callable[[Scale], RankingData] | None = None
    dealt: tuple[npt.NDArray[Any], list[npt.NDArray[np.intp]]] | None = None  # grades, and which rows are whose
    set: RankingData | None = None  # that is dealt to all
    vali: RankingData | None = None  # the validation part of that
    highest: int = 0  # the highest grade of that, in all of its parts


def deal_set(config: Any, train: RankingData, vali: RankingData, test: RankingData, highest: int) -> Source:
    """One set, dealt to clients c0, c1, ...; a part of it that is dealt to nobody judges the common model.

    With personal models each client is judged by documents of it with grades like its own, or by queries drawn for it.
    """
    judged = test if config.judge_by == "test" else vali
    split = build("partition", config.partition)
    parts = deal(split, train.grades, train.queries, config.clients, rng(config.seed, 0, "partition"), train.x)
    tests: list[Index] | None = None
    if config.personal.name != "none" and config.loss == "grades":
        tests = split_test_set(train.grades, parts, judged.grades, config.seed, OWN_TEST)
    elif config.personal.name != "none":
        tests = [draw_queries(judged, config.seed, name) for name in names_of_dealt(len(parts))]
    most = config.samples if config.loss == "grades" else 0  # of lists it is so many lists, when they are made
    dealt = deal_rows(train, parts, most, derive_seed(config.seed, 0, "samples"), judged, tests)
    return Source(dealt, lambda scale: judged, (train.grades, parts), train, vali, highest)


def draw_queries(table: RankingData, seed: int, name: ClientId) -> Index:
    """The documents of some queries, drawn for a client."""
    drawn = rng(seed, 0, "own test", name).permutation(len(table.query_ids))[:OWN_LISTS]
    return np.flatnonzero(np.isin(table.queries, drawn))


def client_folders(config: Any) -> dict[ClientId, Path]:
    """The folders client_*/ of the data, by name; none if there are none."""
    place = Path(config.data).expanduser()
    if config.data == "generated" or not place.is_dir():
        return {}
    return {child.name: child for child in sorted(place.iterdir()) if child.is_dir() and child.name[:7] == "client_"}


def read_clients(config: Any, folders: dict[ClientId, Path]) -> Source:
    """A client for each folder; together their test queries judge the model."""
    held = {name: hold(config, folder, name) for name, folder in folders.items()}
    tests = [name for name, own in held.items() if own.test is not None]

    def judged(scale: Scale) -> RankingData:
        fit = {n: t.table for n in tests if (t := held[n].test) is not None and t.table.features == scale.features}
        left = {n: table for n, table in fit.items() if n not in parse_names(config.exclude)}
        return join_tables(list(left.values()), list(left))

    return Source(Holders(list(held), held.__getitem__, bool(tests)), judged if tests else None)


def own_files(config: Any) -> Source:
    """A site with files of its own, or the server, which holds none of the sites' documents."""
    if config.data not in ("", "generated"):
        place = Path(config.data).expanduser()
        return Source(
            Holders(["site"], lambda name: hold(config, place, name), config.test > 0, accepts_any_client=True)
        )

    def refuse(name: ClientId) -> Held:
        raise ConfigError(f"data: {name} has files of its own, which are not here; a site names its own with --data")

    names = [f"site {k}" for k in range(1, config.clients + 1)]
    return Source(Holders(names, refuse, config.test > 0, accepts_any_client=True))


def hold(config: Any, place: Path, name: ClientId) -> Held:
    """What a site holds by its files: what it trains on, and whole queries that it only judges by.

    Without a file for those it keeps back the share `test` of its queries, drawn by (seed, client).
    """
    files = site_files(place, config.fold or None)
    judges = judgements_for(place, config.qrels)
    tables = {part: join([read_one(f, judges) for f in own], own) for part, own in files.items()}
    for part, table in tables.items():
        name_scattered(f"{name}: {', '.join(str(f) for f in files[part])}", table)
    check_apart(name, tables)
    train, kept = tables["train"], tables.get(config.judge_by)
    if kept is None and config.test:
        if config.judge_by == "vali" and "test" not in tables:  # a test part, put aside for nobody to see
            train, _ = keep_back(train, config.test, rng(config.seed, 0, "own test", name))
        train, kept = keep_back(train, config.test, rng(config.seed, 0, f"own {config.judge_by}", name))
    width = max(table.features for table in tables.values())
    if config.features > width:
        log.warning("%s: features %d to %d are in no line, and count as 0", name, width + 1, config.features)
    width = max(width, config.features)
    one = Held.whole(widen(train, width), None if kept is None else widen(kept, width))
    if config.samples and config.loss == "grades" and len(one) > config.samples:
        draw = rng(config.seed, 0, "samples", name)
        return Held(one.table, np.sort(draw.choice(one.rows, config.samples, replace=False)), one.test)
    return one


def site_files(place: Path, fold: int | None) -> Parts:
    """The files of a site by their parts: those of a fold, or train with or without others, or one file alone."""
    if place.is_file():
        return {"train": (place,)}
    if not place.is_dir():
        raise ConfigError(f"data: there is no {place}; right would be {RIGHT}")
    if fold_folders(place):
        return locate(place, fold)
    if "train" in (found := parts_in(place)):
        return found
    files = [f for f in sorted(place.iterdir()) if f.is_file() and f.name[0] != "."]
    files = [f for f in files if not is_qrels(f) and f.suffix not in ENDINGS]
    if len(files) != 1:
        raise ConfigError(f"{place} holds {', '.join(f.name for f in files) or 'no file'}; right would be {RIGHT}")
    return {"train": (files[0],)}


def keep_back(table: RankingData, share: float, draw: np.random.Generator) -> tuple[RankingData, RankingData | None]:
    """The queries to train on, and so large a share of them to judge by: never all."""
    many = len(table.query_ids)
    chosen = draw.permutation(many)[: min(round(share * many), many - 1)]
    back = np.isin(table.queries, chosen)
    return table.take(np.flatnonzero(~back)), table.take(np.flatnonzero(back)) if len(chosen) else None


def name_scattered(where: str, table: RankingData) -> None:
    """Say which query comes again after others came: its documents count as one list, wherever they stand."""
    starts = np.flatnonzero(np.diff(table.queries, prepend=-1))
    if len(starts) > len(table.query_ids):
        seen = set[int]()
        first = next(q for q in table.queries[starts].tolist() if q in seen or seen.add(q))  # type: ignore[func-returns-value]
        more = len(starts) - len(table.query_ids)
        query = table.query_ids[first]
        log.warning(
            "%s: query %s comes again after others (%d such places); it is taken as one list", where, query, more
        )


def check_apart(name: ClientId, tables: dict[str, RankingData]) -> None:
    """Refuse a query that a site trains on and is judged by."""
    ids = {part: set(map(str, table.query_ids.tolist())) for part, table in tables.items()}
    for part in ("vali", "test"):
        if part in ids and (both := sorted(ids["train"] & ids[part])):
            many = f" ({len(both)} such queries)" if len(both) > 1 else ""
            raise ConfigError(
                f"{name}: query {both[0]} is in its train and in its {part} part{many}; take it out of one"
            )
