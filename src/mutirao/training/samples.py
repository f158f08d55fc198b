"""Samples in shared, contiguous storage: a client is a list of row indices."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mutirao.core.arrays import fingerprint
from mutirao.core.exclusion import PopulationWithout
from mutirao.core.fleet import ClientId
from mutirao.training.adapters import LIMIT, read_data
from mutirao.training.inputs import Inputs, as_inputs, as_labels, input_kind, map_tensors, tensors_in
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.torch_device import DeviceCache

Index = npt.NDArray[np.intp]
CLASSES = "classes"  # what class lists go by in an agreement


class Samples:
    """Rows of `x` and `y` that belong together; with `index` only those rows, without a copy.

    `x` is a tensor, a tuple or a dict of tensors, or `LazyInputs`.

    >>> samples = Samples.of({"age": [30.0, 60.0], "weight": [70.0, 80.0], "sick": [0, 1]}, target="sick")
    >>> len(samples), samples.batch(slice(0, 1))
    (2, (tensor([[30., 70.]]), tensor([0])))
    """

    def __init__(self, x: Any, y: Any, index: Index | None = None) -> None:
        self.x: Any = as_inputs(x)
        self.y = as_labels(y)
        self.index = index
        # Device of the batches; None for the device of the samples.
        self.device: torch.device | None = None
        for name, part in named_inputs(self.x):
            if len(part) != len(self.y):
                raise ValueError(f"{len(part)} rows of {name} and {len(self.y)} of y do not belong together")

    @classmethod
    def of(cls, data: Any, target: str = "y", limit: int = LIMIT) -> "Samples":
        """The training samples of `data`: a pair of arrays, a Dataset, a DataLoader, columns, a frame or a table.

        `target` names the column to learn. A Dataset of more than `limit` bytes is read when batches need it.
        """
        if isinstance(data, ClientData):
            return data.train
        if isinstance(data, cls):
            return data
        return cls(*read_data(data, target, limit))

    def __len__(self) -> int:
        if self.index is None:
            return len(self.y)
        return len(self.index)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape and dtype of a sample; samples of one kind can be concatenated."""
        if isinstance(self.x, Tensor):
            return self.x.shape[1:], self.x.dtype, self.y.shape[1:], self.y.dtype
        return input_kind(self.x), self.y.shape[1:], self.y.dtype

    @property
    def width(self) -> int:
        """The number of input values of a sample."""
        return sum(math.prod(t.shape[1:]) for t in tensors_in(self.x))

    def first(self, most: int) -> "Samples":
        """The first samples, at most `most` of them."""
        return self.rows(np.arange(min(most, len(self))))

    def rows(self, rows: Index) -> "Samples":
        """The samples at these positions, without a copy."""
        return Samples(self.x, self.y, rows if self.index is None else self.index[rows])

    def batch(self, rows: Index | slice) -> tuple[Any, Tensor]:
        """The inputs and labels at these positions."""
        if self.index is None and isinstance(rows, slice):
            if isinstance(self.x, Tensor) and self.device is None:
                return self.x[rows], self.y[rows]
            rows = np.arange(len(self.y))[rows]
        chosen: Index = rows if self.index is None else self.index[rows]  # type: ignore[assignment]
        where = torch.from_numpy(chosen)
        if self.device is not None:
            return self._bring(chosen, where.to(self.y.device))
        if isinstance(self.x, Tensor):
            return self.x[where], self.y[where]
        return self._take(chosen, where), self.y[where]

    def _take(self, chosen: Index, where: Tensor) -> Any:
        if isinstance(self.x, LazyInputs):
            return self.x.fetch(chosen)
        return map_tensors(self.x, lambda t: t[where])

    def _bring(self, chosen: Index, where: Tensor) -> tuple[Any, Tensor]:
        return map_tensors(self._take(chosen, where), lambda t: t.to(self.device)), self.y[where].to(self.device)

    def at(self, device: torch.device, copies: DeviceCache) -> "Samples":
        """The same samples with batches on a device: moved there at once if they fit, otherwise batch by batch."""
        if device.type == "cpu":
            return self
        y = copies.bring(self.y, device)
        x = None if isinstance(self.x, LazyInputs) else map_tensors(self.x, lambda t: copies.bring(t, device))
        fits = y is not None and x is not None and all(t is not None for t in tensors_in(x))
        if not fits:
            x = self.x
            y = self.y
        there = Samples(x, y, self.index)
        there.device = device
        return there


def named_inputs(x: Inputs | LazyInputs) -> list[tuple[str, Any]]:
    """The inputs with the names that error messages use."""
    if isinstance(x, Tensor | LazyInputs):
        return [("x", x)]
    if isinstance(x, dict):
        return [(f"x[{name!r}]", part) for name, part in x.items()]
    return [(f"x[{i}]", part) for i, part in enumerate(x)]


@dataclass(frozen=True)
class ClientData:
    """A client's data: samples to train on, samples to evaluate on, and names for its classes.

    Either may be given as a pair (x, y). Its length is that of what is trained on.

    >>> data = ClientData(train=(np.zeros((8, 2)), np.zeros(8, int)), test=(np.zeros((2, 2)), np.zeros(2, int)))
    >>> len(data), len(data.test)
    (8, 2)
    """

    train: Samples
    test: Samples
    classes: tuple[str, ...] = ()  # by number; where clients number them by themselves, these must agree

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", Samples.of(self.train))
        object.__setattr__(self, "test", Samples.of(self.test))

    def __len__(self) -> int:
        return len(self.train)

    def agreed(self) -> dict[str, str]:
        """The digest of its class names, if it has any: all clients need the same names in the same order."""
        if self.classes:
            return agreed_classes(self.classes)
        return {}

    def counts(self) -> dict[str, int]:
        """The number of training and test samples of each named class."""
        if not self.classes:
            return {}
        labels = torch.cat([samples.batch(slice(0, len(samples)))[1] for samples in (self.train, self.test)])
        found = np.bincount(labels.numpy(), minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, found, strict=False))


def agreed_classes(names: Sequence[str]) -> dict[str, str]:
    """A class list as a digest that all clients must have in common."""
    return {CLASSES: classes_digest(tuple(names))}


@lru_cache(maxsize=64)
def classes_digest(names: tuple[str, ...]) -> str:
    """The digest of a class list, cached: a simulation needs it for every request to every client."""
    return fingerprint(list(names))


def own_test_samples(data: Any) -> Samples:
    """A client's test samples; ValueError if it has none."""
    if not isinstance(data, ClientData):
        raise ValueError("has no test data of its own: give it ClientData(train, test)")
    return data.test


def poison(
    data: Any, how: Callable[[npt.NDArray[Any], npt.NDArray[Any]], tuple[npt.NDArray[Any], npt.NDArray[Any]]]
) -> Samples | ClientData:
    """The data with changed inputs and labels to train on; test samples stay as they are."""
    samples = Samples.of(data)
    x, y = samples.batch(slice(0, len(samples)))
    changed = Samples(*how(map_tensors(x, Tensor.numpy), y.numpy()))
    if isinstance(data, ClientData):
        return replace(data, train=changed)
    return changed


class Population(Mapping[ClientId, Any]):
    """Clients by name, whose data are created or read on access."""

    @property
    @abstractmethod
    def has_tests(self) -> bool:
        """Whether clients have test data of their own; known without reading any."""


def can_evaluate(population: Mapping[ClientId, Any], surely: bool = False) -> bool:
    """Whether a Trainer's clients can answer `evaluate`; data that are not in memory are not read.

    Of a mapping that is neither a Population nor a dict nothing is known before a client is asked, so that it may try,
    unless it has to be certain.
    """
    if isinstance(population, PopulationWithout):
        return can_evaluate(population.population, surely)
    if isinstance(population, Population):
        return population.has_tests
    known = isinstance(population, dict)
    if known:
        return all(isinstance(data, ClientData) for data in population.values())
    return not surely


@dataclass(eq=False, repr=False)
class VirtualClients(Population):
    """A population over one storage: client i owns the rows order[offsets[i]:offsets[i + 1]].

    A client costs a name and a number, so that there may be millions. With a common `test` set, client i is evaluated
    on its rows tests[i], as `sees(i, those samples)` gives them if inputs look different to each client.

    >>> clients = virtual_clients(np.zeros((5, 2)), np.arange(5), [np.array([0, 4]), np.array([1, 2, 3])])
    >>> list(clients), len(clients["c1"])
    (['c0', 'c1'], 3)
    """

    x: Any
    y: Any
    order: Index
    offsets: npt.NDArray[np.int64]
    test: Samples | None = None
    tests: Sequence[Index] = ()
    sees: Callable[[int, Samples], Samples] | None = None

    def __post_init__(self) -> None:
        self.x = as_inputs(self.x)
        self.y = as_labels(self.y)
        count = len(self.offsets) - 1
        if self.test is not None and len(self.tests) != count:
            raise ValueError(f"{len(self.tests)} lists of test rows for {count} clients")
        width = len(str(count - 1))
        self.names = [f"c{i:0{width}d}" for i in range(count)]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.names)

    @property
    def has_tests(self) -> bool:
        """Whether there is a test set."""
        return self.test is not None

    def __getitem__(self, name: ClientId) -> Samples | ClientData:
        # The name itself is compared, too: `int` also reads "c01" and the digits of other scripts.
        i = int(name[1:]) if name[1:].isdecimal() else -1
        if not 0 <= i < len(self.names) or self.names[i] != name:
            raise KeyError(name)
        own = Samples(self.x, self.y, self.order[self.offsets[i] : self.offsets[i + 1]])
        if self.test is None:
            return own
        test = Samples(self.test.x, self.test.y, self.tests[i])
        if self.sees is not None:
            test = self.sees(i, test)
        return ClientData(own, test)


def pool_clients(clients: VirtualClients) -> dict[ClientId, Samples | ClientData]:
    """One client with the data of all: the centralised reference."""
    # Sorted, so that the reference is the same however the rows were partitioned.
    own = Samples(clients.x, clients.y, np.sort(clients.order))
    if clients.test is None:
        return {"pooled": own}
    return {"pooled": ClientData(own, clients.test)}


def virtual_clients(
    x: Any,
    y: Any,
    parts: Sequence[Index],
    most: int = 0,
    seed: int = 0,
    test: Samples | None = None,
    tests: Sequence[Index] = (),
    sees: Callable[[int, Samples], Samples] | None = None,
) -> VirtualClients:
    """The population of a partition; with `most` > 0 a client keeps at most that many samples, chosen once.

    `test` is a common test set and `tests` each client's rows of it; `sees` changes how the inputs look to a client.

    >>> from mutirao.partitioning import dirichlet
    >>> y = np.repeat([0, 1], 50)
    >>> clients = virtual_clients(np.zeros((100, 4)), y, dirichlet(y, 5, 0.5, np.random.default_rng(0)))
    >>> len(clients), sum(len(clients[c]) for c in clients)
    (5, 100)
    """
    if most:
        draw = np.random.default_rng(seed)
        parts = [p if len(p) <= most else np.sort(draw.choice(p, most, replace=False)) for p in parts]
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])])
    return VirtualClients(x, y, np.concatenate(parts).astype(np.intp), offsets, test, tests, sees)
