"""DivFL: a diverse subset, whose updates represent those of all clients best."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np

from mutirao.core.needs import Needs
from mutirao.core.roster import ClientId, Roster
from mutirao.selection.base import Counted, check_setting, how_many, names_in, pass_over, unseen_first
from mutirao.selection.scores import Floats, Rows


@dataclass(frozen=True)
class DivFL(Counted):
    """A diverse subset: clients S with the least sum over all clients i of min over j in S of |g_i - g_j|, greedily.

    Balakrishnan et al., "Diverse Client Selection for Federated Learning via Submodular Maximization", ICLR 2022. g_i
    is the update of client i when it last took part (of a large model a sketch, see `core/update_figures.py`). Starting
    from the empty set, the client that makes the sum least is added; of equals the first by name. `candidates` is the
    number of random clients considered for each place (0: all; the authors' stochastic greedy takes a tenth). Clients
    that have not taken part come first: the authors ask all for a gradient beforehand.

    Updates are clipped to the quantile `clip` of their lengths (1: not clipped), so that a huge one does not decide.
    Clients selected more than `most` times as often as the mean (0: no limit) are skipped while there are others.

    Of three clients two have similar updates; one of them and the third cover all:

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.mark(1, roster.ids, dict.fromkeys(roster.ids, 10))
    >>> roster.keep("sketch", {"ana": np.array([1.0, 0.0]), "bia": np.array([1.0, 0.1]), "caio": np.array([0.0, 1.0])})
    >>> DivFL(2)(roster, 2, np.random.default_rng(0))
    ['bia', 'caio']
    """

    candidates: int = 0
    clip: float = 0.95
    most: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("candidates", self.candidates >= 0, self.candidates, "at least 0")
        check_setting("clip", 0 < self.clip <= 1, self.clip, "above 0 and at most 1")
        check_setting("most", self.most == 0 or self.most >= 1, self.most, "0 (no limit) or at least 1")

    @property
    def needs(self) -> Needs:
        return Needs(server={"sketch"})

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        wanted = how_many(self.count, len(here))
        chosen, known = unseen_first(roster, "sketch", here, wanted, rng)
        if left := wanted - len(chosen):
            allowed = np.isin(known, pass_over(roster, known, self.most, left))
            apart = pairwise_distances(clip_lengths(roster.vectors["sketch"][known], self.clip))
            picked = cover(apart, np.flatnonzero(allowed), left, self.candidates, rng)
            chosen = np.concatenate([chosen, known[picked]])
        return names_in(roster, chosen)


def clip_lengths(vectors: Floats, quantile: float) -> Floats:
    """Vectors clipped to that quantile of their lengths."""
    length = np.linalg.norm(vectors, axis=1)
    most = np.quantile(length, quantile, method="lower")
    return np.asarray(vectors * np.divide(most, length, out=np.ones_like(length), where=length > most)[:, None])


def pairwise_distances(vectors: Floats) -> Floats:
    """The Euclidean distance between each two vectors."""
    square = np.sum(vectors**2, axis=1)
    apart = np.sqrt(np.maximum(0.0, square[:, None] + square[None, :] - 2 * vectors @ vectors.T))
    np.fill_diagonal(apart, 0.0)
    return np.asarray(apart)


def cover(apart: Floats, allowed: Rows, count: int, candidates: int, rng: np.random.Generator) -> Rows:
    """Greedy facility location: rows added one by one, so that all rows are near to one of them."""
    nearest = np.full(len(apart), np.inf)
    left = allowed
    chosen: list[int] = []
    for _ in range(count):
        some = left
        if candidates and candidates < len(left):
            some = np.sort(rng.choice(left, candidates, replace=False, shuffle=False))
        best = int(some[np.minimum(nearest[:, None], apart[:, some]).sum(axis=0).argmin()])
        nearest = np.minimum(nearest, apart[:, best])
        chosen.append(best)
        left = left[left != best]
    return np.array(chosen, np.intp)
