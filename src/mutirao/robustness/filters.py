"""Filters reject suspicious updates before aggregation: too long, copied, or in another direction."""

# ruff: noqa: D102  # `__call__` gives the replies kept, and why each of the others was not

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, cast_to, flat
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Screened
from mutirao.randomness import derive_seed

Floats = npt.NDArray[np.float64]

FEWEST = 5  # with fewer replies all are kept: there are too few to find outliers
CORE_ITERATIONS = 5
DEVIATIONS = 3.0  # from the median, beyond which no honest client is expected
PRIOR = 0.1  # added to both sums of a standing: one round in which hardly any clients agree says little of each
TWICE = 2.0  # where lengths differ much, an update is rejected for its length alone at so many times the limit
MOST_REJECTED = 0.4  # share of the replies of a round: more would not be Byzantine clients among an honest majority


@dataclass(frozen=True)
class NormFilter:
    """Drop updates whose length is more than `factor` times the median length of the round.

    >>> values = {"ana": 1.0, "bia": 1.2, "caio": 0.9, "eve": 50.0}
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in values.items()}
    >>> kept, reasons = NormFilter()({"w": np.zeros(1)}, replies)
    >>> sorted(kept), reasons
    (['ana', 'bia', 'caio'], {'eve': 'update of length 50, over 3.3 (3 times the median)'})
    """

    factor: float = 3.0

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply]) -> Screened:
        lengths = lengths_of(current, replies)
        limit = self.factor * median_of(lengths)
        why = f"over {limit:.4g} ({self.factor:g} times the median)"
        return leave_out(replies, {c: f"update of length {x:.4g}, {why}" for c, x in lengths.items() if x > limit})


@dataclass(frozen=True)
class DistanceFilter:
    """Drop updates farther from the median update than `factor` times the median of such distances.

    The median update is taken number by number: d_k = |u_k - median_j u_j|.

    >>> values = {"ana": 1.0, "bia": 1.2, "caio": 0.9, "davi": 1.1, "eve": -1.5}
    >>> replies = {c: Reply({"w": np.array([x])}, n=10) for c, x in values.items()}
    >>> DistanceFilter()({"w": np.zeros(1)}, replies)[1]  # as long as the others, in the opposite direction
    {'eve': 'update 2.5 away from the median one, over 0.3'}
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
    """Drop updates that are nearly the same: honest clients have different data, and colluding ones send copies.

    Two are copies if 1 - cosine is below `share` of what it typically is between a client and the nearer half of the
    others. All copies are dropped, since the original cannot be identified.

    >>> draw = np.random.default_rng(0)
    >>> replies = {f"c{i}": Reply({"w": 1 + draw.normal(size=50)}, n=10) for i in range(6)}
    >>> replies["c6"] = replies["c5"]
    >>> CopyFilter()({"w": np.zeros(50)}, replies)[1]
    {'c5': 'update nearly the same as that of c6', 'c6': 'update nearly the same as that of c5'}
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
    """Drop updates whose direction agrees with the core of the round much less than the others do.

    Every layer is scaled to length one, so that none dominates; `head`, the name of the last layer, counts a quarter
    more, because false labels change it most. The core is the half of the updates that agree best, and a client's
    agreement a_k is the cosine with the mean of the core without its own. With m the median of a_k, updates below
    m min(share, 2 m - 1/2) are dropped: half of m where clients agree well; where hardly any do, as near the end of
    training, only those in the opposite direction. This works as long as most replies of a round are honest.

    >>> draw = np.random.default_rng(0)
    >>> replies = {f"c{i}": Reply({"w": 1 + draw.normal(size=50)}, n=10) for i in range(6)}
    >>> replies["eve"] = Reply({"w": -1 + draw.normal(size=50)}, n=10)
    >>> CosineFilter()({"w": np.zeros(50)}, replies)[1]
    {'eve': 'direction has cosine -0.70 with the core, below 0.32'}
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
    """Drop clients by copies, length and direction over all their rounds; bound the updates that are kept.

    Copies are dropped as in `CopyFilter`, and so are updates longer than `most` times the usual length. Every round
    also gives evidence: a_k, the cosine of an update with the core, at most 0 for one that is too long, and -m_t, minus
    the median of the round's a_k, for a copy. A client's standing is

        r_k = (0.1 + sum_t w_t a_kt) / (0.1 + sum_t w_t m_t),

    about 1 for honest clients; w_t is the round's median length as a share of the usual one (see below). Older rounds
    count less by `memory` a round, and the core is the half with the best standing before this round (in the first one
    that of `CosineFilter`). Clients with a standing below `share` of the median standing and also three deviations
    below it are dropped. The deviation is that of the standings above the median, so that no client is blamed for
    standing apart where all do. At most two fifths of the replies are rejected so, and never a client whose update
    agrees in this round, if the round is informative (m_t > 0.1): not too long, and with a_k above `share` of m_t.

    An update is too long above the usual length times e^(3 s), where s is the deviation of the log lengths below the
    round's median, which long updates of malicious clients cannot raise. The factor is at least `least` and at most
    twice `most`. The usual length is the round's median or, if that is more, what `memory` leaves of the usual length
    before: where most clients have converged and hardly move, a client that still learns is not too long for that, and
    directions say little.
    Among those kept, no client counts for more than `samples` times their median number of samples, and updates longer
    than the median are shortened to it.

    A client with a huge update is dropped, and those kept count for at most 1.5 times the median of samples:

    >>> draw = np.random.default_rng(0)
    >>> replies = {f"c{i}": Reply({"w": 1 + draw.normal(size=50)}, n=10) for i in range(6)}
    >>> replies["many"] = Reply({"w": 1 + draw.normal(size=50)}, n=10**9)
    >>> replies["eve"] = Reply({"w": np.full(50, -40.0)}, n=10)
    >>> kept, reasons = Robust()({"w": np.zeros(50)}, replies)
    >>> kept["many"].n, reasons
    (15, {'eve': 'update of length 282.8, over 17.59'})
    """

    least: float = 1.75
    most: float = 3.0
    copies: float = 0.1
    share: float = 0.5
    samples: float = 1.5
    memory: float = 0.95
    head: str = ""

    needs = Needs(server={"memory"})

    def __post_init__(self) -> None:
        for name, low, high in (("least", 1, self.most), ("samples", 1, np.inf), ("memory", 0, 1), ("share", 0, 1)):
            if not low <= (value := vars(self)[name]) <= high:
                raise ValueError(f"{name} is {value!r}, but must be at least {low} and at most {high:g}")

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays | None = None) -> Screened:
        if len(replies) < FEWEST:
            return dict(replies), {}
        past = memory if memory is not None else {}
        names = sorted(replies)
        # Copies first, then lengths: only what is left may define the median length and the core.
        kept, rejected = CopyFilter(self.copies, self.head)(current, replies)
        lengths = lengths_of(current, kept)
        usual = self.usual_length(lengths, past)
        long = self.overlong(lengths, usual)
        kept, longest = leave_out(kept, {c: why for c, why in long.items() if lengths[c] > self.most * usual})
        rejected |= longest
        counted = np.array([c in kept and c not in long for c in names])
        if counted.sum() < FEWEST:
            return bound_replies(current, kept, self.samples), rejected
        cosines = alignment(current, [replies[c] for c in names], self.head)
        # The core is the half with the best standing before this round: a client is in it for what it has sent so far.
        agreed, typical = load_standings(past, names)
        known = standing(agreed, typical) if typical.any() else None
        agreement = agree_with(cosines, counted, known)
        middle = max(0.0, float(np.median(agreement[counted])))
        weight = median_of(lengths) / usual if usual > 0 else 1.0  # w_t
        # a_k; at most 0 for an update that is too long; -m_t for a copy, even where hardly any clients agree.
        copied = np.array([c not in kept and c not in longest for c in names])
        evidence = np.where(counted, agreement, np.where(copied, -max(middle, PRIOR), np.minimum(agreement, 0.0)))
        # r_k = (0.1 + sum_t w_t a_kt) / (0.1 + sum_t w_t m_t): `agreed` and `typical` are these two sums.
        agreed = self.memory * agreed + weight * evidence
        typical = self.memory * typical + weight * middle
        save_standings(past, names, agreed, typical)
        found = dict(zip(names, standing(agreed, typical).tolist(), strict=True))
        limit = self.lowest(standing(agreed, typical)[counted])
        agrees = dict(zip(names, counted & (middle > PRIOR) & (agreement > self.share * middle), strict=True))
        # The worst standings first: copies and updates that are far too long count towards the two fifths, too.
        odd = sorted((x, c) for c, x in found.items() if c in kept and x < limit and not agrees[c])
        odd = odd[: max(0, int(MOST_REJECTED * len(names)) - len(rejected))]
        why = {c: long.get(c, "its direction differs from the others'") for c in kept}
        kept, low = leave_out(kept, {c: f"standing {x:.2f}, below {limit:.2f}: {why[c]}" for x, c in odd})
        return bound_replies(current, kept, self.samples), rejected | low

    def usual_length(self, lengths: Mapping[ClientId, float], past: Arrays) -> float:
        """The median length of updates in this round, or the usual length before if that was more."""
        usual = max(median_of(lengths), self.memory * float(past.get("robust.length", np.zeros(1))[0]))
        past["robust.length"] = np.array([usual])
        return usual

    def overlong(self, lengths: Mapping[ClientId, float], usual: float) -> dict[ClientId, str]:
        """The clients whose updates are too long, and how long they are."""
        middle = median_of(lengths)
        below = [np.log(x / middle) for x in lengths.values() if 0 < x <= middle]
        spread = float(np.sqrt(np.mean(np.square(below)))) if below else 0.0
        limit = usual * min(TWICE * self.most, max(self.least, float(np.exp(min(10.0, DEVIATIONS * spread)))))
        return {c: f"update of length {x:.4g}, over {limit:.4g}" for c, x in lengths.items() if x > limit}

    def lowest(self, standings: Floats) -> float:
        """The standing below which a client is dropped."""
        middle = float(np.median(standings))
        above = standings[standings > middle] - middle
        spread = float(np.sqrt(np.mean(above**2))) if len(above) else 0.0
        return min(self.share * middle, middle - DEVIATIONS * spread)


def keep_all(current: Arrays, replies: Mapping[ClientId, Reply]) -> Screened:
    """Keep every update.

    >>> keep_all({"w": np.zeros(1)}, {"ana": Reply({"w": np.array([1e9])}, n=10)})[1]
    {}
    """
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
    """The replies that are not rejected, and why the others are."""
    return {c: r for c, r in replies.items() if c not in rejected}, rejected


def alignment(current: Arrays, replies: Sequence[Reply], head: str = "") -> Floats:
    """The cosine between each two updates, every layer at length one; a layer `head` counts a quarter more."""
    names = sorted(k for k, v in current.items() if v.dtype.kind == "f" and v.ndim > 1)  # biases are too noisy
    names = names or sorted(k for k, v in current.items() if v.dtype.kind == "f")
    last = [k for k in names if head and k.startswith(head + ".")]

    def moved(name: str) -> Floats:
        here = current[name].astype(np.float64)
        return np.stack([np.ravel(r.arrays[name] - here) for r in replies])

    def cosines(total: Floats) -> Floats:
        lengths = np.sqrt(np.diag(total))
        lengths[lengths == 0] = 1.0
        return np.asarray(total / np.outer(lengths, lengths))

    products = {name: (u := moved(name)) @ u.T for name in names}
    layers = cosines(sum((cosines(p) for p in products.values()), start=np.zeros((len(replies), len(replies)))))
    if not last:
        return layers
    output_layer = cosines(sum((products[name] for name in last), start=np.zeros_like(layers)))
    return 0.75 * layers + 0.25 * output_layer


def with_core(cosines: Floats) -> Floats:
    """The cosine of each update with the mean of the half that agrees best, itself left out."""
    n = len(cosines)
    others = cosines.copy()
    np.fill_diagonal(others, np.nan)
    agreement = np.nanmedian(others, axis=1)
    for _ in range(CORE_ITERATIONS):
        core = np.zeros(n, bool)
        core[np.argsort(-agreement, kind="stable")[: n // 2 + 1]] = True
        agreement = with_these(cosines, core)
    return np.asarray(agreement)


def with_these(cosines: Floats, core: npt.NDArray[np.bool_]) -> Floats:
    """The cosine of each update with the mean of the core, itself left out."""
    # With unit updates u and the core's sum S: u_k . (S - u_k), and |S - u_k|^2 = |S|^2 - 2 u_k . (S - u_k) - |u_k|^2.
    inside = cosines @ core - np.where(core, np.diag(cosines), 0.0)
    total = float(cosines[np.ix_(core, core)].sum())
    square = np.where(core, total - 2 * inside - np.diag(cosines), total)
    return np.asarray(inside / np.sqrt(np.maximum(square, 1e-12)))


def agree_with(cosines: Floats, counted: npt.NDArray[np.bool_], standings: Floats | None) -> Floats:
    """The cosine of each update with the core of those counted: the half with the best standing, if it is known."""
    rows = np.flatnonzero(counted)
    if standings is None:
        agreement = np.zeros(len(cosines))
        agreement[rows] = with_core(cosines[np.ix_(rows, rows)])
        return agreement
    core = np.zeros(len(cosines), bool)
    core[rows[np.argsort(-standings[rows], kind="stable")[: len(cosines) // 2 + 1]]] = True
    return with_these(cosines, core)


def standing(agreed: Floats, typical: Floats) -> Floats:
    """How well clients agreed with the core, as a share of what was typical; 1 for a new client."""
    return (PRIOR + agreed) / (PRIOR + typical)


def load_standings(memory: Arrays, names: Sequence[ClientId]) -> tuple[Floats, Floats]:
    """The agreement of these clients so far and what was typical in their rounds; 0 for a new client."""
    known = memory.get("robust.clients", np.zeros(0, np.int64))
    place = {int(k): i for i, k in enumerate(known)}
    # -1 is the last entry, the 0.0 that is appended below for new clients.
    rows = [place.get(derive_seed(0, 0, "standing", c), -1) for c in names]
    agreed = np.append(memory.get("robust.agreed", np.zeros(0)), 0.0)
    typical = np.append(memory.get("robust.typical", np.zeros(0)), 0.0)
    return agreed[rows], typical[rows]


def save_standings(memory: Arrays, names: Sequence[ClientId], agreed: Floats, typical: Floats) -> None:
    """Store them in the memory, which holds numbers alone: clients are stored as hashes of their names."""
    keys = np.array([derive_seed(0, 0, "standing", c) for c in names], np.int64)
    known = memory.get("robust.clients", np.zeros(0, np.int64))
    others = ~np.isin(known, keys)
    for name, values in (("agreed", agreed), ("typical", typical)):
        memory[f"robust.{name}"] = np.append(memory.get(f"robust.{name}", np.zeros(0))[others], values)
    memory["robust.clients"] = np.append(known[others], keys)


def median_of(lengths: Mapping[ClientId, float]) -> float:
    """The median length; 0 if there is none."""
    if lengths:
        return float(np.median(list(lengths.values())))
    return 0.0


def lengths_of(current: Arrays, replies: Mapping[ClientId, Reply]) -> dict[ClientId, float]:
    """The length of each update, |x_k - x|, without integer counters, which would outweigh all weights."""
    names = [k for k, v in current.items() if v.dtype.kind == "f"] or list(current)
    here = flat({k: current[k] for k in names})
    ends = {c: flat({k: r.arrays[k] for k in names}) for c, r in replies.items()}
    return {c: float(np.linalg.norm(end - here)) for c, end in ends.items()}


def bound_replies(current: Arrays, replies: Mapping[ClientId, Reply], times: float) -> dict[ClientId, Reply]:
    """The replies with at most `times` their median number of samples, and no update longer than the median."""
    if not replies:
        return {}
    most = max(1, int(times * float(np.median([r.n for r in replies.values()]))))
    lengths = lengths_of(current, replies)
    middle = median_of(lengths)

    def shorten(reply: Reply, share: float) -> Arrays:
        shorter = dict(reply.arrays)
        for name, x in current.items():
            if x.dtype.kind == "f":
                shorter[name] = cast_to(x + share * (reply.arrays[name] - x.astype(np.float64)), x.dtype)
        return shorter

    bounded = {}
    for c, reply in replies.items():
        arrays = reply.arrays
        if lengths[c] > middle:
            arrays = shorten(reply, middle / lengths[c])
        bounded[c] = replace(reply, n=min(reply.n, most), arrays=arrays)
    return bounded
