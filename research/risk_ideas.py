"""Ways to weigh the clients of a round by risk, each with the control that does all the same but for the risk.

Weights sum to one, so that all make steps of one length, and all go through the same server momentum:
v' = 0.9 v + sum_k w_k (x_k - x), x' = x + v'. What the server's own queries tell of a model is the nDCG of each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.aggregation.fedrisk import FedRisk
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged
from mutirao.risk import geo_risk, ideal_risk
from mutirao.systems.ranking.metrics import t_risk, u_risk
from research.risk_scene import MOMENTUM, Floats, Joining, Scene

Score = Callable[[Floats, Floats, float], Floats]  # of models x queries, a base and an aversion: higher is better
Weigh = Callable[[Joining], Floats]


def standard(values: npt.ArrayLike) -> Floats:
    """(v - mean) / standard deviation, so that one temperature suits all scores."""
    v = np.asarray(values, np.float64)
    return (v - v.mean()) / v.std() if v.std() > 1e-12 else np.zeros_like(v)


def soften(values: npt.ArrayLike, temper: float = 0.5) -> Floats:
    """w_k = exp(temper z_k) / sum_j exp(temper z_j), z the standardised values."""
    raised = np.exp(temper * standard(values))
    return np.asarray(raised / raised.sum())


def of_each(measure: Callable[[Floats, Floats, float], float]) -> Score:
    """A measure of one model against a base, for a row of queries each; what cannot be told is 0."""
    return lambda q, base, aversion: np.nan_to_num([measure(row, base, aversion) for row in q])


def middle_risk(q: Floats, base: Floats, aversion: float, groups: int = 5) -> float:
    """The median of URisk over groups of queries, which a few odd queries do not move."""
    return float(np.median([u_risk(q[i::groups], base[i::groups], aversion) for i in range(groups)]))


def low_geo_risk(q: Floats, base: Floats, aversion: float) -> Floats:
    """-GeoRisk of the errors 1 - nDCG, clients x queries: here all clients are judged by the same queries."""
    return -geo_risk(np.maximum(0.0, 1 - q), aversion)


def plain(of: Joining) -> Floats:
    """1 / |S|."""
    return of.even


def by_samples(of: Joining) -> Floats:
    """n_k / sum_j n_j: FedAvgM."""
    n = np.array([of.replies[c].n for c in of.clients], np.float64)
    return np.asarray(n / n.sum())


def by_shortness(of: Joining, temper: float = 0.5) -> Floats:
    """exp(-temper z(|x_k - x|)): whoever moves the model little counts more. It knows nothing of risk."""
    return soften(of.lengths(np.eye(len(of.clients))), -temper)


def by_errors(of: Joining, temper: float = 0.0, ranks: bool = False) -> Floats:
    """FedRisk's published 1 - risk_k of the documents' squared errors, made to sum to one; or softened; or by rank."""
    risks = np.array(FedRisk().risks([of.replies[c] for c in of.clients]))
    if ranks:
        places = 1 + 0.5 * (2 * np.argsort(np.argsort(-risks)) / max(len(risks) - 1, 1) - 1)
        return np.asarray(places / places.sum())
    return soften(-risks, temper) if temper else np.asarray((1 - risks).clip(1e-9) / (1 - risks).clip(1e-9).sum())


def by_query_errors(of: Joining, sign: int) -> Floats:
    """GeoRisk of the errors 1 - nDCG that the client's own model has on its own queries, as the client tells them."""
    told = [(i, of.scene.lists[c], c) for i, c in enumerate(of.clients)]
    eye = np.eye(len(told))
    models = {i: of.model(eye[i], ahead=False) for i, _, _ in told}
    errors = {i: 1 - own.ndcg(of.scene.trainer, models[i]) for i, own, _ in told if own is not None}
    usual = max(2, int(np.median([len(e) for e in errors.values()]))) if errors else 0
    long = [i for i, e in errors.items() if len(e) >= usual]
    used = long if len(long) > 1 else list(errors)
    risks = np.zeros(len(told))
    if len(used) > 1:
        width = min(len(errors[i]) for i in used)
        m = np.maximum(0.0, np.stack([errors[i][:width] for i in used]))
        risks[used] = ideal_risk(m) - geo_risk(m, 2.0)
    return soften(-sign * risks)


def by_loss(of: Joining, temper: float) -> Floats:
    """exp(temper z(loss_k)): tilted losses, TERM (Li et al., 2021)."""
    return soften(of.losses(), temper)


def by_worst_half(of: Joining) -> Floats:
    """The half of the clients with the largest losses alone: superquantile (Laguel et al., 2021)."""
    return np.asarray((of.losses() >= np.median(of.losses())) / (of.losses() >= np.median(of.losses())).sum())


def by_minimax(of: Joining, eta: float = 0.3) -> Floats:
    """Weights that a client keeps, l_k <- l_k + eta z(loss_k) within -2 to 2: AFL (Mohri, Sivek and Suresh, 2019)."""
    for c, z in zip(of.clients, standard(of.losses()), strict=True):
        of.memory[c] = float(np.clip(of.memory.get(c, 0.0) + eta * z, -2, 2))
    raised = np.exp([of.memory[c] for c in of.clients])
    return np.asarray(raised / raised.sum())


def by_server(of: Joining, score: Score, aversion: float, ahead: bool = False, temper: float = 0.5) -> Floats:
    """exp(temper z(score of client k's model against the current one)), on the server's queries.

    If `ahead` the model is the next one with k's update alone, against the next one with the mean of all.
    """
    q = of.look(np.eye(len(of.clients)), ahead)
    base = of.look(of.even if ahead else 0 * of.even, ahead)[0]
    return soften(score(q, base, aversion), temper)


def by_ascent(
    of: Joining, score: Score, aversion: float, steps: int = 3, eta: float = 0.5, reach: float = 0.5
) -> Floats:
    """Exponentiated gradient on the simplex: weights that raise the score of the next model against the mean's.

    w_k <- w_k exp(eta z(g_k)), g_k the score at w + reach (e_k - w) less that at w.
    """
    w, base = of.even, of.look(of.even, ahead=True)[0]
    for _ in range(steps):
        near = of.look(w + reach * (np.eye(len(w)) - w), ahead=True)
        w = w * np.exp(eta * standard(score(near, base, aversion)))
        w = w / w.sum()
    return w


def by_step(of: Joining, score: Score, aversion: float) -> Floats:
    """The mean of updates times 0, 0.5, 1 or 1.5, whichever makes the best next model against the current one."""
    scales = np.array([0.0, 0.5, 1.0, 1.5])
    q, base = of.look(scales[:, None] * of.even, ahead=True), of.look(0 * of.even, ahead=False)[0]
    return of.even * scales[int(np.argmax(score(q, base, aversion)))]


def as_long(of: Joining, way: Weigh) -> Floats:
    """The weights of another way, so scaled that the step has the length of the plain mean's."""
    w = way(of)
    mean, own = of.lengths(np.vstack([of.even, w]))
    return np.asarray(w * mean / own) if own > 0 else w


class Idea(NamedTuple):
    """A way to weigh clients, and the control that does all the same but for the risk."""

    weigh: Weigh
    control: str = "mean"


SCORES: dict[str, tuple[Score, float]] = {
    "urisk1": (of_each(u_risk), 1.0),
    "urisk5": (of_each(u_risk), 5.0),
    "trisk1": (of_each(t_risk), 1.0),
    "middle": (of_each(middle_risk), 1.0),
    "georisk": (low_geo_risk, 2.0),
}


def seen_by_server(name: str, way: Callable[..., Floats], *scores: str) -> dict[str, Idea]:
    """A way that looks at the server's queries, with its control, for which losses count no more than gains."""
    ideas = {f"{name}-neutral": Idea(partial(way, score=of_each(u_risk), aversion=0.0))}
    for chosen in scores:
        score, aversion = SCORES[chosen]
        ideas[f"{name}-{chosen}"] = Idea(partial(way, score=score, aversion=aversion), f"{name}-neutral")
    return ideas


WAYS: dict[str, Idea] = {
    "mean": Idea(plain),
    "samples": Idea(by_samples),
    "short": Idea(by_shortness),
    "errors": Idea(by_errors),
    "errors-soft": Idea(partial(by_errors, temper=0.5)),
    "errors-rank": Idea(partial(by_errors, ranks=True)),
    "query-errors": Idea(partial(by_query_errors, sign=1)),
    "query-errors-described": Idea(partial(by_query_errors, sign=-1)),
    "tilted": Idea(partial(by_loss, temper=0.5)),
    "tilted-down": Idea(partial(by_loss, temper=-0.5)),
    "worst-half": Idea(by_worst_half),
    "minimax": Idea(by_minimax),
    **seen_by_server("server", by_server, *SCORES),
    **seen_by_server("ahead", partial(by_server, ahead=True), "urisk5"),
    **seen_by_server("ascent", by_ascent, "urisk5"),
    **seen_by_server("step", by_step, "urisk5"),
}
MATCHED = ["short", "server-neutral", "server-urisk5"]
IDEAS = WAYS | {
    f"{name}-matched": Idea(
        partial(as_long, way=WAYS[name].weigh),
        "mean" if WAYS[name].control == "mean" else f"{WAYS[name].control}-matched",
    )
    for name in MATCHED
}


@dataclass
class Joiner:
    """The aggregator of an idea: its weights, then momentum."""

    idea: Idea
    scene: Scene
    kept: dict[ClientId, float] = field(default_factory=dict)
    needs = Needs(extras={"squared_errors"})

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        """The next model."""
        of = Joining(self.scene, current, replies, dict(memory), self.kept)
        weights = self.idea.weigh(of)
        memory |= {k: np.tensordot(weights, of.updates[k], 1) + MOMENTUM * memory.get(k, 0.0) for k in current}
        arrays = {k: (x + memory[k]).astype(x.dtype) for k, x in current.items()}
        return Merged(arrays, dict(zip(of.clients, weights.tolist(), strict=True)))
