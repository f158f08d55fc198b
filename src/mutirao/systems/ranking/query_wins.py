"""How a ranker fares against another, query by query: who wins and loses, and the risk-sensitive measures of the field.

A mean hides the queries that a new ranker makes worse, and those are what users notice. All measures here take one
value of a metric a query, higher being better, and count losses `1 + aversion` times.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.risk import residuals

Floats = npt.NDArray[np.float64]
AVERSION = 5.0  # of TREC's Web tracks of 2013 and 2014


@dataclass(frozen=True)
class Against:
    """Queries won, lost and tied against another ranker, and what risk-sensitive measures say.

    >>> hold_against([0.6, 0.5, 0.3], [0.5, 0.5, 0.4], aversion=0.0).losses
    1
    """

    wins: int
    losses: int
    ties: int
    u_risk: float
    t_risk: float
    geo_risk: float
    their_geo_risk: float


def gains(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> Floats:
    """d_i = ours_i - theirs_i of each query."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ConfigError(
            f"one value a query is needed of both, of the same queries; there are {a.shape} and {b.shape}"
        )
    return np.asarray(a - b)


def weigh_losses(ours: npt.ArrayLike, theirs: npt.ArrayLike, aversion: float) -> Floats:
    """d_i where it is a gain, (1 + aversion) d_i where it is a loss."""
    if not 0 <= aversion < math.inf:
        raise ConfigError(f"aversion is {aversion}, but must be at least 0")
    d = gains(ours, theirs)
    return np.asarray(d + aversion * np.minimum(d, 0.0))


def u_risk(ours: npt.ArrayLike, theirs: npt.ArrayLike, aversion: float = AVERSION) -> float:
    """URisk = 1/n (sum of gains + (1 + aversion) times the sum of losses) (Wang, Bennett and Collins-Thompson, 2012).

    With aversion 0 it is the difference of the means; it is below 0 where what is lost outweighs what is won.

    >>> u_risk([0.5, 0.25], [0.25, 0.5], aversion=1.0)
    -0.125
    """
    return float(weigh_losses(ours, theirs, aversion).mean())


def t_risk(ours: npt.ArrayLike, theirs: npt.ArrayLike, aversion: float = AVERSION) -> float:
    """TRisk = URisk / (s / sqrt(n)), s the standard deviation (n - 1) of the weighed gains.

    Dinçer, Macdonald and Ounis, 2014. It is Student's t with n - 1 degrees of freedom: below -2 the risk is real, above
    2 so is the gain. NaN if s is 0.

    >>> ours, theirs = [0.6, 0.5, 0.3, 0.7], [0.5, 0.6, 0.4, 0.6]  # two won and two lost by 0.1
    >>> round(t_risk(ours, theirs, aversion=0.0), 2) == 0, round(t_risk(ours, theirs, aversion=2.0), 2)
    (True, -0.87)
    """
    d = weigh_losses(ours, theirs, aversion)
    error = float(d.std(ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else 0.0
    return float(d.mean()) / error if error > 0 else math.nan


def z_risk(scores: npt.ArrayLike, aversion: float = AVERSION) -> Floats:
    """ZRisk of each ranker, for scores of rankers x queries: gains + (1 + aversion) losses of z (Dinçer et al., 2016).

    z_ki = (s_ki - e_ki) / sqrt(e_ki), where e_ki = (sum of row k)(sum of column i) / (sum of all) is what a ranker of
    this strength should have on a query of this difficulty: no one ranker is the baseline, but all of them together.

    >>> z_risk([[0.6, 0.5], [0.5, 0.6]], aversion=2.0).round(2)  # each is below what is expected of it once
    array([-0.13, -0.13])
    """
    z = residuals(scores)
    return np.asarray(z.sum(-1) + aversion * np.minimum(z, 0.0).sum(-1))


def geo_risk(scores: npt.ArrayLike, aversion: float = AVERSION) -> Floats:
    """GeoRisk(k) = sqrt(mean_i s_ki * Phi(ZRisk(k) / n)) of each ranker, higher being better (Dinçer et al., 2016).

    `mutirao.risk.geo_risk` is that of errors, where gains are what counts more.

    Two rankers with the same mean; the second has one very bad query:

    >>> geo_risk([[0.5, 0.5, 0.5], [0.7, 0.7, 0.1]], aversion=5.0).round(3)
    array([0.416, 0.36 ])
    """
    from scipy.special import ndtr  # late: it takes a while

    s = np.asarray(scores, np.float64)
    n = max(s.shape[-1], 1)
    return np.asarray(np.sqrt(s.sum(-1) / n * ndtr(z_risk(s, aversion) / n)))


def hold_against(ours: npt.ArrayLike, theirs: npt.ArrayLike, aversion: float = AVERSION) -> Against:
    """All of these measures for two rankers.

    >>> found = hold_against([0.6, 0.5, 0.3], [0.5, 0.5, 0.4])
    >>> found.wins, found.losses, found.ties, round(found.u_risk, 3)
    (1, 1, 1, -0.167)
    """
    d = gains(ours, theirs)
    wins, losses = int((d > 0).sum()), int((d < 0).sum())
    own, other = geo_risk(np.array([ours, theirs]), aversion).tolist()
    risks = u_risk(ours, theirs, aversion), t_risk(ours, theirs, aversion)
    return Against(wins, losses, len(d) - wins - losses, *risks, own, other)
