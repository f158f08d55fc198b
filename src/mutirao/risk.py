"""GeoRisk of the clients of a round by their squared errors, for the FedRisk aggregator (Dinçer et al., 2016).

A client is a risk if its errors are larger than those of the others; it has nothing to do with privacy.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Floats = npt.NDArray[np.float64]


def residuals(values: npt.ArrayLike) -> Floats:
    """z_ki = (m_ki - e_ki) / sqrt(e_ki), or 0 where e_ki = 0, of rows x columns (leading dimensions are batches).

    With N the sum of all, L_k and T_i the sums of rows and columns, e_ki = L_k T_i / N.

    >>> residuals([[1, 1], [1, 9]]).round(2)  # where one row has more than its share, the other has less
    array([[ 1.15, -0.52],
           [-0.52,  0.23]])
    """
    m = np.asarray(values, np.float64)
    rows = m.sum(-1, keepdims=True)
    columns = m.sum(-2, keepdims=True)
    total = rows.sum(-2, keepdims=True)
    root = np.sqrt(rows) * np.sqrt(columns / np.where(total > 0, total, 1.0))  # sqrt(e)
    z = m / np.where(root > 0, root, 1.0)
    z -= root
    return np.asarray(z)


def z_risk(errors: npt.ArrayLike, aversion: float) -> Floats:
    """ZRisk of each client, for errors m of clients x instances (batches of such matrices may stand in front).

    ZRisk(k) = sum of the negative z_ki + (1 + aversion) times the sum of the others; z are the `residuals`.

    Clients with the same errors have no risk. Two with errors on different instances have risk, as aversion weighs
    errors above the expected ones more than those below:

    >>> bool(np.allclose(z_risk([[1, 1], [1, 1]], aversion=2.0), 0))
    True
    >>> z_risk([[2, 2, 0], [0, 2, 2]], aversion=2.0).round(2)
    array([2., 2.])
    """
    z = residuals(errors)
    out = z.sum(-1)
    np.maximum(z, 0.0, out=z)
    return np.asarray(out + aversion * z.sum(-1))


def geo_risk(errors: npt.ArrayLike, aversion: float) -> Floats:
    """GeoRisk(k) = sqrt(mean_i m_ki * Phi(ZRisk(k) / n)), Phi the normal distribution function, n instances.

    >>> geo_risk([[2, 2], [2, 2]], aversion=2.0)
    array([1., 1.])
    >>> geo_risk([[1, 1], [9, 9]], aversion=2.0).round(2)
    array([0.71, 2.12])
    """
    from scipy.special import ndtr  # late: a site's client process, started for every message, has no use for it

    m = np.asarray(errors, np.float64)
    n = max(m.shape[-1], 1)
    return np.asarray(np.sqrt(m.sum(-1) / n * ndtr(z_risk(m, aversion) / n)))


def ideal_risk(errors: npt.ArrayLike) -> Floats:
    """GeoRisk of the ideal client Z_i = T_i / |S|, which has a ZRisk of 0: sqrt(mean of m / 2).

    >>> float(ideal_risk([[2, 2], [2, 2]]))  # that of any client, if all have the same errors
    1.0
    """
    m = np.asarray(errors, np.float64)
    if m.size:
        return np.asarray(np.sqrt(0.5 * m.mean((-2, -1))))
    return np.zeros(m.shape[:-2])


def batch_risks(
    errors: Sequence[npt.NDArray[np.uint8]], sizes: Sequence[npt.NDArray[np.int32]], aversion: float
) -> Floats:
    """The median over batches of GeoRisk(Z) - GeoRisk(k), for clients that sent their errors batch after batch.

    Batch b is compared among the clients that have it, over the columns all of them have; a client without
    batches has risk 0. Batches of one shape are computed together.

    >>> errors = [np.array([0, 1], np.uint8), np.array([4, 9], np.uint8)]
    >>> batch_risks(errors, [np.array([2], np.int32)] * 2, aversion=2.0).round(2)
    array([ 0.78, -0.6 ])
    """
    clients = len(errors)
    most = max((len(s) for s in sizes), default=0)
    lengths = np.zeros((most, clients), np.int64)
    for k, own in enumerate(sizes):
        lengths[: len(own), k] = own
    begins = np.cumsum([0, *(len(e) for e in errors)])[:-1] + np.cumsum(lengths, axis=0) - lengths
    joined = np.concatenate([np.zeros(0, np.uint8), *errors])
    same_shape: dict[tuple[bytes, int], list[int]] = {}
    for b, here in enumerate(lengths > 0):
        same_shape.setdefault((here.tobytes(), int(lengths[b, here].min())), []).append(b)
    risks = np.full((most, clients), np.nan)
    for (mask, width), batches in same_shape.items():
        where = np.ix_(np.array(batches), np.flatnonzero(np.frombuffer(mask, np.bool_)))
        # A batch begins anywhere in the joined errors: windows over these are views, so only what is used is copied.
        m = sliding_window_view(joined, width)[begins[where]].astype(np.float64)
        risks[where] = ideal_risk(m)[:, None] - geo_risk(m, aversion)
    out = np.zeros(clients)
    seen = [k for k, own in enumerate(sizes) if len(own)]
    out[seen] = np.nanmedian(risks[:, seen], axis=0)
    return out
