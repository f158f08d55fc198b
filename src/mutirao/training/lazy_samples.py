"""Samples that do not fit in memory: read from their Dataset when a batch needs them, the first ones cached.

Batches come in a new order every epoch, so that all samples are equally likely to be needed next. Evicting one
sample for another would gain nothing, so a cached sample stays.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Read = Callable[[int], Any]


class LazyInputs:
    """The inputs of `count` samples, of which at most `keep` bytes are held; `read(i)` gives those of the i-th.

    `example` is the inputs of a first batch of one, with the shapes and dtypes of all. Several threads may fetch; only
    one reads at a time, as few Datasets allow more.
    """

    def __init__(self, read: Read, count: int, example: Any, keep: int) -> None:
        self.read = read
        self.count = count
        self.example = example
        size = sum(t.nbytes for t in self._tensors(example))
        self.room = min(count, keep // max(1, size))
        self._held = [t.new_empty((self.room, *t.shape[1:])) for t in self._tensors(example)]
        # Position of each sample in the cache; -1 if it is not cached.
        self._place = np.full(count, -1, np.int64)
        self._next = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.count

    def fetch(self, rows: npt.NDArray[np.intp]) -> Any:
        """The inputs of these samples as a batch."""
        out = [t.new_empty((len(rows), *t.shape[1:])) for t in self._tensors(self.example)]
        place = self._place[rows]
        known = np.flatnonzero(place >= 0)
        if len(known):
            here = torch.from_numpy(known)
            there = torch.from_numpy(place[known])
            for to, held in zip(out, self._held, strict=True):
                to[here] = held[there]
        for i in np.flatnonzero(place < 0).tolist():
            for to, tensor in zip(out, self.one(int(rows[i])), strict=True):
                to[i] = tensor
        return self._like(out)

    def one(self, row: int) -> list[Tensor]:
        """The tensors of one sample, read from the Dataset and cached if there is room."""
        with self._lock:
            return self.keep(row, self.read(row))

    def keep(self, row: int, x: Any) -> list[Tensor]:
        """Cache the tensors of a sample if there is room; ValueError if its shape or dtype differs from the first."""
        tensors = self._tensors(x)
        for tensor, like in zip(tensors, self._tensors(self.example), strict=True):
            if tensor.shape != like.shape[1:] or tensor.dtype != like.dtype:
                raise ValueError(
                    f"sample {row} is {describe_tensor(tensor)}, and the first is {describe_tensor(like[0])}"
                )
        if self._next < self.room and self._place[row] < 0:
            for held, tensor in zip(self._held, tensors, strict=True):
                held[self._next] = tensor.detach()
            # Set last, as `fetch` takes no lock: a thread that sees the position finds the sample there.
            self._place[row] = self._next
            self._next += 1
        return tensors

    def whole(self) -> Any:
        """The inputs of all samples, if all were read in order and fit in the cache."""
        return self._like(self._held)

    def _like(self, tensors: list[Tensor]) -> Any:
        if isinstance(self.example, dict):
            return dict(zip(self.example, tensors, strict=True))
        if isinstance(self.example, tuple):
            return tuple(tensors)
        return tensors[0]

    def _tensors(self, x: Any) -> list[Tensor]:
        """The tensors of one sample, in the order of the example's."""
        if describe_structure(x) != describe_structure(self.example):
            raise ValueError(
                f"a sample is {describe_structure(x)}, and the first is {describe_structure(self.example)}"
            )
        if isinstance(x, dict):
            return [x[name] for name in self.example]
        if isinstance(x, tuple):
            return list(x)
        return [x]


def describe_structure(x: Any) -> str:
    """The structure of inputs in a few words."""
    if isinstance(x, dict):
        return f"a dict of {', '.join(sorted(map(str, x)))}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return "one tensor"


def describe_tensor(tensor: Tensor) -> str:
    """The dtype and shape of a tensor in a few characters.

    >>> describe_tensor(torch.zeros(3, 32))
    'float32 [3, 32]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
