"""Data at rest: all samples lie once in shared, contiguous storage; a client is a list of row numbers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mutirao.core.fleet import ClientId

Index = npt.NDArray[np.intp]


class Samples:
    """Rows of `x` and `y` that belong together; with `index` only those rows, without copying them."""

    def __init__(self, x: Any, y: Any, index: Index | None = None) -> None:
        self.x, self.y = torch.as_tensor(x), torch.as_tensor(y)
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} rows of x and {len(self.y)} of y do not belong together")
        self.index = index

    @classmethod
    def of(cls, data: Any) -> "Samples":
        """`data` itself if it is Samples, or made from a pair (x, y)."""
        return data if isinstance(data, cls) else cls(*data)

    def __len__(self) -> int:
        return len(self.y) if self.index is None else len(self.index)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape and type of a sample; samples of one kind can be put together."""
        return self.x.shape[1:], self.x.dtype, self.y.shape[1:], self.y.dtype

    def first(self, most: int) -> "Samples":
        """The first samples, at most so many."""
        if self.index is None:
            return Samples(self.x[:most], self.y[:most])
        return Samples(self.x, self.y, self.index[:most])

    def batch(self, rows: Index | slice) -> tuple[Tensor, Tensor]:
        """The samples at these positions."""
        if self.index is None and isinstance(rows, slice):
            return self.x[rows], self.y[rows]
        where = torch.from_numpy(rows if self.index is None else self.index[rows])
        return self.x[where], self.y[where]


class VirtualClients(Mapping[ClientId, Samples]):
    """A population over one storage: client i owns the rows order[offsets[i]:offsets[i + 1]].

    A client costs a name and a number, so that there may be millions.

    >>> clients = virtual_clients(np.zeros((5, 2)), np.arange(5), [np.array([0, 4]), np.array([1, 2, 3])])
    >>> list(clients), len(clients["c1"])
    (['c0', 'c1'], 3)
    """

    def __init__(self, x: Any, y: Any, order: Index, offsets: npt.NDArray[np.int64]) -> None:
        self.x, self.y, self.order, self.offsets = torch.as_tensor(x), torch.as_tensor(y), order, offsets
        width = len(str(len(offsets) - 2))
        self.names = [f"c{i:0{width}d}" for i in range(len(offsets) - 1)]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.names)

    def __getitem__(self, name: ClientId) -> Samples:
        i = int(name[1:]) if name[1:].isdecimal() else -1
        if not 0 <= i < len(self.names) or self.names[i] != name:
            raise KeyError(name)
        return Samples(self.x, self.y, self.order[self.offsets[i] : self.offsets[i + 1]])


def pooled(clients: VirtualClients) -> dict[ClientId, Samples]:
    """One client with all that the others have: the centralised reference."""
    return {"pooled": Samples(clients.x, clients.y, np.sort(clients.order))}


def virtual_clients(x: Any, y: Any, parts: Sequence[Index], most: int = 0, seed: int = 0) -> VirtualClients:
    """The population of a partition; with `most` > 0 a client keeps at most so many samples, drawn once."""
    if most:
        draw = np.random.default_rng(seed)
        parts = [p if len(p) <= most else np.sort(draw.choice(p, most, replace=False)) for p in parts]
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])])
    return VirtualClients(x, y, np.concatenate(parts).astype(np.intp), offsets)
