"""Documents as a trainer takes them: features on the scale agreed on, single or as lists.

A table is put on a scale once, however many clients share it and however many rounds are made.
"""

import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mutirao.core.fleet import ClientId
from mutirao.errors import Refused
from mutirao.randomness import derive_seed
from mutirao.systems.ranking.client_documents import Held
from mutirao.systems.ranking.feature_scale import SCALE, Scale, differing
from mutirao.systems.ranking.losses import PAD
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.training.inputs import as_inputs, as_labels
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import ClientData, Index, Samples

Rows = npt.NDArray[np.float32]
KEPT_BYTES = 1 << 22  # bytes of a client's lists that stay put together


def lists_of(x: Rows, grades: npt.ArrayLike, queries: npt.ArrayLike, rows: Index | None = None) -> Samples:
    """The documents, or these rows of them, as samples of one list each: features and which places hold a document.

    Features stay where they are and are put together batch by batch, so that filling up costs little memory. The labels
    are the grades, PAD where there is no document.

    >>> lists = lists_of(np.eye(3, dtype=np.float32), [2, 0, 1], [7, 8, 7])
    >>> len(lists), lists.y
    (2, tensor([[ 2.,  1.],
            [ 0., -1.]]))
    """
    found, asked = np.asarray(grades), np.asarray(queries)
    rows = np.arange(len(found)) if rows is None else rows
    own = by_query(asked, rows)
    longest = max(map(len, own), default=1)
    y = np.full((len(own), longest), PAD, np.float32)
    for i, r in enumerate(own):
        y[i, : len(r)] = found[r]

    def read(i: int) -> tuple[Tensor, Tensor]:
        features = torch.zeros(longest, x.shape[1])
        features[: len(own[i])] = torch.from_numpy(x[own[i]])
        return features, torch.arange(longest) < len(own[i])

    example = torch.zeros(1, longest, x.shape[1]), torch.zeros(1, longest, dtype=torch.bool)
    return Samples(LazyInputs(read, len(own), example, KEPT_BYTES), y)


def by_query(queries: npt.NDArray[np.generic], rows: Index) -> list[Index]:
    """The rows of each query, in the order in which queries are numbered."""
    ordered = rows[np.argsort(queries[rows], kind="stable")]
    cuts = np.flatnonzero(queries[ordered][1:] != queries[ordered][:-1]) + 1
    return [piece for piece in np.split(ordered, cuts) if len(piece)]


def most_of(samples: Samples, most: int, seed: int) -> Samples:
    """At most so many of the samples, drawn once; 0: all."""
    if not most or len(samples) <= most:
        return samples
    draw = np.random.default_rng(seed)
    return samples.rows(np.sort(draw.choice(len(samples), most, replace=False)))


def flat_lists(outputs: npt.ArrayLike, grades: npt.ArrayLike) -> tuple[Rows, Rows, Index]:
    """Scores, grades and list numbers of the documents alone, as metrics take them."""
    there = np.asarray(grades) > PAD
    return np.asarray(outputs)[there], np.asarray(grades)[there], np.nonzero(there)[0]


KEPT_CLIENTS = 4096  # clients whose lists a process keeps


class Encoded:
    """What was made of tables and clients, kept as long as the tables are."""

    def __init__(self, lists: bool, most: int = 0, seed: int = 0) -> None:
        self.given = lists, most, seed
        self.lists, self.most, self.seed = lists, most, seed  # `most` lists a client (0: all); of documents rows say it
        self.tables: dict[tuple[int, Scale], tuple[weakref.ref[RankingData], Any, Tensor]] = {}
        self.clients: OrderedDict[tuple[ClientId, Scale], tuple[Held, Samples | ClientData]] = OrderedDict()
        self.lock = threading.RLock()

    def table(self, data: RankingData, scale: Scale) -> tuple[Any, Tensor]:
        """A table's features on the scale, and its grades; Refused, with what differs, if it cannot be put on it."""
        key = id(data), scale
        with self.lock:
            found = self.tables.get(key)
            if found is not None and found[0]() is data:
                return found[1], found[2]
            check_table(data, scale)
            x, y = as_inputs(scale(data.x)), as_labels(np.asarray(data.grades))
            self.tables[key] = weakref.ref(data, lambda _: self.tables.pop(key, None)), x, y
            return x, y

    def features(self, data: RankingData, scale: Scale) -> npt.NDArray[np.float32]:
        """A table's features on the scale."""
        found: npt.NDArray[np.float32] = self.table(data, scale)[0].numpy()
        return found

    def __call__(self, client: ClientId, held: Held, scale: Scale) -> Samples | ClientData:
        """What a client trains on, and what it judges by, if it holds anything for that."""
        if not self.lists:
            return self.join(self.rows(held, scale), None if held.test is None else self.rows(held.test, scale))
        with self.lock:
            found = self.clients.get((client, scale))
            if found is not None and found[0] is held:
                return found[1]
            seed = derive_seed(self.seed, 0, "samples", client)
            test = None if held.test is None else self.as_lists(held.test, scale, 0, 0)
            made = self.join(self.as_lists(held, scale, self.most, seed), test)
            self.clients[client, scale] = held, made
            while len(self.clients) > KEPT_CLIENTS:
                self.clients.popitem(last=False)
            return made

    def rows(self, held: Held, scale: Scale) -> Samples:
        """Single documents."""
        return Samples(*self.table(held.table, scale), held.rows)

    def as_lists(self, held: Held, scale: Scale, most: int, seed: int) -> Samples:
        """Documents as lists, one a query."""
        table, x = held.table, self.features(held.table, scale)
        return most_of(lists_of(x, table.grades, table.queries, held.rows), most, seed)

    def join(self, train: Samples, test: Samples | None) -> Samples | ClientData:
        """Both, or what is trained on alone."""
        return train if test is None else ClientData(train, test)

    def __getstate__(self) -> tuple[bool, int, int]:
        return self.given

    def __setstate__(self, state: tuple[bool, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def check_table(data: RankingData, scale: Scale) -> None:
    """Refused if documents have other features than the scale is of, or grades above its highest."""
    if data.features != scale.features:
        why = "; a file that leaves out zeros is understood with features=" if data.features < scale.features else ""
        more = f"{why}{scale.features}" if why else ""
        raise Refused(f"agreed.{SCALE}", f"documents here have {differing(data.features, scale.features)}{more}")
    if len(data) and (found := int(data.grades.max())) > scale.highest:
        at = int(np.argmax(data.grades))
        query = str(data.query_ids[data.queries[at]])[:40]
        right = f"grades from 0 to {scale.highest} are agreed on"
        raise Refused(f"agreed.{SCALE}", f"a document of query {query} has grade {found}, and {right}")
