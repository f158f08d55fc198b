"""Aggregation of item rows: each item is averaged over the clients that touched it."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mutirao import aggregation
from mutirao.config import handed_over
from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged
from mutirao.core.sparse_rows import ROWS, concatenate_rows
from mutirao.systems.recsys.kernels import find_kernel

TOUCHES = "touches"  # the array in which users count the items they touched
SEEN = "by_item.touches"  # the sum of these counts in the run's memory, followed by the number of rounds


@dataclass(frozen=True)
class ByItem:
    """x_i' = x_i + lr sum_k (x_ki - x_i) / (m_i + shrinkage), over the m_i clients k that touched item i.

    The shrinkage slows down items that few clients touched. `over=all` is the mean of all clients of the round weighted
    by their ratings, x_i' = x_i + lr sum_k n_k (x_ki - x_i) / sum_k n_k, as in FedAvg and the paper: the fewer clients
    touch an item, the less it moves.

    If the server sees only `sums`, each user adds `touch` to an element of the array `touches` for every item that it
    touched. The array is clipped, masked and noised with the rows, and the sum gives m_i. From noised sums, m_i is the
    mean over all rounds so far: noise cancels there, and popularity hardly changes.

    >>> from mutirao import Reply
    >>> model = {"items": np.zeros((2, 1))}
    >>> replies = {c: Reply({"items": np.array([[1.0], [x]])}, n=1) for c, x in {"ana": 0.0, "bia": 4.0}.items()}
    >>> ByItem(shrinkage=0.0)(model, replies, {}).arrays["items"]  # the second item was touched by bia alone
    array([[1.],
           [4.]])
    """

    shrinkage: float = 3.0
    lr: float = 1.0
    over: Literal["touched", "all"] = "touched"
    touch: float = 0.1
    sums: Literal["none", "exact", "noised"] | None = handed_over()  # what the server sees; set by the recipe

    def __post_init__(self) -> None:
        if self.shrinkage < 0 or not self.lr > 0:
            raise ValueError(f"shrinkage is {self.shrinkage} and lr {self.lr}; they must be at least 0 and above 0")
        if not 0 < self.touch < np.inf:
            raise ValueError(f"touch is {self.touch}; it must be above 0")

    @property
    def needs(self) -> Needs:
        if self.mean_only:
            return Needs()
        return Needs(server={"rows"})

    @property
    def mean_only(self) -> bool:
        return self.sums not in (None, "none")

    @property
    def counts(self) -> bool:
        """Whether users count the items they touched."""
        return self.mean_only and self.over == "touched"

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        clients = sorted(replies)
        total = sum(replies[c].n for c in clients)
        weights = {c: replies[c].n / total for c in clients}
        if self.counts:
            return Merged(self._mean_by_counts(current, replies, weights, total, memory), weights)
        return Merged({name: self._mean_by_rows(name, x, replies, weights) for name, x in current.items()}, weights)

    def _mean_by_counts(
        self,
        current: Arrays,
        replies: Mapping[ClientId, Reply],
        weights: Mapping[ClientId, float],
        m: int,
        memory: Arrays,
    ) -> Arrays:
        """Turn the mean over m users into a mean over the users that touched each item."""
        mean = {k: sum_of_means(k, replies, weights) for k in current}
        counts = m / self.touch * mean[TOUCHES]
        if self.sums == "noised":
            before = memory.get(SEEN, np.zeros(len(counts) + 1))
            memory[SEEN] = before + np.append(counts, 1.0)
            counts = memory[SEEN][:-1] / memory[SEEN][-1]
        # The server has the mean over m users, so lr m / (m_i + shrinkage) times it is the mean over those that touched
        # item i. Noise can make a count negative.
        share = self.lr * m / (np.maximum(counts, 0.0) + self.shrinkage)
        moved = {k: (x + share[:, None] * (mean[k] - x)).astype(x.dtype) for k, x in current.items() if k != TOUCHES}
        # The array counts one round, so the next one begins at 0; sums over rounds are in the memory.
        return {**moved, TOUCHES: np.zeros_like(current[TOUCHES])}

    def _mean_by_rows(
        self, name: str, x: Array, replies: Mapping[ClientId, Reply], weights: Mapping[ClientId, float]
    ) -> Array:
        sent = [find_touched(x, replies[c].arrays, name) for c in weights]
        rows = np.concatenate([r for r, _ in sent])
        if self.over == "touched":
            share = (self.lr / (np.bincount(rows)[rows] + self.shrinkage)).astype(np.float32)
        else:
            share = np.repeat(self.lr * np.array(list(weights.values())), [len(r) for r, _ in sent]).astype(np.float32)
        changes = sum_of_changes(x, rows, concatenate_rows([v for _, v in sent]), share)
        return np.add(x, changes, out=changes)


def sum_of_means(name: str, replies: Mapping[ClientId, Reply], weights: Mapping[ClientId, float]) -> Array:
    """The weighted mean of an array. All replies of a secure sum hold the same array."""
    arrays = {id(replies[c].arrays[name]): replies[c].arrays[name] for c in weights}
    if len(arrays) == 1:
        return next(iter(arrays.values())).astype(np.float64)
    return np.asarray(sum(w * replies[c].arrays[name].astype(np.float64) for c, w in weights.items()))


def sum_of_changes(x: Array, rows: Array, values: Array, share: Array) -> Array:
    """For each row of x the sum of share (value - x) over the values for it, in order."""
    gather_changes = None
    if x.ndim == 2 and x.dtype == np.float32:
        gather_changes = find_kernel("gather_changes")
    if gather_changes is not None:
        sums = np.zeros(x.shape, x.dtype)
        gather_changes(x, rows, values, share, sums)
        return sums
    from scipy import sparse  # late: most rounds do without

    # Column k of `adder` adds the k-th value to its row.
    adder = sparse.csc_array((share, rows, np.arange(len(rows) + 1)), shape=(len(x), len(rows)))
    changes = (values - x[rows]).reshape(len(rows), -1)
    return np.asarray(adder @ changes, x.dtype).reshape(x.shape)


def find_touched(x: Array, arrays: Arrays, name: str) -> tuple[npt.NDArray[np.int32], Array]:
    """The rows of `name` that a reply changed, and their values. If it has all rows, those that differ from x."""
    if (rows := arrays.get(name + ROWS)) is not None:
        return rows, arrays[name]
    rows = np.flatnonzero((arrays[name] != x).any(axis=tuple(range(1, x.ndim)))).astype(np.int32)
    return rows, arrays[name][rows]


NAMES = {**aggregation.NAMES, "by_item": ByItem}
