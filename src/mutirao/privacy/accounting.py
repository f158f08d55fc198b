"""Accounting of differential privacy: a table of noisy releases, and the epsilon that they add up to.

A row of the table is (noise, rate, times): a Gaussian with deviation `noise` times the sensitivity, on a random share
`rate` of the records (Poisson sampling), so many times. The table is saved with a run or at a site, and its epsilon
can be computed at any time; Opacus does the arithmetic.
"""

import functools
import importlib
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError

Releases = npt.NDArray[np.float64]
Accountant = Literal["rdp", "prv"]

NOTHING: Releases = np.zeros((0, 3))
LEAST_NOISE = 1e-3
MOST_NOISE = 1e4
ORDERS = (1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, *range(5, 65), 80, 96, 128, 192, 256, 512, 1024)


def add_releases(table: Releases | None, noise: float, rate: float, times: int) -> Releases:
    """The table with these releases added; equal releases share a row, since their order does not matter.

    >>> add_releases(add_releases(None, 1.0, 0.1, 2), 1.0, 0.1, 3)
    array([[1. , 0.1, 5. ]])
    """
    out = (NOTHING if table is None else table).copy()
    for row in out:
        if row[0] == noise and row[1] == rate:
            row[2] += times
            return out
    return np.vstack([out, [noise, rate, times]])


def join_releases(one: Releases, other: Releases) -> Releases:
    """The releases of both tables.

    >>> join_releases(add_releases(None, 1.0, 0.1, 2), add_releases(None, 2.0, 0.1, 5))
    array([[1. , 0.1, 2. ],
           [2. , 0.1, 5. ]])
    """
    for noise, rate, times in other:
        one = add_releases(one, float(noise), float(rate), int(times))
    return one


def worst_case(tables: Sequence[Releases]) -> Releases:
    """A table that costs at least as much as each of these: of equal releases, the largest number.

    >>> worst_case([add_releases(None, 1.0, 0.1, 2), add_releases(None, 1.0, 0.1, 5)])
    array([[1. , 0.1, 5. ]])
    """
    most: dict[tuple[float, float], float] = {}
    for table in tables:
        for noise, rate, times in table.tolist():
            most[noise, rate] = max(times, most.get((noise, rate), 0.0))
    return np.array([[*kind, times] for kind, times in most.items()]).reshape(-1, 3)


def epsilon(table: Releases | None, delta: float, accountant: Accountant = "rdp") -> float:
    """The epsilon of all releases together, at this delta.

    `rdp`: Rényi differential privacy of the sampled Gaussian (Mironov, Talwar and Zhang, 2019), quick and a little
    loose. `prv`: privacy loss distributions composed numerically (Gopi, Lee and Wutschitz, 2021), tight and slower.

    A hundred rounds, each with a tenth of the clients and noise 1.1 times the clip:

    >>> table = add_releases(None, 1.1, 0.1, 100)
    >>> round(epsilon(table, delta=1e-5), 1)
    6.6
    """
    if table is None or not len(table):
        return 0.0
    if accountant == "prv":
        return _prv(table, delta)
    return _rdp(table, delta)


@functools.lru_cache(maxsize=4096)
def find_noise(target: float, delta: float, accountant: Accountant, rate: float, times: int) -> float:
    """The smallest noise, to a thousandth, with which this many releases cost at most epsilon = `target`.

    It lies between `short`, which costs too much, and `enough`; the range is bisected.

    >>> noise = find_noise(8.0, 1e-5, "rdp", rate=0.1, times=100)
    >>> round(noise, 2), epsilon(add_releases(None, noise, 0.1, 100), 1e-5) <= 8.0
    (1.0, True)
    """

    def suffices(noise: float) -> bool:
        try:
            return epsilon(np.array([[noise, rate, times]]), delta, accountant) <= target
        except (ConfigError, OverflowError):  # too little noise to be worked out
            return False

    step = 2.0
    enough = 1.0
    if accountant == "prv":
        # A try takes seconds, so the search begins near the quick accountant's result.
        step = 1.2
        enough = find_noise(target, delta, "rdp", rate, times)
    while not suffices(enough):
        enough *= step
        if enough > MOST_NOISE:
            raise ConfigError(f"no noise makes epsilon {target:g} at delta {delta:g} in {times} releases; ask for more")
    while (short := enough / step) > LEAST_NOISE and suffices(short):
        enough = short
    while enough / short > 1.001:
        middle = math.sqrt(short * enough)
        if suffices(middle):
            enough = middle
        else:
            short = middle
    return enough


def _rdp(table: Releases, delta: float) -> float:
    opacus_rdp = import_opacus("accountants.analysis.rdp")
    # Rényi divergences of independent releases add up, order by order (Mironov, 2017).
    total = sum(times * _rdp_of_release(float(noise), float(rate)) for noise, rate, times in table)
    with warnings.catch_warnings():
        # At the first or last order the bound is loose, but valid.
        warnings.simplefilter("ignore")
        spent, _ = opacus_rdp.get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)
    return max(0.0, float(spent))


@functools.lru_cache(maxsize=4096)
def _rdp_of_release(noise: float, rate: float) -> Any:
    """The Rényi divergences of a single release, one for each order."""
    rdp = import_opacus("accountants.analysis.rdp")
    return np.asarray(rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS))


def _prv(table: Releases, delta: float) -> float:
    accountant = import_opacus("accountants").PRVAccountant()
    accountant.history = [(float(noise), float(rate), int(times)) for noise, rate, times in table]
    with warnings.catch_warnings():
        # Opacus takes the logarithm of 0 on its way.
        warnings.simplefilter("ignore")
        spent = float(accountant.get_epsilon(delta, eps_error=0.01, delta_error=delta / 1000))
    if not math.isfinite(spent):
        raise ConfigError("the prv accountant finds no finite epsilon for so little noise; use accountant=rdp")
    return max(0.0, spent)


def import_opacus(module: str) -> Any:
    """Import a module of Opacus when it is needed, as this takes seconds."""
    try:
        return importlib.import_module(f"opacus.{module}")
    except ImportError as error:
        raise ConfigError("privacy needs Opacus: install mutirao[privacy]") from error
