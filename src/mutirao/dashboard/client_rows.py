"""The clients of a run, one line each, counted from `clients.csv`, which may have a million rows."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.runs.reader import Columns, Floats

Whole = npt.NDArray[np.int64]
PAGE = 100


@dataclass(frozen=True, eq=False)
class Clients:
    """What is known of every client that was ever selected, in columns; `group` and `failure` are numbers of texts."""

    name: list[str]
    selected: Whole
    replied: Whole
    last: Whole
    n: Whole
    weight: Floats
    group: Whole
    failure: Whole  # the last one; 0: none
    failed: Whole  # the round of it
    groups: list[str]
    failures: list[str]

    def __len__(self) -> int:
        return len(self.name)

    @cached_property
    def by_name(self) -> Whole:
        """The place of each client when they are sorted by name."""
        place = np.empty(len(self), np.int64)
        place[sorted(range(len(self)), key=self.name.__getitem__)] = np.arange(len(self))
        return place

    def order(self, sort: str) -> Whole:
        """By what clients are sorted, the least first; those that are equal go by name."""
        found = {"selected": self.selected, "lost": self.selected - self.replied, "last": self.last}.get(sort)
        values = self.weight if sort == "weight" else np.zeros(len(self)) if found is None else found
        return np.lexsort((self.by_name, -values))

    def with_text(self, text: str) -> npt.NDArray[np.bool_]:
        """Whose name or failure holds a text, whatever its case."""
        in_failure = np.array([text in failure.lower() for failure in self.failures], np.bool_)
        in_name = np.fromiter((text in name.lower() for name in self.name), np.bool_, len(self))
        return np.asarray(in_name | in_failure[self.failure])

    def line(self, i: int) -> dict[str, Any]:
        """One client."""
        numbers = {k: getattr(self, k)[i].item() for k in ("selected", "replied", "last", "n", "weight")}
        texts = {"group": self.groups[self.group[i]], "failure": self.failures[self.failure[i]]}
        return {"name": self.name[i], **numbers, **texts, "failed": self.failed[i].item()}


def clients_of(table: Columns) -> Clients:
    """Every client that was ever selected."""
    names, who = table.codes("client")
    round = table.wholes("round")
    n = table.wholes("n")
    weight = np.nan_to_num(table.numbers("weight"))
    (groups, group), (failures, failure), (reasons, rejected) = (
        table.codes(k) for k in ("group", "failure", "rejected")
    )
    good = table.where("replied", "1") & table.where("rejected", "")

    def last_of(values: Any, rows: npt.NDArray[np.bool_]) -> Any:
        """Each client's value in the last of these rows that is its own; 0 if none is."""
        out = np.zeros(len(names), values.dtype)
        out[who[rows]] = values[rows]
        return out

    # texts by number, the first of them for none; a reply without a failure was rejected
    why = np.where(table.where("failure", ""), len(failures) + rejected, failure) + 1
    latest = np.zeros(len(names), np.int64)
    np.maximum.at(latest, who, round)
    return Clients(
        name=names,
        selected=np.bincount(who, minlength=len(names)),
        replied=np.bincount(who[good], minlength=len(names)),
        last=latest,
        n=last_of(n, good),
        weight=last_of(weight, good),
        group=last_of(group + 1, np.array([bool(text) for text in groups], np.bool_)[group]),
        failure=last_of(why, ~good),
        failed=last_of(round, ~good),
        groups=["", *groups],
        failures=["", *failures, *(f"rejected: {reason}" for reason in reasons)],
    )


def page_of(clients: Clients, search: str, sort: str, start: int) -> dict[str, Any]:
    """A hundred of them: those whose name or failure holds the text, in the order asked for."""
    ordered = clients.order(sort)
    if wanted := search.lower():
        ordered = ordered[clients.with_text(wanted)[ordered]]
    rows = [clients.line(i) for i in ordered[start : start + PAGE].tolist()]
    return {"total": len(clients), "found": len(ordered), "start": start, "page": PAGE, "rows": rows}
