"""Users, queries and clicks of a real log, in the form of AOL4FOLTR: who searched for what, when, and clicked on which.

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

METADATA, LETOR = "metadata.csv", ("letor.txt", "letor.txt.gz")
COLUMNS = ("qid", "user_id", "timestamp")  # those that are read; the others are of the texts themselves
LAYOUT = f"a folder with {METADATA} and {LETOR[0]} (or .gz), as AOL4FOLTR has them"
LONGEST = 1 << 24  # characters a field of the table may have
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Log:
    """Documents by query, and of each query whose it was and when: seconds since 1970. Grade 1 was clicked."""

    data: RankingData
    users: npt.NDArray[np.str_]
    times: Ints

    def split(self, share: float = 0.8) -> tuple["Log", "Log"]:
        """The earlier queries, this share of them, and the later ones: what is learnt lies before what judges."""
        order = np.argsort(self.times, kind="stable")
        cut = int(share * len(order))
        return self.take(order[:cut]), self.take(order[cut:])

    def take(self, queries: npt.NDArray[np.intp]) -> "Log":
        """These queries alone."""
        kept = np.sort(queries)
        return Log(self.data.take(np.flatnonzero(np.isin(self.data.queries, kept))), self.users[kept], self.times[kept])

    def most_active(self, count: int) -> list[str]:
        """So many users, those with most queries first; of equally many the first name."""
        names, counts = np.unique(self.users, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:count]
        return [str(name) for name in names[order]]

    def queries_of(self, user: str) -> Ints:
        """The numbers of a user's queries, in the order of time."""
        own = np.flatnonzero(self.users == user)
        return own[np.argsort(self.times[own], kind="stable")].astype(np.int64)


def is_log(path: Path) -> bool:
    """Whether the folder holds a log."""
    return (path / METADATA).is_file()


def read_log(path: Path | str) -> Log:
    """Read a folder in the form of AOL4FOLTR.

    The table may speak of more queries than there are documents for, such as those of users that were left out of the
    file of documents; the other way round is refused, as nobody would know whose they are.
    """
    folder = Path(path).expanduser()
    file = next((folder / name for name in LETOR if (folder / name).is_file()), None)
    if file is None or not is_log(folder):
        raise ConfigError(f"{folder} does not hold a log; right would be {LAYOUT}")
    data = read_letor(file)
    if not set(np.unique(data.grades).tolist()) <= {0, 1}:
        raise ConfigError(f"{file}: grades are 1 for what was clicked and 0 for the rest, and others are in it")
    known = {str(qid): number for number, qid in enumerate(data.query_ids.tolist())}
    users: list[str] = [""] * len(known)
    times = np.zeros(len(known), np.int64)
    for line, row in read_rows(folder / METADATA):
        number = known.get(row["qid"])
        if number is None:
            continue
        if users[number]:
            raise ConfigError(f"{folder / METADATA}, line {line}: query {row['qid']} stands there twice")
        users[number] = row["user_id"]
        times[number] = seconds_of(row["timestamp"], folder / METADATA, line)
    if "" in users:
        lost = data.query_ids[users.index("")]
        raise ConfigError(f"{folder / METADATA} does not say whose query {lost} of {file.name} is")
    return Log(data, np.array(users), times)


def read_rows(file: Path) -> Any:
    """Line number and columns of each line of the table."""
    usual = csv.field_size_limit(LONGEST)  # it is the whole process's
    try:
        with file.open(encoding="utf-8", newline="") as text:
            reader = csv.DictReader(text, strict=True)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{file} has no column {missing[0]!r}; right would be {', '.join(COLUMNS)}")
            for row in reader:
                if any(not row[name] for name in COLUMNS):
                    raise ConfigError(f"{file}, line {reader.line_num}: it has no {', '.join(COLUMNS)}")
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        csv.field_size_limit(usual)


def seconds_of(text: str, file: Path, line: int) -> int:
    """A time such as 2006-03-01 07:17:12, in seconds."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{file}, line {line}: {text[:40]!r} is not a time such as 2006-03-01 07:17:12") from error
    return int((when.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds())


def check_log(path: Path | str | None) -> list[str]:
    """What a log holds; everything is read."""
    if path is None:
        raise ConfigError(f"a log needs a path: {LAYOUT}")
    log = read_log(path)
    begin, end = (datetime.fromtimestamp(int(t), UTC).date() for t in (log.times.min(), log.times.max()))
    queries, users = len(log.users), len(np.unique(log.users))
    return [
        f"{path}: {queries:,} queries of {users:,} users, {begin} to {end}, {len(log.data):,} documents, "
        f"{log.data.features:,} features, {int(log.data.grades.sum()):,} clicks"
    ]
