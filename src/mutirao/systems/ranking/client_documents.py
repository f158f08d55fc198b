"""Which client has which documents: one data set partitioned, a folder for each client, or a file at each site."""

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
from mutirao.systems.ranking.feature_scale import FeatureScale
from mutirao.systems.ranking.letor_layouts import Parts, fold_folders, locate_parts, parts_in
from mutirao.systems.ranking.query_partition import partition_documents
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import (
    SIZE_SUFFIXES,
    concatenate_files,
    find_qrels,
    is_qrels,
    pad_documents,
    read_ranking_file,
)
from mutirao.training.samples import Index, Population

log = logging.getLogger("mutirao")

OWN_TEST = 200  # most test documents of a client with a personal model
OWN_LISTS = 20  # most test queries of such a client, where lists are ranked
RIGHT = "one ranking file, or train.txt with vali.txt and test.txt if there are any"


@dataclass(frozen=True, eq=False)
class ClientDocuments:
    """A client's training documents, as rows of a table that clients may share, and its test documents, if any."""

    table: RankingData
    rows: Index
    test: "ClientDocuments | None" = None

    @classmethod
    def whole(cls, table: RankingData, test: RankingData | None = None) -> "ClientDocuments":
        """All documents of a table."""
        return cls(table, np.arange(len(table)), None if test is None else cls.whole(test))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def x(self) -> npt.NDArray[np.float32]:
        """Features of the training documents, as they were read."""
        return self.table.x[self.rows]

    @property
    def highest(self) -> int:
        """The highest grade, test documents included."""
        own = int(self.table.grades[self.rows].max(initial=0))
        if self.test is None:
            return own
        return max(own, self.test.highest)


@dataclass
class DocumentPopulation(Population):
    """Clients by name; their documents are read on first access.

    With `accepts_any_client`, every name is valid: a site with a file of its own has all of it, whatever its name.
    """

    names: Sequence[ClientId]
    read: Callable[[ClientId], ClientDocuments]
    tests: bool = False
    accepts_any_client: bool = False
    _cache: dict[ClientId, ClientDocuments] = field(default_factory=dict)

    @property
    def has_tests(self) -> bool:
        """Whether clients have test documents."""
        return self.tests

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return self.accepts_any_client or name in self.names

    def __getitem__(self, name: ClientId) -> ClientDocuments:
        if name not in self:
            raise KeyError(name)
        if name not in self._cache:
            self._cache[name] = self.read(name)
        return self._cache[name]


@dataclass(frozen=True)
class RankingSource:
    """The clients' documents, and what this party can evaluate on: nothing if the documents are elsewhere."""

    population: DocumentPopulation
    test_set: Callable[[FeatureScale], RankingData] | None = None
    partition: tuple[npt.NDArray[Any], list[npt.NDArray[np.intp]]] | None = None  # grades, and the rows of each client
    train: RankingData | None = None  # the set that was partitioned
    vali: RankingData | None = None  # its validation part
    highest: int = 0  # the highest grade of that set, in all of its parts


def numbered_clients(count: int) -> list[ClientId]:
    """c0, c1, ... with equally many digits."""
    digits = len(str(count - 1))
    return [f"c{i:0{digits}d}" for i in range(count)]


def partition_set(config: Any, train: RankingData, vali: RankingData, test: RankingData, highest: int) -> RankingSource:
    """Partition one set over clients c0, c1, ...; a part of it that no client has evaluates the common model.

    With personal models each client has test documents with its own distribution of grades, or sampled queries.
    """
    test_set = test if config.judge_by == "test" else vali
    split = build("partition", config.partition)
    draw = rng(config.seed, 0, "partition")
    parts = partition_documents(split, train.grades, train.queries, config.clients, draw, train.x)
    is_personal = config.personal.name != "none"
    tests: list[Index] | None = None
    if is_personal and config.loss == "grades":
        tests = split_test_set(train.grades, parts, test_set.grades, config.seed, OWN_TEST)
    elif is_personal:
        tests = [sample_queries(test_set, config.seed, name) for name in numbered_clients(len(parts))]
    # Lists are limited by their number, when they are made.
    most = config.samples if config.loss == "grades" else 0
    population = assign_rows(train, parts, most, derive_seed(config.seed, 0, "samples"), test_set, tests)
    return RankingSource(population, lambda scale: test_set, (train.grades, parts), train, vali, highest)


def assign_rows(
    table: RankingData,
    parts: Sequence[Index],
    most: int,
    seed: int,
    test: RankingData,
    tests: Sequence[Index] | None = None,
) -> DocumentPopulation:
    """Clients over one table, each with its rows or a random sample of `most` of them (0: all).

    With `tests` each client has those rows of the `test` table as its test documents.
    """
    draw = np.random.default_rng(seed)
    clients: dict[ClientId, ClientDocuments] = {}
    for i, (name, part) in enumerate(zip(numbered_clients(len(parts)), parts, strict=True)):
        rows = part
        if most and len(part) > most:
            rows = np.sort(draw.choice(part, most, replace=False))
        own_test = None if tests is None else ClientDocuments(test, tests[i])
        clients[name] = ClientDocuments(table, rows.astype(np.intp), own_test)
    return DocumentPopulation(list(clients), clients.__getitem__, tests is not None)


def sample_queries(table: RankingData, seed: int, name: ClientId) -> Index:
    """The documents of up to OWN_LISTS queries, sampled for a client."""
    sampled = rng(seed, 0, "own test", name).permutation(len(table.query_ids))[:OWN_LISTS]
    return np.flatnonzero(np.isin(table.queries, sampled))


def client_folders(config: Any) -> dict[ClientId, Path]:
    """The folders client_*/ of the data, by name; empty if there are none."""
    place = Path(config.data).expanduser()
    if config.data == "generated" or not place.is_dir():
        return {}
    return {child.name: child for child in sorted(place.iterdir()) if child.is_dir() and child.name[:7] == "client_"}


def folder_source(config: Any, folders: dict[ClientId, Path]) -> RankingSource:
    """A client for each folder; the model is evaluated on the test queries of all of them."""
    clients = {name: read_client(config, folder, name) for name, folder in folders.items()}
    tests = {name: own.test.table for name, own in clients.items() if own.test is not None}

    def test_set(scale: FeatureScale) -> RankingData:
        excluded = parse_names(config.exclude)
        used = {n: t for n, t in tests.items() if t.features == scale.features and n not in excluded}
        return concatenate_tables(list(used.values()), list(used))

    population = DocumentPopulation(list(clients), clients.__getitem__, bool(tests))
    return RankingSource(population, test_set if tests else None)


def site_source(config: Any) -> RankingSource:
    """A site with files of its own, or the server, which has none of the sites' documents."""
    if config.data not in ("", "generated"):
        place = Path(config.data).expanduser()

        def read(name: ClientId) -> ClientDocuments:
            return read_client(config, place, name)

        return RankingSource(DocumentPopulation(["site"], read, config.test > 0, accepts_any_client=True))

    def refuse(name: ClientId) -> ClientDocuments:
        raise ConfigError(f"data: {name} has files of its own, which are not here; a site names its own with --data")

    names = [f"site {k}" for k in range(1, config.clients + 1)]
    return RankingSource(DocumentPopulation(names, refuse, config.test > 0, accepts_any_client=True))


def read_client(config: Any, place: Path, name: ClientId) -> ClientDocuments:
    """A site's training documents and test queries, from its files.

    Without a test file the share `test` of its queries is held out, sampled by (seed, client).
    """
    files = site_files(place, config.fold or None)
    qrels = find_qrels(place, config.qrels)
    tables: dict[str, RankingData] = {}
    for part, own in files.items():
        tables[part] = concatenate_files([read_ranking_file(file, qrels) for file in own], own)
        warn_scattered_queries(f"{name}: {', '.join(str(file) for file in own)}", tables[part])
    check_disjoint_queries(name, tables)
    train = tables["train"]
    test = tables.get(config.judge_by)
    if test is None and config.test:
        if config.judge_by == "vali" and "test" not in tables:
            # Test queries are set aside unseen, so that tuning on vali leaves them untouched.
            train, _ = hold_out_queries(train, config.test, rng(config.seed, 0, "own test", name))
        train, test = hold_out_queries(train, config.test, rng(config.seed, 0, f"own {config.judge_by}", name))
    width = max(table.features for table in tables.values())
    if config.features > width:
        log.warning("%s: features %d to %d occur in no line and count as 0", name, width + 1, config.features)
        width = config.features
    if test is not None:
        test = pad_documents(test, width)
    one = ClientDocuments.whole(pad_documents(train, width), test)
    if config.samples and config.loss == "grades" and len(one) > config.samples:
        sampled = rng(config.seed, 0, "samples", name).choice(one.rows, config.samples, replace=False)
        return replace(one, rows=np.sort(sampled))
    return one


def site_files(place: Path, fold: int | None) -> Parts:
    """The files of a site by part: those of a fold, a train file with or without others, or a single file."""
    if place.is_file():
        return {"train": (place,)}
    if not place.is_dir():
        raise ConfigError(f"data: {place} does not exist; expected {RIGHT}")
    if fold_folders(place):
        return locate_parts(place, fold)
    if "train" in (found := parts_in(place)):
        return found
    files = [f for f in sorted(place.iterdir()) if f.is_file() and f.name[0] != "."]
    files = [f for f in files if not is_qrels(f) and f.suffix not in SIZE_SUFFIXES]
    if len(files) != 1:
        raise ConfigError(f"{place} contains {', '.join(f.name for f in files) or 'no file'}; expected {RIGHT}")
    return {"train": (files[0],)}


def hold_out_queries(
    table: RankingData, share: float, draw: np.random.Generator
) -> tuple[RankingData, RankingData | None]:
    """Split off the given share of the queries, never all of them; None if that is no query."""
    count = len(table.query_ids)
    chosen = draw.permutation(count)[: min(round(share * count), count - 1)]
    held_out = np.isin(table.queries, chosen)
    test = None
    if len(chosen):
        test = table.take(np.flatnonzero(held_out))
    return table.take(np.flatnonzero(~held_out)), test


def warn_scattered_queries(where: str, table: RankingData) -> None:
    """Warn of queries with documents in several places of the file: they still count as one list."""
    starts = np.flatnonzero(np.diff(table.queries, prepend=-1))
    scattered = len(starts) - len(table.query_ids)
    if not scattered:
        return
    # A query has one start for each place where its documents stand; the first that comes again is named.
    seen: set[int] = set()
    for query in table.queries[starts].tolist():
        if query in seen:
            break
        seen.add(query)
    log.warning(
        "%s: the documents of query %s are not contiguous (%d such places); they are taken as one list",
        *(where, table.query_ids[query], scattered),
    )


def check_disjoint_queries(name: ClientId, tables: dict[str, RankingData]) -> None:
    """Refuse a query that stands in a site's training part and in one it is evaluated on."""
    ids = {part: set(map(str, table.query_ids.tolist())) for part, table in tables.items()}
    for part in ("vali", "test"):
        shared = sorted(ids["train"] & ids.get(part, set()))
        if shared:
            count = f" ({len(shared)} such queries)" if len(shared) > 1 else ""
            raise ConfigError(
                f"{name}: query {shared[0]} is in its train and in its {part} part{count}; remove it from one of them"
            )


def pool_documents(population: Mapping[ClientId, ClientDocuments]) -> DocumentPopulation:
    """One client with the documents of all: the pooled reference."""
    clients = list(population.values())
    # Clients of one partitioned set share its table: their rows are enough, and no document is copied.
    if all(c.table is clients[0].table for c in clients):
        pooled = replace(clients[0], rows=np.sort(np.concatenate([c.rows for c in clients])))
        if pooled.test is not None:
            pooled = replace(pooled, test=ClientDocuments.whole(pooled.test.table))
    else:
        train = concatenate_tables([c.table.take(c.rows) for c in clients])
        tests = [c.test.table for c in clients if c.test is not None]
        pooled = ClientDocuments.whole(train, concatenate_tables(tests) if tests else None)
    return DocumentPopulation(["pooled"], lambda name: pooled, pooled.test is not None)


def concatenate_tables(tables: Sequence[RankingData], names: Sequence[str] = ()) -> RankingData:
    """All documents in one table, queries of different tables kept apart; `names` become prefixes of the query ids."""
    queries: list[npt.NDArray[np.int64]] = []
    ids: list[str] = []
    for k, table in enumerate(tables):
        prefix = f"{names[k]}/" if names else ""
        queries.append(table.queries + len(ids))
        ids += [f"{prefix}{i}" for i in table.query_ids.tolist()]
    return RankingData(
        np.concatenate([t.x for t in tables]),
        np.concatenate([t.grades for t in tables]),
        np.concatenate(queries),
        np.array(ids),
    )
