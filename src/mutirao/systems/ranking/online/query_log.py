"""Users, queries and clicks of a real log, in the format of AOL4FOLTR.

The set is two files (Gregoriadis, Kang and Pouwelse, 2025: A Large-Scale Web Search Dataset for Federated Online
Learning to Rank). `metadata.csv` has a line a query with the columns qid, user_id, timestamp, query, target_doc_id and
candidate_doc_ids; `letor.txt` the candidates of each qid in LETOR's form, with grade 1 for the one that was clicked.
"""

import csv
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor import read_letor
from mutirao.systems.ranking.ranking_data import RankingData

METADATA = "metadata.csv"
LETOR = ("letor.txt", "letor.txt.gz")
COLUMNS = ("qid", "user_id", "timestamp")  # those that are read; the others are texts
LAYOUT = f"a folder with {METADATA} and {LETOR[0]} (or .gz), as AOL4FOLTR has them"
LONGEST = 1 << 24  # characters of a field
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class QueryLog:
    """Documents by query, with each query's user and time in seconds since 1970. Grade 1 was clicked."""

    data: RankingData
    users: npt.NDArray[np.str_]
    times: Ints

    def split(self, share: float = 0.8) -> tuple["QueryLog", "QueryLog"]:
        """Split by time: this share of the queries to train on, and the later ones to evaluate on."""
        order = np.argsort(self.times, kind="stable")
        cut = int(share * len(order))
        return self.take(order[:cut]), self.take(order[cut:])

    def take(self, queries: npt.NDArray[np.intp]) -> "QueryLog":
        """Only these queries."""
        kept = np.sort(queries)
        return QueryLog(
            self.data.take(np.flatnonzero(np.isin(self.data.queries, kept))), self.users[kept], self.times[kept]
        )

    def most_active(self, count: int) -> list[str]:
        """The users with most queries, ties by name."""
        names, counts = np.unique(self.users, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:count]
        return [str(name) for name in names[order]]

    def queries_of(self, user: str) -> Ints:
        """The numbers of a user's queries, in the order of time."""
        own = np.flatnonzero(self.users == user)
        return own[np.argsort(self.times[own], kind="stable")].astype(np.int64)


def is_log(path: Path) -> bool:
    """Whether the folder contains a log."""
    return (path / METADATA).is_file()


def read_log(path: Path | str) -> QueryLog:
    """Read a folder in the format of AOL4FOLTR.

    The table may list queries without documents, such as those of users that were left out. A query with documents that
    is not in the table is refused, as its user would be unknown.
    """
    folder = Path(path).expanduser()
    file = next((folder / name for name in LETOR if (folder / name).is_file()), None)
    if file is None or not is_log(folder):
        raise ConfigError(f"{folder} does not contain a log; expected {LAYOUT}")
    data = read_letor(file)
    if not set(np.unique(data.grades).tolist()) <= {0, 1}:
        raise ConfigError(f"{file}: expected grade 1 for documents clicked and 0 for the rest, found others")
    known = {str(qid): number for number, qid in enumerate(data.query_ids.tolist())}
    users: list[str] = [""] * len(known)
    times = np.zeros(len(known), np.int64)
    for line, row in metadata_rows(folder / METADATA):
        number = known.get(row["qid"])
        if number is None:
            continue
        if users[number]:
            raise ConfigError(f"{folder / METADATA}, line {line}: query {row['qid']} stands there twice")
        users[number] = row["user_id"]
        times[number] = parse_seconds(row["timestamp"], folder / METADATA, line)
    if "" in users:
        lost = data.query_ids[users.index("")]
        raise ConfigError(f"{folder / METADATA} names no user for query {lost} of {file.name}")
    return QueryLog(data, np.array(users), times)


def metadata_rows(file: Path) -> Any:
    """Line number and columns of each line of the metadata."""
    # The limit is that of the whole process, so it is set back at the end.
    usual = csv.field_size_limit(LONGEST)
    try:
        with file.open(encoding="utf-8", newline="") as text:
            reader = csv.DictReader(text, strict=True)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{file} has no column {missing[0]!r}; expected {', '.join(COLUMNS)}")
            for row in reader:
                if any(not row[name] for name in COLUMNS):
                    raise ConfigError(f"{file}, line {reader.line_num}: it has no {', '.join(COLUMNS)}")
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        csv.field_size_limit(usual)


def parse_seconds(text: str, file: Path, line: int) -> int:
    """A time such as 2006-03-01 07:17:12, in seconds."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{file}, line {line}: {text[:40]!r} is not a time such as 2006-03-01 07:17:12") from error
    return int((when.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds())


def check_log(path: Path | str | None) -> list[str]:
    """What `mutirao data check` reports of a log; everything is read."""
    if path is None:
        raise ConfigError(f"a log needs a path: {LAYOUT}")
    log = read_log(path)
    begin, end = (datetime.fromtimestamp(int(t), UTC).date() for t in (log.times.min(), log.times.max()))
    queries = len(log.users)
    users = len(np.unique(log.users))
    return [
        f"{path}: {queries:,} queries of {users:,} users, {begin} to {end}, {len(log.data):,} documents, "
        f"{log.data.features:,} features, {int(log.data.grades.sum()):,} clicks"
    ]
