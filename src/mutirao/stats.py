"""Honest comparisons: intervals, paired tests with effect sizes, corrections for many of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mutirao.deprecation import former_names
from mutirao.randomness import rng

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean and the half width of its confidence interval.

    >>> difference = interval([0.01, 0.03, 0.02])
    >>> difference.contains(0.0), difference.contains(0.1)  # no difference is possible, one of 0.1 is not
    (True, False)
    """

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.half:.4f}"

    def contains(self, value: float) -> bool:
        """Whether a value lies within; an unknown interval contains everything."""
        return not abs(self.mean - value) > self.half


@dataclass(frozen=True)
class Effect:
    """An effect size with its 95% interval by the bootstrap over pairs (NaN with fewer than two).

    >>> ours, theirs = [0.71, 0.74, 0.72, 0.75], [0.70, 0.70, 0.71, 0.71]
    >>> delta = paired(ours, theirs).delta
    >>> delta.value, delta.low <= delta.value <= delta.high
    (0.875, True)
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class Comparison:
    """A paired test: the mean difference with its interval, three tests, and effect sizes.

    `p` and `p_two_sided` are Wilcoxon's, `p_t` is that of Student's t with the variance of the interval, so that the
    verdict and `p_t` < 0.05 are one. r = |Z| / sqrt(N), Cliff's delta, and d = mean / standard deviation of the pairs'
    differences (Cohen's d_z).

    >>> comparison = paired([0.71, 0.74, 0.72, 0.75, 0.73], [0.70, 0.70, 0.71, 0.71, 0.70])
    >>> comparison.verdict, comparison.n, round(comparison.p, 3)
    ('better', 5, 0.031)
    """

    difference: Interval
    p: float
    p_two_sided: float
    p_t: float
    r: Effect
    delta: Effect
    d: Effect
    n: int

    @property
    def verdict(self) -> str:
        """`better`, `worse` or `not shown`, by the interval of the difference."""
        if self.difference.contains(0.0):
            return "not shown"
        if self.difference.mean > 0:
            return "better"
        return "worse"


def standard_error(values: npt.ArrayLike, shared: float = 0.0) -> float:
    """s sqrt(1/J + n_test/n_train) of J values with training data that overlap (Nadeau and Bengio, 2003).

    `shared` is n_test/n_train, and 0 for values that have nothing in common, where this is s / sqrt(J).

    Five folds of cross-validation share most of their training data, which makes their mean less certain:

    >>> values = [0.70, 0.72, 0.71, 0.69, 0.73]
    >>> round(standard_error(values), 4), round(standard_error(values, shared=1 / 4), 4)
    (0.0071, 0.0106)
    """
    x = np.asarray(values, np.float64)
    if len(x) > 1:
        return float(x.std(ddof=1)) * math.sqrt(1 / len(x) + shared)
    return math.nan


def _mean_alone(values: Floats) -> Interval:
    """The mean of too few values for an interval; NaN of none."""
    mean = math.nan
    if len(values):
        mean = float(values.mean())
    return Interval(mean, math.nan)


def interval(values: npt.ArrayLike, level: float = 0.95, shared: float = 0.0) -> Interval:
    """The mean with Student's interval: t_{J-1} times `standard_error`; one value has no interval (NaN).

    >>> found = interval([0.70, 0.72, 0.71, 0.69, 0.73])
    >>> f"{found.mean:.3f} ± {found.half:.3f}"
    '0.710 ± 0.020'
    """
    from scipy.stats import t

    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return _mean_alone(x)
    half = t.ppf(0.5 + level / 2, len(x) - 1) * standard_error(x, shared)
    return Interval(float(x.mean()), float(half))


def paired(ours: npt.ArrayLike, theirs: npt.ArrayLike, shared: float = 0.0) -> Comparison:
    """Compare ours with theirs pair by pair: Wilcoxon's signed-rank test (zeros split), exact where it can be, and t's.

    With `shared` training data, n_test/n_train, the interval and `p_t` are the corrected resampled ones; Wilcoxon's
    test has no such correction. With five pairs its one-sided p cannot go below 1/32, and the two-sided below 1/16.

    >>> comparison = paired([0.71, 0.74, 0.72, 0.75, 0.73], [0.70, 0.70, 0.71, 0.71, 0.70])
    >>> f"{comparison.difference.mean:.3f} ± {comparison.difference.half:.3f}", comparison.verdict
    ('0.026 ± 0.019', 'better')
    >>> comparison.p  # five pairs, all the same way: no one-sided p can be lower
    0.03125
    """
    from scipy.stats import t, wilcoxon

    a = np.asarray(ours, np.float64)
    b = np.asarray(theirs, np.float64)
    d = a - b
    n = len(a)
    effects = effect_sizes(a, b)
    if n == 0 or not np.any(d):
        return Comparison(Interval(0.0, 0.0), 1.0, 1.0, 1.0, *effects, n)
    p, both = (float(wilcoxon(d, alternative=side, zero_method="zsplit").pvalue) for side in ("greater", "two-sided"))
    error = standard_error(d, shared)
    # Pairs with one and the same difference have no spread: t is infinite, and p_t is 0. A single pair has no t.
    p_t = 0.0
    if n < 2:
        p_t = math.nan
    elif error > 0:
        p_t = 2 * float(t.sf(abs(d.mean()) / error, n - 1))
    return Comparison(interval(d, shared=shared), p, both, p_t, *effects, n)


def effect_sizes(ours: Floats, theirs: Floats, draws: int = 2_000) -> tuple[Effect, Effect, Effect]:
    """r, delta and d of pairs, each with the percentile interval of the pairs resampled, always with one seed.

    >>> r, delta, d = effect_sizes(np.array([0.71, 0.74, 0.72, 0.75]), np.array([0.70, 0.70, 0.71, 0.71]))
    >>> round(r.value, 2), delta.value, round(d.value, 2)
    (0.93, 0.875, 1.44)
    """
    # Resampling a single pair gives that pair again, so it has no interval.
    if len(ours) < 2:
        draws = 1
    rows = rng(0, 0, "effects").integers(0, max(len(ours), 1), (draws, len(ours)))
    # The pairs themselves stand first: row 0 is the effect, the others are its interval.
    rows[0] = np.arange(len(ours))
    r, delta, d = (
        Effect(float(sizes[0]), *central_interval(sizes[1:])) for sizes in effect_size_rows(ours[rows], theirs[rows])
    )
    return r, delta, d


def central_interval(values: Floats, level: float = 0.95) -> tuple[float, float]:
    """The central interval with a share `level` of the finite values."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return math.nan, math.nan
    low, high = np.quantile(finite, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def effect_size_rows(ours: Floats, theirs: Floats) -> Floats:
    """r, delta and d, a row each, of samples that are rows of pairs."""
    from scipy.stats import rankdata

    d = ours - theirs
    n = d.shape[1]
    if n == 0:
        return np.array([[0.0], [math.nan], [math.nan]])
    ranks = rankdata(np.abs(d), axis=1)
    positive = np.where(d > 0, ranks, np.where(d == 0, ranks / 2, 0.0)).sum(axis=1)
    # The normal approximation of Wilcoxon's W+, without continuity correction, as usual for r.
    z = (positive - n * (n + 1) / 4) / np.sqrt((ranks**2).sum(axis=1) / 4)
    first = rankdata(np.concatenate([ours, theirs], axis=1), axis=1)[:, :n].sum(axis=1)
    delta = 2 * (first - n * (n + 1) / 2) / (n * n) - 1
    mean = d.mean(axis=1)
    spread = d.std(axis=1, ddof=1) if n > 1 else np.full(len(d), math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        standardised = np.where(mean == 0, 0.0, mean / spread)
    return np.stack([np.abs(z) / math.sqrt(n), delta, np.where(np.isinf(standardised), math.nan, standardised)])


def cliffs_delta(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> float:
    """P(ours > theirs) - P(ours < theirs) over all pairs, from -1 to 1 (Cliff, 1993).

    >>> cliffs_delta([4, 5], [1, 2]), cliffs_delta([1, 2], [1, 2])
    (1.0, 0.0)
    """
    a = np.asarray(ours, np.float64)
    b = np.asarray(theirs, np.float64)
    if len(a) and len(b):
        return float(np.sign(a[:, None] - b[None, :]).mean())
    return math.nan


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: p values that stay valid when many tests are made (Holm, 1979).

    >>> holm({"fedprox": 0.01, "fedyogi": 0.04, "scaffold": 0.03})
    {'fedprox': 0.03, 'fedyogi': 0.06, 'scaffold': 0.06}
    """
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    corrected = {}
    worst = 0.0
    # p_(i) is multiplied by the number of hypotheses left, and no corrected p is below that of a smaller p.
    for i, (name, p) in enumerate(ordered):
        worst = max(worst, min(1.0, p * (len(ordered) - i)))
        corrected[name] = worst
    return {name: corrected[name] for name in p_values}


def bootstrap(values: Sequence[float], draw: np.random.Generator, level: float = 0.95, draws: int = 10_000) -> Interval:
    """The mean with a percentile bootstrap interval, given as half of its width.

    >>> found = bootstrap([0.70, 0.72, 0.71, 0.69, 0.73], np.random.default_rng(0))
    >>> f"{found.mean:.3f} ± {found.half:.3f}"
    '0.710 ± 0.012'
    """
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return _mean_alone(x)
    means = x[draw.integers(0, len(x), (draws, len(x)))].mean(axis=1)
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(float(x.mean()), float(high - low) / 2)


if not TYPE_CHECKING:  # a module-level __getattr__ would let every misspelt name pass
    __getattr__ = former_names(
        __name__,
        {
            "sizes_of": "effect_size_rows",
            "span": "central_interval",
        },
    )
