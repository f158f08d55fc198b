"""CFL (Sattler, Müller and Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization
under Privacy Constraints", IEEE TNNLS 2021): one model, split in two when it stands still although its clients do not.
"""

# ruff: noqa: D102  # documented in `Grouper`

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.clustering.auto import Points
from mutirao.clustering.base import Grouper, GroupUpdates, groups_without_signatures
from mutirao.clustering.context import GroupContext
from mutirao.clustering.formation import Admission
from mutirao.clustering.group_state import Grouping, Groups, open_group
from mutirao.core.arrays import Arrays, as_part, flat, weighted_mean
from mutirao.core.fleet import ClientId, Reply

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Cfl(Grouper):
    """Splits a group after a round if |sum_i (n_i / n) u_i| < eps1 and max_i |u_i| > eps2, with updates u_i.

    The split minimises the largest cosine between clients of both parts, a, and is made if sqrt((1 - a) / 2) is above
    gamma. Each part continues with the mean of its own clients' models. eps1 and eps2 are lengths of updates and depend
    on model and learning rate; 0.4 and 1.6 are from the authors' code.

    Clients whose long updates cancel out are split:

    >>> updates = np.array([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, -0.1]])
    >>> Cfl(eps1=0.4, eps2=0.9).part(updates, np.ones(4))
    array([ True,  True, False, False])
    """

    eps1: float = 0.4
    eps2: float = 1.6
    gamma: float = 0.0
    rounds: int = 0  # without splits at first; 20 in the authors' code
    uses_warm_up = False
    needs_updates = True
    moves_clients = True

    def __post_init__(self) -> None:
        for name in ("eps1", "eps2", "gamma", "rounds"):
            if (value := vars(self)[name]) < 0:
                raise ValueError(f"{name} is {value!r}, but must be at least 0")

    def __call__(self, context: GroupContext, replies: Mapping[ClientId, Reply]) -> Groups:
        return groups_without_signatures(replies, np.zeros(len(replies)))

    def admit(
        self, context: GroupContext, state: Grouping, replies: Mapping[ClientId, Reply]
    ) -> dict[ClientId, Admission]:
        if state.groups.count > 1:
            return super().admit(context, state, replies)
        return {client: Admission(state.groups.names[0], 0.0, 1.0) for client in replies}

    def after(self, context: GroupContext, state: Grouping, updates: Mapping[str, GroupUpdates]) -> None:
        # By position: names of groups change when they need another digit (g9, g10).
        places = {name: i for i, name in enumerate(state.groups.names)}
        for group in sorted(updates):
            sent = updates[group]
            names = sorted(sent.replies)
            if context.run.round <= self.rounds or len(names) <= 2:
                continue
            moved = updates_of(sent.model, [sent.replies[c] for c in names])
            part = self.part(moved, np.array([sent.replies[c].n for c in names], np.float64))
            if part is None:
                continue
            leave = [c for c, first in zip(names, part == part[0], strict=True) if not first]
            stay = [c for c in names if c not in leave]
            home = state.groups.names[places[group]]
            classes = state.classes[home]
            open_group(context.run, state, leave, mean_of(sent, leave), classes)
            home = state.groups.names[places[group]]
            context.run.arrays = context.run.arrays | as_part(mean_of(sent, stay), home)

    def part(self, updates: Points, sizes: Points) -> Mask | None:
        """The mask of one of the two parts, or None if the group is not split."""
        mean, longest = stillness(updates, sizes)
        if not (mean < self.eps1 and longest > self.eps2):
            return None
        cosines = cosines_of(updates)
        one = bipartition(cosines)
        # sqrt((1 - a) / 2) > gamma, with a the largest cosine across the parts; rounding may take a above 1.
        across = float(cosines[np.ix_(one, ~one)].max())
        if math.sqrt(max(0.0, 1 - across) / 2) > self.gamma:
            return one
        return None


def updates_of(model: Arrays, replies: list[Reply]) -> Points:
    """The update of each client, one row each, without integer counters."""
    floats = [k for k, v in model.items() if v.dtype.kind == "f"]
    start = flat({k: model[k] for k in floats}).astype(np.float64)
    return np.stack([flat({k: r.arrays[k] for k in floats}) - start for r in replies])


def stillness(updates: Points, sizes: Points) -> tuple[float, float]:
    """The length of the mean update, by samples, and of the longest one."""
    mean = (sizes / sizes.sum()) @ updates
    return float(np.linalg.norm(mean)), float(np.linalg.norm(updates, axis=1).max())


def cosines_of(updates: Points) -> Points:
    """The cosine between each two updates."""
    lengths = np.linalg.norm(updates, axis=1, keepdims=True)
    unit = updates / np.where(lengths > 0, lengths, 1.0)
    return np.asarray(np.clip(unit @ unit.T, -1.0, 1.0))


def bipartition(cosines: Points) -> Mask:
    """The two parts with the least largest cosine between them: the last merge of single linkage (algorithm 1)."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    apart = 1 - cosines
    np.fill_diagonal(apart, 0.0)
    tree = linkage(squareform((apart + apart.T) / 2, checks=False), "single")
    return np.asarray(fcluster(tree, 2, "maxclust") == 1)


def mean_of(updates: GroupUpdates, clients: list[ClientId]) -> Arrays:
    """The mean of these clients' models, by samples."""
    replies = {c: updates.replies[c] for c in clients}
    return weighted_mean({c: r.arrays for c, r in replies.items()}, {c: float(r.n) for c, r in replies.items()})
