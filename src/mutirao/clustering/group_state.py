"""The server's state of groups between rounds, which is part of the run's memory, so that a killed run can resume.

The models of all groups are in the run's arrays, as `g0/NAME`, and the memory of each group's aggregator is in the
run's memory, also as `g0/NAME`.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mutirao.clustering.auto import Division
from mutirao.clustering.membership import Groups
from mutirao.core.arrays import Arrays, as_part
from mutirao.core.fleet import ClientId
from mutirao.core.rounds import Run

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
