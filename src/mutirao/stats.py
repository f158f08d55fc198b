"""Honest comparisons: intervals, paired tests with effect sizes, corrections for many of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Interval:
    """A mean and the half width of its confidence interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.half:.4f}"

    def holds(self, value: float) -> bool:
        """Whether a value lies within; an interval that is not known holds everything."""
        return not abs(self.mean - value) > self.half


@dataclass(frozen=True)
class Comparison:
    """A paired test: the mean difference with its interval, p, and the effect size r = |Z| / sqrt(N)."""

    difference: Interval
    p: float
    r: float
    delta: float
    n: int

    @property
    def verdict(self) -> str:
        """What the interval of the difference allows to say."""
        if self.difference.holds(0.0):
            return "not shown"
        return "better" if self.difference.mean > 0 else "worse"


def interval(values: npt.ArrayLike, level: float = 0.95) -> Interval:
    """The mean with Student's interval: t_{n-1} s / sqrt(n); one value has no interval (NaN)."""
    from scipy.stats import t

    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return Interval(float(x.mean()) if len(x) else math.nan, math.nan)
    half = t.ppf(0.5 + level / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return Interval(float(x.mean()), float(half))


def paired(
    ours: npt.ArrayLike, theirs: npt.ArrayLike, alternative: Literal["greater", "less", "two-sided"] = "greater"
) -> Comparison:
    """Wilcoxon's signed-rank test of ours - theirs (zeros split), exact where it can be.

    Z is the normal approximation without continuity correction, as is usual for r. With five pairs p cannot go
    below 1/32, so no correction for several tests can pass: pair over folds x seeds.
    """
    from scipy.stats import rankdata, wilcoxon

    d = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    n, delta = len(d), cliffs_delta(ours, theirs)
    if n == 0 or not np.any(d):
        return Comparison(Interval(0.0, 0.0), 1.0, 0.0, delta, n)
    test = wilcoxon(d, alternative=alternative, zero_method="zsplit")
    ranks = rankdata(np.abs(d))
    positive = ranks[d > 0].sum() + ranks[d == 0].sum() / 2
    z = (positive - n * (n + 1) / 4) / math.sqrt(np.sum(ranks**2) / 4)
    return Comparison(interval(d), float(test.pvalue), abs(float(z)) / math.sqrt(n), delta, n)


def cliffs_delta(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> float:
    """P(ours > theirs) - P(ours < theirs) over all pairs, from -1 to 1 (Cliff, 1993)."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.sign(a[:, None] - b[None, :]).mean()) if len(a) and len(b) else math.nan


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: p values that stay valid when many tests are made (Holm, 1979)."""
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    corrected, worst = {}, 0.0
    for i, (name, p) in enumerate(ordered):
        worst = max(worst, min(1.0, p * (len(ordered) - i)))
        corrected[name] = worst
    return {name: corrected[name] for name in p_values}


def bootstrap(values: Sequence[float], rng: np.random.Generator, level: float = 0.95, draws: int = 10_000) -> Interval:
    """The mean with a percentile bootstrap interval, given as half of its width."""
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return Interval(float(x.mean()) if len(x) else math.nan, math.nan)
    means = x[rng.integers(0, len(x), (draws, len(x)))].mean(axis=1)
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(float(x.mean()), float(high - low) / 2)
