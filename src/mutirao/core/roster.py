"""What the server has recorded of its clients, in columns: for a million clients arrays, not objects."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays

ClientId = str
MOST_FIGURES = 256
OPEN = np.frombuffer(b"[", np.uint8)
CLOSE = np.frombuffer(b"]", np.uint8)
COUNTS = (
    *("selected", "replied", "last_selected", "last_replied", "n", "last_probed", "last_improved"),
    *("first_n", "asked", "last_sent"),
)


def _column() -> npt.NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass
class Roster:
    """One row for each client, sorted by name, so that nothing depends on the order of arrival.

    `selected`, `replied`: numbers of rounds.
    `last_selected`, `last_replied`, `last_probed`, `last_improved`: rounds (0: never); a client improves when its loss
    is lower than the one before.
    `last_sent`: the round of the model that the client was last sent; in an asynchronous run it is before its reply's.
    `asked`: the number of requests, also those of rounds that were undone.
    `n`, `first_n`: the last sample count that was accepted, and the first, or that of its admission (0: unknown).
    `figures`, `vectors`: the last value of each metric, and the last vector of each kind, by client (NaN: unknown).

    >>> roster = Roster()
    >>> roster.meet(["bia", "ana"])
    >>> roster.mark(1, ["bia"], {"bia": 120})  # round 1: bia was selected and replied, with 120 samples
    >>> roster.ids, roster.ages(round=3), roster.n
    (['ana', 'bia'], array([3, 2]), array([  0, 120]))
    """

    ids: list[ClientId] = field(default_factory=list)
    present: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    selected: npt.NDArray[np.int64] = field(default_factory=_column)
    replied: npt.NDArray[np.int64] = field(default_factory=_column)
    last_selected: npt.NDArray[np.int64] = field(default_factory=_column)
    last_replied: npt.NDArray[np.int64] = field(default_factory=_column)
    n: npt.NDArray[np.int64] = field(default_factory=_column)
    last_probed: npt.NDArray[np.int64] = field(default_factory=_column)
    last_improved: npt.NDArray[np.int64] = field(default_factory=_column)
    first_n: npt.NDArray[np.int64] = field(default_factory=_column)
    asked: npt.NDArray[np.int64] = field(default_factory=_column)
    last_sent: npt.NDArray[np.int64] = field(default_factory=_column)
    figures: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    vectors: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in COUNTS:
            if not len(getattr(self, name)):
                setattr(self, name, np.zeros(len(self.ids), np.int64))
        self._index = {c: i for i, c in enumerate(self.ids)}
        self._met: Sequence[ClientId] | None = None
        self._named: tuple[npt.NDArray[np.uint8], npt.NDArray[np.intp]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, client: ClientId) -> int:
        """The row of a client; KeyError if it has none."""
        return self._index[client]

    def __contains__(self, client: object) -> bool:
        """Whether the client has a row."""
        return client in self._index

    def here(self) -> npt.NDArray[np.intp]:
        """Rows of the clients that are present now."""
        return np.flatnonzero(self.present)

    def ages(self, round: int) -> npt.NDArray[np.int64]:
        """Rounds since each client was last selected; the age of one never selected is the round itself."""
        return round - self.last_selected

    def figure(self, name: str, default: float = np.nan) -> npt.NDArray[np.float64]:
        """The column of a metric, unknown values replaced by `default`."""
        column = self.figures.get(name)
        if column is None:
            return np.full(len(self), default)
        if np.isnan(default):
            return column.copy()
        return np.where(np.isnan(column), default, column)

    def meet(self, clients: Sequence[ClientId]) -> None:
        """Set which clients are present; new clients get a row."""
        if clients is self._met:  # the same list as in the last round: nothing to do
            return
        self._admit(clients)
        self.present[:] = False
        self.present[[self._index[c] for c in clients]] = True
        self._met = clients

    def _admit(self, clients: Iterable[ClientId]) -> None:
        new = {c for c in clients if c not in self._index}
        if not new:
            return
        old = self.ids
        self.ids = sorted([*old, *new])
        self._index = {c: i for i, c in enumerate(self.ids)}
        self._named = None
        place = np.array([self._index[c] for c in old], np.intp)

        def widen(column: npt.NDArray[np.generic], empty: object) -> npt.NDArray[np.generic]:
            wide = np.full((len(self.ids), *column.shape[1:]), empty, column.dtype)
            wide[place] = column
            return wide

        for name in COUNTS:
            setattr(self, name, widen(getattr(self, name), 0))
        self.present = widen(self.present, False).astype(np.bool_)
        self.figures = {k: widen(v, np.nan).astype(np.float64) for k, v in self.figures.items()}
        self.vectors = {k: widen(v, np.nan).astype(np.float64) for k, v in self.vectors.items()}

    def note(self, client: ClientId, figures: Mapping[str, float]) -> None:
        """Store the last value of each figure of a client."""
        i = self._index[client]
        for name, value in figures.items():
            # Clients must not be able to fill the server's memory by inventing names.
            if name not in self.figures and len(self.figures) >= MOST_FIGURES:
                continue
            if name not in self.figures:
                self.figures[name] = np.full(len(self), np.nan)
            self.figures[name][i] = value

    def hear(self, round: int, client: ClientId, figures: Mapping[str, float]) -> None:
        """Store the metrics of a client in a round, and whether its loss is lower than the last one."""
        # `not >=` instead of `<`: a first loss is compared with NaN, and counts as lower.
        if "loss" in figures and not figures["loss"] >= self.figure_of(client, "loss"):
            self.last_improved[self._index[client]] = round
        self.note(client, figures)

    def hear_all(self, round: int, reported: Mapping[ClientId, Mapping[str, float]]) -> None:
        """Store the metrics of clients in a round, as `hear` does for one; at once if all report the same metrics."""
        names = next(iter(reported.values()), {}).keys()
        if not all(names == figures.keys() for figures in reported.values()):
            for client, figures in reported.items():
                self.hear(round, client, figures)
            return
        rows = np.array([self._index[c] for c in reported], np.intp)
        for name in names:
            if name not in self.figures and len(self.figures) >= MOST_FIGURES:
                continue
            column = self.figures.setdefault(name, np.full(len(self), np.nan))
            values = np.array([figures[name] for figures in reported.values()], np.float64)
            if name == "loss":
                self.last_improved[rows[~(values >= column[rows])]] = round
            column[rows] = values

    def keep(self, kind: str, found: Mapping[ClientId, npt.NDArray[np.float64]]) -> None:
        """Store the last vector of a kind that was found in the replies of these clients."""
        width = len(next(iter(found.values()), ()))
        if found and (kind not in self.vectors or self.vectors[kind].shape[1] != width):
            self.vectors[kind] = np.full((len(self), width), np.nan)
        for client, vector in found.items():
            self.vectors[kind][self._index[client]] = vector

    def figure_of(self, client: ClientId, name: str) -> float:
        """One client's figure, NaN if it is not known."""
        if name in self.figures:
            return float(self.figures[name][self._index[client]])
        return float("nan")

    def sent(self, round: int, clients: Iterable[ClientId]) -> None:
        """Store which clients were sent the model of a round."""
        self.last_sent[[self._index[c] for c in clients]] = round

    def probed(self, round: int, answered: Mapping[ClientId, int]) -> None:
        """Store which clients answered a probe in a round, with their sample counts."""
        rows = [self._index[c] for c in answered]
        self.last_probed[rows] = round
        self._count(rows, answered)

    def mark(self, round: int, selected: Iterable[ClientId], replied: Mapping[ClientId, int]) -> None:
        """Count a round for the selected clients and, with their sample counts, those that replied."""
        chosen = np.array([self._index[c] for c in selected], np.intp)
        self.selected[chosen] += 1
        self.asked[chosen] += 1
        self.last_selected[chosen] = round
        answered = [self._index[c] for c in replied]
        self.replied[answered] += 1
        self.last_replied[answered] = round
        self._count(answered, replied)

    def _count(self, rows: list[int], samples: Mapping[ClientId, int]) -> None:
        self.n[rows] = list(samples.values())
        self.first_n[rows] = np.where(self.first_n[rows] > 0, self.first_n[rows], self.n[rows])

    def touched(self) -> npt.NDArray[np.bool_]:
        """The rows that differ from those of a new client."""
        found = (self.asked > 0) | (self.selected > 0) | (self.last_probed > 0) | (self.last_sent > 0)
        for column in self.figures.values():
            found |= ~np.isnan(column)
        return found

    def to_arrays(self, rows: npt.NDArray[np.intp] | None = None) -> Arrays:
        """These rows, or all that differ from those of a new client, as arrays; `from_arrays` restores them."""
        if rows is None:
            touched = self.touched()
            rows = np.flatnonzero(touched)
            names = self._names_of(touched)
        else:
            some = json.dumps([self.ids[i] for i in rows.tolist()]).encode()  # a name may contain any character
            names = np.frombuffer(some, np.uint8).copy()
        out: Arrays = {"ids": names}
        out |= {name: getattr(self, name)[rows] for name in COUNTS}
        out |= {f"figure.{k}": v[rows] for k, v in self.figures.items()}
        return out | {f"vector.{k}": v[rows] for k, v in self.vectors.items()}

    def _names_of(self, touched: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
        """The names of some rows as a JSON list, cut out of the list of all names: a name may contain any character."""
        if self._named is None:
            quoted = [encode_basestring_ascii(c) + ", " for c in self.ids]
            joined = np.frombuffer("".join(quoted).encode(), np.uint8)
            self._named = joined, np.fromiter(map(len, quoted), np.intp, len(quoted))
        letters, lengths = self._named
        some = letters[np.repeat(touched, lengths)][:-2]
        return np.concatenate([OPEN, some, CLOSE])

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> "Roster":
        """The roster saved by `to_arrays`; clients not in it are added when the fleet lists them."""
        return cls.of(json.loads(arrays["ids"].tobytes()), arrays)

    @classmethod
    def of(cls, ids: list[ClientId], arrays: Arrays) -> "Roster":
        """The roster of these clients, sorted by name, with the columns among the arrays."""
        return cls(
            ids=ids,
            present=np.zeros(len(ids), np.bool_),
            figures={k.removeprefix("figure."): v.copy() for k, v in arrays.items() if k.startswith("figure.")},
            vectors={k.removeprefix("vector."): v.copy() for k, v in arrays.items() if k.startswith("vector.")},
            **{name: arrays[name].copy() for name in COUNTS if name in arrays},  # older runs have fewer
        )
