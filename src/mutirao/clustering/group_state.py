"""What the server remembers of its groups between rounds; it lies in the run's memory, so a run can go on after a kill.

The models of all groups lie in the run's arrays, as `g0/NAME`, and what an aggregator remembers of a group in the
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
    """The groups, the classes each one's head has, their scores by round, and when they settled."""

    groups: Groups
    classes: dict[str, list[int]]
    scores: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    silent: dict[ClientId, int] = field(default_factory=dict)  # how often a client gave no usable warm-up
    own: dict[str, Any] = field(default_factory=dict)  # what a grouper remembers, as JSON has it
    total: int = 0  # classes that there are: a head with fewer has to say which; 0 in older runs

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
        scores = {g: [(int(r), float(v)) for r, v in rows] for g, rows in facts["scores"].items()}
        later = {"own": facts.get("own", {}), "total": facts.get("total", 0)}
        return cls(groups, facts["classes"], scores, facts["settled"], facts["silent"], **later)


def move(state: Grouping, clients: Mapping[ClientId, str]) -> None:
    """Put these clients into other groups that there are, by name."""
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
    """The name of a new group of these clients, which leave theirs: with this model, its classes and its memory.

    Where names get a digit more (g9, g10), those that there were are g00, g01, ... from then on.
    """
    before = state.groups.names
    state.groups = state.groups.with_moved(dict.fromkeys(members, len(before)))
    after = state.groups.names
    new = dict(zip(before, after[:-1], strict=True))
    for table in (state.classes, state.scores, state.settled):
        renamed = {new[g]: value for g, value in table.items()}
        table.clear()
        table.update(renamed)  # type: ignore[arg-type]
    run.arrays, run.memory = rename(run.arrays, new), rename(run.memory, new)
    name = after[-1]
    state.classes[name] = list(classes)
    run.arrays = run.arrays | as_part(model, name)
    run.memory = run.memory | as_part(memory or {}, name)
    return name


def rename(arrays: Arrays, groups: Mapping[str, str]) -> Arrays:
    """Arrays with the names of their groups changed; what is of no group stays."""
    parted = {key: key.partition("/") for key in arrays}
    return {groups.get(g, g) + slash + rest: arrays[key] for key, (g, slash, rest) in parted.items()}
