"""The server's state of groups between rounds, which is part of the run's memory, so that a killed run can resume.

The models of all groups are in the run's arrays, as `g0/NAME`, and the memory of each group's aggregator is in the
run's memory, also as `g0/NAME`.

`Groups` says which client is in which group, and which clients wait.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mutirao.clustering.auto import Division, Labels, Points
from mutirao.core.arrays import Arrays, as_part
from mutirao.core.fleet import ClientId
from mutirao.core.rounds import Run

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
        most = max([self.count, *(label + 1 for label in labels.values())])
        return replace(self, labels=labelled.astype(np.int64), admitted=admitted, min_count=most)


def group_name(label: int, count: int) -> str:
    """g0, g1, ...; as many digits as the last needs, so that names sort."""
    return f"g{label:0{len(str(max(0, count - 1)))}d}"


HOME = "groups."  # of the keys in the run's memory


@dataclass
class Grouping:
    """The groups, the classes of their models, their scores by round, and when they settled."""

    groups: Groups
    classes: dict[str, list[int]]
    scores: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    silent: dict[ClientId, int] = field(default_factory=dict)  # failed warm-ups of each client
    own: dict[str, Any] = field(default_factory=dict)  # the grouper's own state, for JSON
    total: int = 0  # number of classes; 0 in older runs

    def to_memory(self) -> Arrays:
        """All of it as arrays."""
        groups = self.groups
        facts = {
            "clients": groups.clients,
            "later": groups.admitted,
            "directions": groups.directions,
            "looked": [asdict(d) for d in groups.divisions],
            "least": groups.min_count,
            **{k: getattr(self, k) for k in ("classes", "scores", "settled", "silent", "own", "total")},
        }
        return {
            HOME + "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8).copy(),
            HOME + "labels": groups.labels,
            HOME + "signatures": groups.signatures.astype(np.float32),  # that is how they were sent
        }

    @classmethod
    def from_memory(cls, memory: Arrays) -> "Grouping | None":
        """What `to_memory` gave, or None if no groups were formed yet."""
        if HOME + "facts" not in memory:
            return None
        facts: dict[str, Any] = json.loads(memory[HOME + "facts"].tobytes())
        groups = Groups(
            clients=tuple(facts["clients"]),
            labels=memory[HOME + "labels"],
            signatures=memory[HOME + "signatures"].astype(np.float64),
            directions=facts["directions"],
            admitted=facts["later"],
            divisions=tuple(Division(**d) for d in facts["looked"]),
            min_count=facts.get("least", 0),  # older runs have none
        )
        scores = {}
        for group, rows in facts["scores"].items():
            scores[group] = [(int(round), float(score)) for round, score in rows]
        later = {"own": facts.get("own", {}), "total": facts.get("total", 0)}
        return cls(groups, facts["classes"], scores, facts["settled"], facts["silent"], **later)


def move(state: Grouping, clients: Mapping[ClientId, str]) -> None:
    """Move clients to other existing groups, by name."""
    numbers = {name: i for i, name in enumerate(state.groups.names)}
    state.groups = state.groups.with_moved({c: numbers[g] for c, g in clients.items()})


def open_group(
    run: Run,
    state: Grouping,
    members: Collection[ClientId],
    model: Arrays,
    classes: Sequence[int],
    memory: Arrays | None = None,
) -> str:
    """Open a group for these clients, which leave their groups, with a model, its classes and memory; returns its name.

    When names need another digit (g9, g10), the existing groups are renamed to g00, g01, ...
    """
    before = state.groups.names
    state.groups = state.groups.with_moved(dict.fromkeys(members, len(before)))
    after = state.groups.names
    new = dict(zip(before, after[:-1], strict=True))
    for table in (state.classes, state.scores, state.settled):
        renamed = {new[g]: value for g, value in table.items()}
        table.clear()
        table.update(renamed)  # type: ignore[arg-type]
    run.arrays = rename_groups(run.arrays, new)
    run.memory = rename_groups(run.memory, new)
    name = after[-1]
    state.classes[name] = list(classes)
    run.arrays = run.arrays | as_part(model, name)
    run.memory = run.memory | as_part(memory or {}, name)
    return name


def rename_groups(arrays: Arrays, groups: Mapping[str, str]) -> Arrays:
    """Arrays with the names of their groups changed; arrays of no group stay."""
    renamed = {}
    for key, array in arrays.items():
        group, slash, rest = key.partition("/")
        renamed[groups.get(group, group) + slash + rest] = array
    return renamed
