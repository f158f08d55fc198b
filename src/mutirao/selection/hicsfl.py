"""HiCS-FL: clients are clustered by their estimated label distributions, and balanced clusters come first."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np

from mutirao.config import handed_over
from mutirao.core.needs import Needs
from mutirao.core.roster import ClientId, Roster
from mutirao.selection.base import Counted, check_setting, how_many, names_in, pass_over, unseen_first
from mutirao.selection.scores import Floats, Rows


@dataclass(frozen=True)
class HiCSFL(Counted):
    """Clients of clusters whose labels are balanced, more often at first and as often as others at the end.

    Chen and Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated Learning",
    NeurIPS 2024. d_i is how far client i moved the output layer's bias when it last took part. Its estimated entropy is
    H_i = H(softmax(d_i / temperature)); clients are apart by arccos(d_i . d_j / |d_i| |d_j|) + balance |H_i - H_j|; the
    rows of these distances are joined into `clusters` (0: as many as clients are selected) by Ward's method. Each place
    goes to a cluster with probability proportional to exp(gamma (1 - t / rounds) mean H of its members), while it has
    members left, and in it to any member. Clients that have not taken part come first. `layer` names the bias if the
    number of classes does not identify it.

    An entropy is at most ln(classes) whatever a client sends. Clients selected more than `most` times as often as the
    mean (0: no limit) are skipped while there are others.

    The bias of the output layer shows what a client trained on: ana changed both classes, the others one alone. In
    the first rounds ana is selected far more often than one time in three:

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.mark(1, roster.ids, dict.fromkeys(roster.ids, 10))
    >>> moves = {"ana": np.array([0.01, 0.01]), "bia": np.array([0.02, -0.02]), "caio": np.array([0.02, -0.02])}
    >>> roster.keep("bias", moves)
    >>> selector = HiCSFL(1, clusters=2, most=0, rounds=100)
    >>> [selector(roster, 2, np.random.default_rng(seed))[0] for seed in range(20)].count("ana")
    18
    """

    temperature: float = 0.0025
    balance: float = 10.0
    gamma: float = 4.0
    clusters: int = 0
    layer: str = ""
    most: float = 2.0
    classes: int | None = handed_over()
    rounds: int | None = handed_over()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("temperature", self.temperature > 0, self.temperature, "above 0")
        for name in ("balance", "gamma", "clusters"):
            check_setting(name, getattr(self, name) >= 0, getattr(self, name), "at least 0")
        check_setting("most", self.most == 0 or self.most >= 1, self.most, "0 (no limit) or at least 1")

    @property
    def needs(self) -> Needs:
        return Needs(biases={str(self.layer or self.classes or "")})

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        wanted = how_many(self.count, len(here))
        chosen, known = unseen_first(roster, "bias", here, wanted, rng)
        if left := wanted - len(chosen):
            rows = pass_over(roster, known, self.most, left)
            picked = self.pick(roster.vectors["bias"][rows], left, round, rng)
            chosen = np.concatenate([chosen, rows[picked]])
        return names_in(roster, chosen)

    def pick(self, moves: Floats, count: int, round: int, rng: np.random.Generator) -> Rows:
        """`count` of these clients, by the clusters of their bias updates."""
        entropy = estimated_entropies(moves, self.temperature)
        label = ward(heterogeneity_distances(moves, entropy, self.balance), min(len(moves), self.clusters or count))
        cooled = 1.0 if self.rounds is None else max(0.0, 1 - (round - 1) / self.rounds)
        size = np.bincount(label)
        weight = np.exp(self.gamma * cooled * (np.bincount(label, entropy) / size))
        places = np.zeros(len(size), np.intp)
        for _ in range(count):
            open_ = weight * (places < size)
            places[rng.choice(len(size), p=open_ / open_.sum())] += 1
        return np.concatenate([rng.choice(np.flatnonzero(label == g), n, replace=False) for g, n in enumerate(places)])


def estimated_entropies(moves: Floats, temperature: float) -> Floats:
    """H(softmax(d / temperature)) of each row d, in nats."""
    # The largest is subtracted first: softmax stays the same, and exp cannot overflow.
    heat = moves / temperature
    p = np.exp(heat - heat.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return np.asarray(-np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1))


def heterogeneity_distances(moves: Floats, entropy: Floats, balance: float) -> Floats:
    """The angle between each two rows plus `balance` times the difference of their entropies; no angle to zero."""
    length = np.linalg.norm(moves, axis=1)
    unit = np.divide(moves, length[:, None], out=np.zeros_like(moves), where=length[:, None] > 0)
    some = np.outer(length > 0, length > 0)
    # Clipped: rounding may take a cosine just beyond 1, where arccos is NaN.
    angle = np.where(some, np.arccos(np.clip(unit @ unit.T, -1, 1)), 0.0)
    np.fill_diagonal(angle, 0.0)  # rounding makes small angles of 0
    return np.asarray(angle + balance * np.abs(entropy[:, None] - entropy[None, :]))


def ward(points: Floats, clusters: int) -> Rows:
    """The cluster of each point, by Ward's hierarchical clustering; numbered from 0."""
    if clusters >= len(points):
        return np.arange(len(points))
    from scipy.cluster.hierarchy import cut_tree, linkage  # late: it is slow to import
    from scipy.spatial.distance import pdist

    return np.asarray(cut_tree(linkage(pdist(points), "ward"), n_clusters=[clusters])[:, 0], np.intp)
