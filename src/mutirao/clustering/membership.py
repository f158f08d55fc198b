"""Which client is in which group, and which clients wait."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from mutirao.clustering.auto import Division, Labels, Points
from mutirao.core.roster import ClientId

MAX_CLUSTERED = 2000  # of more clients, that many are sampled and clustered, and the others are admitted
WAITING = -1


@dataclass(frozen=True)
class Groups:
    """The group of each client: of the initial clients, with their signatures, and of clients admitted later.

    A label is the number of a group; -1 is a client that waits.

    >>> from mutirao.clustering import form
    >>> groups = form({"ana": [0.0], "bia": [0.1], "eva": [9.0], "ivo": [9.1]})
    >>> groups.members(), groups.group_of("eva")
    ({'g0': ['ana', 'bia'], 'g1': ['eva', 'ivo']}, 'g1')
    """

    clients: tuple[ClientId, ...]
    labels: Labels
    signatures: Points
    directions: bool = False
    admitted: Mapping[ClientId, int] = field(default_factory=dict)
    divisions: tuple[Division, ...] = ()
    min_count: int = 0  # of groups, even if the last ones are empty

    @cached_property
    def labelled(self) -> dict[ClientId, int]:
        """The label of each client."""
        return dict(zip(self.clients, self.labels.tolist(), strict=True)) | dict(self.admitted)

    @property
    def names(self) -> list[str]:
        """The names of the groups: g0, g1, ..."""
        return [group_name(i, self.count) for i in range(self.count)]

    @property
    def count(self) -> int:
        """How many groups there are."""
        return max(self.min_count, int(self.labels.max(initial=WAITING)) + 1)

    @property
    def has_signatures(self) -> bool:
        """Whether clients sent signatures, which give distances; some groupers need none."""
        return bool(self.signatures.shape[1])

    def group_of(self, client: ClientId) -> str:
        """The group of a client; empty for one that waits or is not known."""
        label = self.labelled.get(client, WAITING)
        if label >= 0:
            return group_name(label, self.count)
        return ""

    def members(self) -> dict[str, list[ClientId]]:
        """The clients of each group, sorted."""
        table: dict[str, list[ClientId]] = {name: [] for name in self.names}
        for client in sorted(self.labelled):
            if name := self.group_of(client):
                table[name].append(client)
        return table

    def waiting(self) -> list[ClientId]:
        """The clients in no group."""
        return sorted(c for c, label in self.labelled.items() if label < 0)

    def with_admitted(self, labels: Mapping[ClientId, int]) -> "Groups":
        """The same groups with more clients in them; the centres of groups depend on the initial clients alone."""
        return replace(self, admitted={**self.admitted, **labels})

    def with_moved(self, labels: Mapping[ClientId, int]) -> "Groups":
        """The same clients, some of them moved to other or new groups; a group without clients stays."""
        labelled = np.array([labels.get(c, old) for c, old in zip(self.clients, self.labels.tolist(), strict=True)])
        known = set(self.clients)
        admitted = {**self.admitted, **{c: label for c, label in labels.items() if c not in known}}
        most = max(self.count, *(label + 1 for label in labels.values())) if labels else self.count
        return replace(self, labels=labelled.astype(np.int64), admitted=admitted, min_count=most)


def group_name(label: int, count: int) -> str:
    """g0, g1, ...; as many digits as the last needs, so that names sort."""
    return f"g{label:0{len(str(max(0, count - 1)))}d}"
