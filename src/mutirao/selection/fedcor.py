"""FedCor: clients whose losses are most correlated with those of the others."""

# ruff: noqa: D102  # `__call__` is what the class says it is

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mutirao.core.arrays import Array, Arrays
from mutirao.core.needs import Needs
from mutirao.core.roster import ClientId, Roster
from mutirao.selection.base import (
    PROBE_SAMPLES,
    Counted,
    check_probe,
    check_setting,
    how_many,
    names_in,
    pass_over,
    sizes,
)
from mutirao.selection.scores import Floats, Rows, cut_tails

NOISE = 0.01  # as in the authors' code
# Adam's
RATE = 0.01
BETA1 = 0.9
BETA2 = 0.999
TINY = 1e-8
PREFIX = "fedcor."
HISTORY = 10  # changes that are kept: with `decay` = 0.8 an older one would count for less than a ninth
STEPS = 100  # of Adam, each time the process is learnt, as in the authors' code
FIRST = 10  # times as many steps when the process is learnt for the first time, as in the authors' code


@dataclass(frozen=True)
class FedCor(Counted):
    """Clients whose changes of loss are most correlated with those of all, given the clients selected before them.

    Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated Learning", CVPR
    2022. The changes of all clients' losses from round to round are a Gaussian process whose covariance is learnt by
    the likelihood of the last ten changes, a change r rounds old counting decay^r (linear kernel, points of `dimension`
    numbers). Clients are chosen one by one: the highest
    discount^(times selected since the process was learnt) sum_i p_i S_ik / sqrt(S_kk), p_i their share of samples.

    For that all clients are probed for their loss, on at most `samples`: in the first `warmup` rounds, whose clients
    are random, and then in two consecutive rounds every `interval`. (The authors learn later changes from a round
    that is made for the purpose and discarded; here they are those of the run.) Losses are cut at the quantiles 0.05
    and 0.95, so that a false one is no larger than an honest one. Clients selected more than `most` times as often as
    the mean (0: no limit) are skipped while there are others.

    In the first rounds clients are random; then the process is learnt again every ten rounds:

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> selector = FedCor(1, warmup=15)
    >>> selector(roster, 1, np.random.default_rng(0), {})
    ['caio']
    >>> [round for round in range(1, 40) if selector.learns(round)]
    [16, 26, 36]
    """

    warmup: int = 15
    interval: int = 10
    decay: float = 0.8
    discount: float = 0.9
    dimension: int = 15
    samples: int = PROBE_SAMPLES
    most: float = 2.0
    retired_settings: ClassVar[Mapping[str, int]] = {"history": HISTORY, "steps": STEPS}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probe("all", 1.0, self.samples)
        for name in ("warmup", "dimension"):
            check_setting(name, getattr(self, name) >= 1, getattr(self, name), "at least 1")
        check_setting("interval", self.interval >= 2, self.interval, "at least 2")
        for name in ("decay", "discount"):
            check_setting(name, 0 < getattr(self, name) <= 1, getattr(self, name), "above 0 and at most 1")
        check_setting("most", self.most == 0 or self.most >= 1, self.most, "0 (no limit) or at least 1")

    @property
    def needs(self) -> Needs:
        return Needs(probes={"loss"}, config={"probe_samples": self.samples}, server={"memory"})

    def learns(self, round: int) -> bool:
        """Whether the process is learnt again before this round is selected for."""
        return round > self.warmup and (round - self.warmup - 1) % self.interval == 0

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        asked = round <= self.warmup or self.learns(round) or self.learns(round + 1)
        if asked:
            return names_in(roster, roster.here())
        return []

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator, memory: Arrays) -> list[ClientId]:
        here = roster.here()
        wanted = how_many(self.count, len(here))
        known = load_state(memory, roster)
        self.note_losses(known, roster, round)
        # A round that failed is selected for again, and must not be learnt from twice.
        if self.learns(round) and len(known["changes"]) and known["learnt"][0] != round:
            self.learn(known, roster, round, rng)
        memory |= {PREFIX + k: v for k, v in known.items()} | {PREFIX + "ids": ids_to_array(roster.ids)}
        if not known["learnt"][0]:
            return names_in(roster, rng.choice(here, wanted, replace=False, shuffle=False))
        allowed = np.flatnonzero(np.isin(here, pass_over(roster, here, self.most, wanted)))
        times = np.asarray(roster.selected[here] - np.nan_to_num(known["counted"][here]), np.float64)
        share = sizes(roster)[here] / sizes(roster)[here].sum()
        sigma = covariance(np.nan_to_num(known["points"][:, here]))  # a new client is uncorrelated until then
        return names_in(roster, here[most_informative(sigma, share, np.power(self.discount, times), allowed, wanted)])

    def note_losses(self, known: dict[str, Floats], roster: Roster, round: int) -> None:
        """Keep the losses of a probe, and their changes since a probe in the round before."""
        probed = roster.last_probed == round
        if not probed.any() or known["round"][0] == round:
            return
        losses = cut_tails(np.where(probed, roster.figure("loss"), np.nan))
        if known["round"][0] == round - 1:
            change = losses - known["losses"]
            known["changes"] = np.vstack([known["changes"], change])[-HISTORY:]
            known["rounds"] = np.append(known["rounds"], round)[-HISTORY:]
        known |= {"losses": losses, "round": np.array([float(round)])}

    def learn(self, known: dict[str, Floats], roster: Roster, round: int, rng: np.random.Generator) -> None:
        """Learn the process from the changes, starting from the last one, or from random points."""
        points = known["points"] if len(known["points"]) else np.full((self.dimension, len(roster)), np.nan)
        random = rng.standard_normal(points.shape) / np.sqrt(len(points))  # lengths of 1 on average
        steps = STEPS
        if not known["learnt"][0]:
            steps = STEPS * FIRST
        weights = self.decay ** (round - known["rounds"])
        points = fit_points(np.where(np.isnan(points), random, points), known["changes"], weights, steps)
        known |= {"points": points, "counted": roster.selected.astype(np.float64), "learnt": np.array([float(round)])}


def ids_to_array(ids: list[ClientId]) -> Array:
    """Names as an array for the run's memory."""
    return np.frombuffer(json.dumps(ids).encode(), np.uint8)


def load_state(memory: Arrays, roster: Roster) -> dict[str, Floats]:
    """The state in the memory, with a column for each client of the roster; NaN for new clients."""
    ids = json.loads(memory[PREFIX + "ids"].tobytes()) if PREFIX + "ids" in memory else []
    kept = [i for i, c in enumerate(ids) if c in roster]
    place = [roster.row(ids[i]) for i in kept]
    out = {k: memory.get(PREFIX + k, np.zeros(n)) for k, n in (("round", 1), ("learnt", 1), ("rounds", 0))}
    for name, rows in (("changes", (0,)), ("points", (0,)), ("losses", ()), ("counted", ())):
        old = memory.get(PREFIX + name, np.zeros((*rows, len(ids))))
        out[name] = np.full((*old.shape[:-1], len(roster)), np.nan)
        out[name][..., place] = old[..., kept]
    return out


# The Gaussian process: each client is a point x_i in few dimensions; the covariance of two clients' changes of loss is
# x_i . x_j, plus noise^2 of one client with itself.


def covariance(points: Floats) -> Floats:
    """x_i . x_j + noise^2 where i = j, of points in columns."""
    return np.asarray(points.T @ points + NOISE**2 * np.eye(points.shape[1]))


def likelihood_gradient(points: Floats, changes: Floats) -> Floats:
    """The gradient of the log-likelihood of the changes with respect to the points.

    With S the covariance and a = S^-1 y, it is X (a a' - S^-1), computed in the points' few dimensions, without S.
    """
    # X S^-1 = X (X' X + s I)^-1 = (X X' + s I)^-1 X, with s the variance of the noise.
    inner = np.linalg.solve(NOISE**2 * np.eye(len(points)) + points @ points.T, points)
    a = (changes - points.T @ (inner @ changes)) / NOISE**2
    return np.asarray(np.outer(points @ a, a) - inner)


def fit_points(points: Floats, changes: Floats, weights: Floats, steps: int) -> Floats:
    """Maximise the likelihood of the weighted rows of changes by steps of Adam on the points; NaN is unobserved."""
    seen = [(np.flatnonzero(~np.isnan(row)), row, w) for row, w in zip(changes, weights, strict=True)]
    mean = np.zeros_like(points)
    square = np.zeros_like(points)
    for t in range(1, steps + 1):
        up = np.zeros_like(points)
        for known, row, weight in seen:
            up[:, known] += weight * likelihood_gradient(points[:, known], row[known])
        mean = BETA1 * mean + (1 - BETA1) * up
        square = BETA2 * square + (1 - BETA2) * up**2
        points = points + RATE * (mean / (1 - BETA1**t)) / (np.sqrt(square / (1 - BETA2**t)) + TINY)
    return points


def most_informative(sigma: Floats, weights: Floats, discount: Floats, allowed: Rows, count: int) -> Rows:
    """The clients that, selected one by one, are most correlated with the weighted losses of all.

    k has the highest discount_k sum_i weight_i S_ik / sqrt(S_kk); then S becomes S - S_k S_k' / S_kk, the covariance
    given k.
    """
    chosen: list[int] = []
    left = allowed
    for _ in range(count):
        spread = np.sqrt(np.maximum(sigma[left, left], 1e-300))
        gain = discount[left] * (weights @ sigma[:, left]) / spread
        k = int(left[gain.argmax()])
        chosen.append(k)
        left = left[left != k]
        sigma = sigma - np.outer(sigma[:, k], sigma[k]) / max(sigma[k, k], 1e-300)
    return np.array(chosen, np.intp)
