"""Documents as training samples: features on the agreed scale, single documents or lists of one query each.

A table is scaled once, however many clients share it and however many rounds there are.
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
from mutirao.systems.ranking.client_documents import ClientDocuments
from mutirao.systems.ranking.feature_scale import SCALE, FeatureScale, feature_mismatch
from mutirao.systems.ranking.losses import PAD
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.training.inputs import as_inputs, as_labels
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import ClientData, Index, Samples

Rows = npt.NDArray[np.float32]
KEPT_BYTES = 1 << 22  # most bytes of a client's padded lists that are kept in memory
KEPT_CLIENTS = 4096  # most clients for which a process keeps lists


class EncodedDocuments:
    """Cache of scaled tables and of clients' samples; a table's entry lives as long as the table.

    With `lists`, samples are lists, at most `most` of them a client (0: all). Single documents are limited beforehand,
    by the rows of a client.
    """

    def __init__(self, lists: bool, most: int = 0, seed: int = 0) -> None:
        self.lists = lists
        self.most = most
        self.seed = seed
        self.tables: dict[tuple[int, FeatureScale], tuple[weakref.ref[RankingData], Any, Tensor]] = {}
        self.clients: OrderedDict[tuple[ClientId, FeatureScale], tuple[ClientDocuments, Samples | ClientData]]
        self.clients = OrderedDict()
        self.lock = threading.RLock()

    def table(self, data: RankingData, scale: FeatureScale) -> tuple[Any, Tensor]:
        """A table's scaled features, and its grades; Refused, with the difference, if they do not fit the scale."""
        key = (id(data), scale)
        with self.lock:
            found = self.tables.get(key)
            # An id may be used again after its table is gone, so the weak reference has to be this table.
            if found is not None and found[0]() is data:
                return found[1], found[2]
            check_against_scale(data, scale)
            x = as_inputs(scale(data.x))
            y = as_labels(np.asarray(data.grades))
            self.tables[key] = (weakref.ref(data, lambda _: self.tables.pop(key, None)), x, y)
            return x, y

    def features(self, data: RankingData, scale: FeatureScale) -> npt.NDArray[np.float32]:
        """A table's scaled features."""
        found: npt.NDArray[np.float32] = self.table(data, scale)[0].numpy()
        return found

    def __call__(self, client: ClientId, documents: ClientDocuments, scale: FeatureScale) -> Samples | ClientData:
        """A client's training samples, with its test samples if it has any."""
        if not self.lists:
            test = None if documents.test is None else self.rows(documents.test, scale)
            return self.join(self.rows(documents, scale), test)
        with self.lock:
            found = self.clients.get((client, scale))
            if found is not None and found[0] is documents:
                return found[1]
            test = None if documents.test is None else self.as_lists(documents.test, scale)
            train = subsample(self.as_lists(documents, scale), self.most, derive_seed(self.seed, 0, "samples", client))
            samples = self.join(train, test)
            self.clients[client, scale] = (documents, samples)
            while len(self.clients) > KEPT_CLIENTS:
                self.clients.popitem(last=False)
            return samples

    def rows(self, documents: ClientDocuments, scale: FeatureScale) -> Samples:
        """Single documents."""
        return Samples(*self.table(documents.table, scale), documents.rows)

    def as_lists(self, documents: ClientDocuments, scale: FeatureScale) -> Samples:
        """Lists of documents, one a query."""
        table = documents.table
        return make_lists(self.features(table, scale), table.grades, table.queries, documents.rows)

    def join(self, train: Samples, test: Samples | None) -> Samples | ClientData:
        """Training and test samples, or training samples alone."""
        if test is None:
            return train
        return ClientData(train, test)

    def __getstate__(self) -> tuple[bool, int, int]:
        # Another process begins with an empty cache: keys are ids of objects in this one, and a lock cannot be pickled.
        return self.lists, self.most, self.seed

    def __setstate__(self, state: tuple[bool, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def check_against_scale(data: RankingData, scale: FeatureScale) -> None:
    """Refused if documents have another number of features than the scale, or grades above its highest."""
    if data.features != scale.features:
        hint = ""
        if data.features < scale.features:
            hint = f"; if the file leaves out zeros, set features={scale.features}"
        raise Refused(f"agreed.{SCALE}", f"documents here have {feature_mismatch(data.features, scale.features)}{hint}")
    if len(data) and (found := int(data.grades.max())) > scale.highest:
        at = int(np.argmax(data.grades))
        query = str(data.query_ids[data.queries[at]])[:40]
        right = f"grades from 0 to {scale.highest} are agreed on"
        raise Refused(f"agreed.{SCALE}", f"a document of query {query} has grade {found}, but {right}")


def make_lists(x: Rows, grades: npt.ArrayLike, queries: npt.ArrayLike, rows: Index | None = None) -> Samples:
    """The documents, or these rows of them, as one list a query, padded to the longest; with a mask of the documents.

    Features stay where they are and are padded batch by batch, so that padding costs little memory. The labels are the
    grades, PAD where there is no document.

    >>> lists = make_lists(np.eye(3, dtype=np.float32), [2, 0, 1], [7, 8, 7])
    >>> len(lists), lists.y
    (2, tensor([[ 2.,  1.],
            [ 0., -1.]]))
    """
    labels = np.asarray(grades)
    if rows is None:
        rows = np.arange(len(labels))
    own = rows_by_query(np.asarray(queries), rows)
    longest = max(map(len, own), default=1)
    y = np.full((len(own), longest), PAD, np.float32)
    for i, r in enumerate(own):
        y[i, : len(r)] = labels[r]

    def read(i: int) -> tuple[Tensor, Tensor]:
        features = torch.zeros(longest, x.shape[1])
        features[: len(own[i])] = torch.from_numpy(x[own[i]])
        return features, torch.arange(longest) < len(own[i])

    example = torch.zeros(1, longest, x.shape[1]), torch.zeros(1, longest, dtype=torch.bool)
    return Samples(LazyInputs(read, len(own), example, KEPT_BYTES), y)


def rows_by_query(queries: npt.NDArray[np.generic], rows: Index) -> list[Index]:
    """The rows of each query, in the order in which queries are numbered."""
    ordered = rows[np.argsort(queries[rows], kind="stable")]
    cuts = np.flatnonzero(queries[ordered][1:] != queries[ordered][:-1]) + 1
    return [piece for piece in np.split(ordered, cuts) if len(piece)]


def subsample(samples: Samples, most: int, seed: int) -> Samples:
    """A random sample of at most `most` samples; 0: all of them."""
    if not most or len(samples) <= most:
        return samples
    draw = np.random.default_rng(seed)
    return samples.rows(np.sort(draw.choice(len(samples), most, replace=False)))


def flatten_lists(outputs: npt.ArrayLike, grades: npt.ArrayLike) -> tuple[Rows, Rows, Index]:
    """Scores, grades and list numbers of the documents, without padding, as metrics take them."""
    labels = np.asarray(grades)
    there = labels > PAD
    return np.asarray(outputs)[there], labels[there], np.nonzero(there)[0]
