"""Quantity skew: clients with the same label distribution and very different numbers of samples."""

import math

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.partitioning.base import Counts, Indices, check_labels, check_least, rows_by_owner

DRAWS = 10_000  # of sizes alone, which are cheap
AT_ONCE = 1 << 20  # numbers sampled at a time
LARGEST_BETA = 1e100  # a larger beta overflows, and gives the same: equal sizes


def quantity(
    labels: npt.ArrayLike, clients: int, rng: np.random.Generator, beta: float = 0.5, min_size: int = 1
) -> list[Indices]:
    """Skew the sizes by a Dirichlet distribution and not the labels: small `beta`, a few clients have most.

    Of n shuffled samples client k of K gets those from n (q_1 + ... + q_(k-1)) to n (q_1 + ... + q_k), with
    q ~ Dir(beta 1_K), sampled again while a client has fewer than `min_size` samples (Li, Diao, Chen and He, "Federated
    Learning on Non-IID Data Silos", ICDE 2022; there `min_size` is 10).

    >>> sizes = [len(p) for p in quantity(np.zeros(1000), 5, np.random.default_rng(0))]
    >>> sum(sizes), max(sizes) > 3 * min(sizes)
    (1000, True)
    """
    y = check_labels(labels, clients)
    if not (math.isfinite(beta) and beta > 0):
        raise ConfigError(f"partition.beta: {beta!r} is not a number above 0")
    check_least("partition.min_size", min_size, 0)
    if clients * min_size > len(y):
        raise ConfigError(
            f"partition=quantity: {clients} clients of {min_size} samples need {clients * min_size} samples, there are "
            f"{len(y)}; take at most {len(y) // min_size} clients"
        )
    sizes = draw_sizes(len(y), clients, min(beta, LARGEST_BETA), min_size, rng)
    if sizes is None:
        raise ConfigError(
            f"partition=quantity: in {DRAWS:,} draws with beta={beta:g} some of the {clients} clients always had fewer "
            f"than {min_size} samples; take a larger beta, fewer clients or a smaller min_size"
        )
    return rows_by_owner(rng.permutation(len(y)), np.repeat(np.arange(clients), sizes), clients)


def draw_sizes(samples: int, clients: int, beta: float, least: int, rng: np.random.Generator) -> Counts | None:
    """The first sampled sizes of which none is below `least`; None if DRAWS draws give none."""
    left = DRAWS
    while left:
        rows = min(left, max(1, AT_ONCE // clients))
        shares = rng.dirichlet(np.full(clients, beta), size=rows)
        # 1e-9: rounding may leave a sum that is a whole number just below it, and `floor` would lose a sample.
        cuts = np.floor(np.cumsum(shares, axis=1) * samples + 1e-9).astype(np.int64)
        cuts[:, -1] = samples
        sizes = np.diff(np.minimum(cuts, samples), axis=1, prepend=0)
        good = np.flatnonzero(sizes.min(1) >= least)
        if len(good):
            return np.asarray(sizes[good[0]], np.int64)
        left -= rows
    return None
