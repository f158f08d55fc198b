"""Filters drop odd updates before they touch the average: too long, copied, or pointing another way."""

# ruff: noqa: D102  # `__call__` gives the replies kept, and why each of the others was not

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, flat
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.parts import Screened

FEWEST = 5  # replies among which it can be told who is odd; of fewer all are kept
TURNS = 5


@dataclass(frozen=True)
class NormFilter:
    """Drop updates whose length is more than `factor` times the median length of the round."""

    factor: float = 3.0

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply]) -> Screened:
        here = flat(current)
        lengths = {c: float(np.linalg.norm(flat(r.arrays) - here)) for c, r in replies.items()}
        limit = self.factor * float(np.median(list(lengths.values()))) if lengths else 0.0
        why = f"over {limit:.4g} ({self.factor:g} times the median)"
        return leave_out(replies, {c: f"update of length {x:.4g}, {why}" for c, x in lengths.items() if x > limit})


@dataclass(frozen=True)
class DistanceFilter:
    """Drop updates farther from the median update than `factor` times the median of such distances.

    The median update is taken number by number: d_k = |u_k - median_j u_j|.
    """

    factor: float = 3.0

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply]) -> Screened:
        if len(replies) < FEWEST:
            return dict(replies), {}
        ends = np.stack([flat(replies[c].arrays) for c in replies])
        away = np.linalg.norm(ends - np.median(ends, axis=0), axis=1)
        limit = self.factor * float(np.median(away))
        far = {c: x for c, x in zip(replies, away.tolist(), strict=True) if x > limit}
        why = f"away from the median one, over {limit:.4g}"
        return leave_out(replies, {c: f"update {x:.4g} {why}" for c, x in far.items()})


@dataclass(frozen=True)
class CopyFilter:
    """Drop updates that are nearly the same: clients with data of their own do not agree so well, colluders do.

    Two are copies if 1 - cosine is below `share` of what it typically is between a client and the nearer half of the
    others. All copies go, since nobody can tell which came first.
    """

    share: float = 0.1
    head: str = ""

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply]) -> Screened:
        if len(replies) < FEWEST:
            return dict(replies), {}
        names = sorted(replies)
        apart = 1 - alignment(current, [replies[c] for c in names], self.head)
        np.fill_diagonal(apart, np.inf)
        ordered = np.sort(apart, axis=1)
        limit = self.share * float(np.median(ordered[:, len(names) // 2 - 1]))
        twin = np.argmin(apart, axis=1)
        copies = np.flatnonzero(ordered[:, 0] < limit)
        return leave_out(replies, {names[i]: f"update nearly the same as that of {names[twin[i]]}" for i in copies})


@dataclass(frozen=True)
class CosineFilter:
    """Drop updates whose direction agrees with the core of the round much less than those of the others.

    Every layer is scaled to length one, so that none drowns the others; `head`, the name of the last layer, counts a
    quarter more, because false labels show there. The core is the half of the updates that agree best, and a client's
    agreement a_k is the cosine with the mean of the core without its own. With m the median of a_k, those below
    m min(share, 2 m - 1/2) go: half of m where clients agree well; where hardly any do, as near the end of training,
    only those that point the other way. It holds as long as most replies of a round are honest.
    """

    share: float = 0.5
    head: str = ""

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply]) -> Screened:
        if len(replies) < FEWEST:
            return dict(replies), {}
        names = sorted(replies)
        agreement = with_core(alignment(current, [replies[c] for c in names], self.head))
        middle = max(0.0, float(np.median(agreement)))
        limit = middle * max(-0.5, min(self.share, 2 * middle - 0.5))
        odd = {c: x for c, x in zip(names, agreement, strict=True) if x < limit}
        why = f"with the core, below {limit:.2f}"
        return leave_out(replies, {c: f"direction has cosine {x:.2f} {why}" for c, x in odd.items()})


@dataclass(frozen=True)
class Robust:
    """Length, copies and direction, one after the other: twice the median length, a tenth and a half as above."""

    factor: float = 2.0
    copies: float = 0.1
    share: float = 0.5
    head: str = ""

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply]) -> Screened:
        if len(replies) < FEWEST:
            return dict(replies), {}
        kept, rejected = dict(replies), dict[ClientId, str]()
        for part in (NormFilter(self.factor), CopyFilter(self.copies, self.head), CosineFilter(self.share, self.head)):
            kept, dropped = part(current, kept)
            rejected |= dropped
        return kept, rejected


def keep_all(current: Arrays, replies: Mapping[ClientId, Reply]) -> Screened:
    """Everybody is believed."""
    return dict(replies), {}


NAMES: dict[str, Callable[..., object]] = {
    "none": keep_all,
    "norm": NormFilter,
    "distance": DistanceFilter,
    "copies": CopyFilter,
    "cosine": CosineFilter,
    "robust": Robust,
}


def leave_out(replies: Mapping[ClientId, Reply], rejected: dict[ClientId, str]) -> Screened:
    """The replies without those rejected, and why they were."""
    return {c: r for c, r in replies.items() if c not in rejected}, rejected


def alignment(current: Arrays, replies: Sequence[Reply], head: str = "") -> npt.NDArray[np.float64]:
    """The cosine between each two updates, every layer at length one; a layer `head` counts a quarter more."""
    names = sorted(k for k, v in current.items() if v.dtype.kind == "f" and v.ndim > 1)  # biases are too much by chance
    names = names or sorted(k for k, v in current.items() if v.dtype.kind == "f")
    last = [k for k in names if head and k.startswith(head + ".")]

    def moved(name: str) -> npt.NDArray[np.float64]:
        here = current[name].astype(np.float64)
        return np.stack([np.ravel(r.arrays[name] - here) for r in replies])

    def cosines(total: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        lengths = np.sqrt(np.diag(total))
        lengths[lengths == 0] = 1.0
        return np.asarray(total / np.outer(lengths, lengths))

    blocks = {name: (u := moved(name)) @ u.T for name in names}
    layers = cosines(sum((cosines(b) for b in blocks.values()), start=np.zeros((len(replies), len(replies)))))
    if not last:
        return layers
    whole = cosines(sum((blocks[name] for name in last), start=np.zeros_like(layers)))
    return 0.75 * layers + 0.25 * whole


def with_core(cosines: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The cosine of each update with the mean of the half that agrees best, itself left out."""
    n = len(cosines)
    others = cosines.copy()
    np.fill_diagonal(others, np.nan)
    agreement = np.nanmedian(others, axis=1)
    for _ in range(TURNS):
        core = np.zeros(n, bool)
        core[np.argsort(-agreement, kind="stable")[: n // 2 + 1]] = True
        inside = cosines @ core - np.where(core, np.diag(cosines), 0.0)  # with the core, without oneself
        total = float(cosines[np.ix_(core, core)].sum())
        square = np.where(core, total - 2 * inside - np.diag(cosines), total)  # of the length of that part of the core
        agreement = inside / np.sqrt(np.maximum(square, 1e-12))
    return np.asarray(agreement)
