"""Documents as a trainer takes them: features on the scale agreed on, single or as lists.

A table is put on a scale once, however many clients share it and however many rounds are made.
"""

import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mutirao.core.fleet import ClientId
from mutirao.errors import Refused
from mutirao.randomness import number
from mutirao.systems.ranking.feature_profile import differing
from mutirao.systems.ranking.feature_scale import SCALE, Scale
from mutirao.systems.ranking.query_lists import lists_of, most_of
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.site_documents import Held
from mutirao.training.inputs import as_inputs, as_labels
from mutirao.training.samples import ClientData, Samples

KEPT = 4096  # clients whose lists a process keeps


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
            seed = number(self.seed, 0, "samples", client)
            test = None if held.test is None else self.as_lists(held.test, scale, 0, 0)
            made = self.join(self.as_lists(held, scale, self.most, seed), test)
            self.clients[client, scale] = held, made
            while len(self.clients) > KEPT:
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
