"""Partition documents over clients, with whole queries or without.

A partition is a list of sorted arrays of row numbers, one a client; every document is in exactly one of them.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao import partitioning
from mutirao.core.moments import ROWS_AT_ONCE, combine_moments, measure_moments, transform_features
from mutirao.errors import ConfigError

Indices = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]


def by_query(labels: npt.ArrayLike, queries: npt.ArrayLike, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Assign whole queries at random: clients have similar queries, and equally many up to one.

    >>> [p.tolist() for p in by_query([0, 1, 0, 2], ["a", "b", "a", "c"], 3, np.random.default_rng(0))]
    [[3], [0, 2], [1]]
    """
    _, query, many = _columns("by_query", labels, queries, clients)
    owner = np.empty(many, np.intp)
    owner[rng.permutation(many)] = np.arange(many) % clients
    return _rows(owner[query], clients)


def by_query_groups(
    labels: npt.ArrayLike,
    queries: npt.ArrayLike,
    x: npt.ArrayLike | None,
    clients: int,
    rng: np.random.Generator,
    alpha: float = 0.5,
    groups: int = 10,
    similar: Literal["grades", "features"] = "grades",
) -> list[Indices]:
    """Assign whole queries with skew: clients differ in how many queries they have, and in their kind.

    Queries are put into `groups` equal groups of similar ones: by the mean grade of their documents, or by their
    place along the first principal component of their mean features `x`. Each group is split over the clients by
    p ~ Dir(alpha), as `partition.dirichlet` splits classes. A client left without a query gets one from the
    client with most.

    >>> labels, queries = np.tile([0, 1, 2], 40), np.repeat(np.arange(40), 3)
    >>> parts = by_query_groups(labels, queries, None, 4, np.random.default_rng(0))
    >>> sum(map(len, parts)), all(len(p) % 3 == 0 for p in parts)
    (120, True)
    """
    y, query, many = _columns("by_query_groups", labels, queries, clients)
    if not 1 <= groups <= many:
        raise ConfigError(f"partition.groups: {groups!r} is not between 1 and {many}, the number of queries")
    if similar == "grades":
        place = np.bincount(query, y, many) / np.bincount(query, minlength=many)
    elif similar != "features":
        raise ConfigError(f"partition.similar: {similar!r} is not one of grades, features")
    elif x is None:
        raise ConfigError("partition.similar=features needs the features of the documents, which were not passed")
    else:
        place = _along(np.asarray(x), query, many)
    rank = np.empty(many, np.intp)
    rank[np.lexsort((rng.random(many), place))] = np.arange(many)  # equal places in random order
    parts = partitioning.dirichlet(rank * groups // many, clients, alpha, rng, min_size=0)
    owner = np.empty(many, np.intp)
    for client, own in enumerate(parts):
        owner[own] = client
    # Dirichlet shares may leave clients without any query.
    sizes = np.bincount(owner, minlength=clients)
    for client in np.flatnonzero(sizes == 0).tolist():
        richest = int(sizes.argmax())
        owner[rng.choice(np.flatnonzero(owner == richest))] = client
        sizes[richest] -= 1
        sizes[client] += 1
    return _rows(owner[query], clients)


NAMES: dict[str, Callable[..., list[Indices]]] = {
    **partitioning.NAMES,
    "by_query": by_query,
    "by_query_groups": by_query_groups,
}


def partition_documents(
    split: Callable[..., list[Indices]],
    labels: npt.ArrayLike,
    queries: npt.ArrayLike,
    clients: int,
    rng: np.random.Generator,
    x: npt.ArrayLike | None = None,
) -> list[Indices]:
    """Call a partition with the arguments it takes; `keys`, if it takes any, are the queries."""
    arguments = {"labels": labels, "keys": queries, "queries": queries, "x": x, "clients": clients, "rng": rng}
    supported = inspect.signature(split).parameters
    return split(**{name: value for name, value in arguments.items() if name in supported})


def fold_rows(queries: npt.ArrayLike, fold: int) -> tuple[Indices, Indices, Indices]:
    """Rows for training, validation and test as LETOR's folds have them: of five parts three, one and one.

    The queries, in the order of their numbers, are cut into parts S1 to S5; fold f trains on S_f to S_{f+2},
    validates on the next and tests on the last, going round.

    >>> [rows.tolist() for rows in fold_rows([0, 1, 2, 3, 4], 2)]
    [[1, 2, 3], [4], [0]]
    """
    if not 1 <= fold <= 5:
        raise ConfigError(f"fold: {fold!r} is not between 1 and 5")
    _, query, many = _columns("folds", queries, queries, 1)
    if many < 5:
        raise ConfigError(f"{many} queries cannot be cut into five folds; at least 5 are needed")
    part = (query * 5 // many - (fold - 1)) % 5
    train, vali, test = (np.flatnonzero(np.isin(part, which)) for which in ((0, 1, 2), (3,), (4,)))
    return train, vali, test


def _columns(
    name: str, labels: npt.ArrayLike, queries: npt.ArrayLike, clients: int
) -> tuple[npt.NDArray[Any], Indices, int]:
    """The labels, the number of each document's query, and the number of queries."""
    y = np.asarray(labels)
    q = np.asarray(queries)
    if y.ndim != 1 or q.shape != y.shape or not len(y):
        raise ConfigError(
            f"partition={name}: expected one label and one query a document, found shapes {y.shape} and {q.shape}"
        )
    if clients < 1:
        raise ConfigError(f"clients: {clients!r} is too small, at least 1 is needed")
    names, query = np.unique(q, return_inverse=True)
    if clients > len(names):
        raise ConfigError(
            f"partition={name}: {clients} clients cannot share {len(names)} queries; take at most {len(names)} clients"
        )
    return y, query.astype(np.intp), len(names)


def _rows(owner: Indices, clients: int) -> list[Indices]:
    """The rows of each client, sorted."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _along(x: npt.NDArray[Any], query: Indices, many: int) -> Floats:
    """Each query's mean features, projected on their first principal component."""
    mean, std = combine_moments([measure_moments(x, "log")])
    profile = np.zeros((many, x.shape[1]))
    for start in range(0, len(x), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        order = np.argsort(query[rows], kind="stable")
        names, firsts = np.unique(query[rows][order], return_index=True)
        profile[names] += np.add.reduceat((transform_features(x[rows], "log")[order] - mean) / std, firsts, axis=0)
    profile /= np.bincount(query, minlength=many)[:, None]
    profile -= profile.mean(0)
    _, directions = np.linalg.eigh(profile.T @ profile)
    first = directions[:, -1]
    sign = np.sign(first[np.abs(first).argmax()])  # its sign is arbitrary, so fix it
    return np.asarray(profile @ (first * sign), np.float64)
