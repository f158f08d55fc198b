"""What the server remembers of its groups between rounds; it lies in the run's memory, so a run can go on after a kill.

The models of all groups lie in the run's arrays, as `g0/NAME`, and what an aggregator remembers of a group in the
run's memory, also as `g0/NAME`.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId
from mutirao.groups.auto import Division
from mutirao.groups.membership import Groups

HOME = "groups."  # of the keys in the run's memory


@dataclass
class Grouping:
    """The groups, the classes each one's head has, their scores by round, and when they settled."""

    groups: Groups
    classes: dict[str, list[int]]
    scores: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    silent: dict[ClientId, int] = field(default_factory=dict)  # how often a client gave no usable warm-up

    def to_memory(self) -> Arrays:
        """All of it as arrays."""
        groups = self.groups
        facts = {
            "clients": groups.clients,
            "later": groups.later,
            "directions": groups.directions,
            "looked": [asdict(d) for d in groups.looked],
            **{k: getattr(self, k) for k in ("classes", "scores", "settled", "silent")},
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
            later=facts["later"],
            looked=tuple(Division(**d) for d in facts["looked"]),
        )
        scores = {g: [(int(r), float(v)) for r, v in rows] for g, rows in facts["scores"].items()}
        return cls(groups, facts["classes"], scores, facts["settled"], facts["silent"])
