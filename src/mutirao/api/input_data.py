"""Data as they are handed over: read once, labels numbered for all, and known by a digest."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mutirao.config import nearest, one_line
from mutirao.errors import ConfigError
from mutirao.partitioning.flwr_partitioners import partition_by
from mutirao.randomness import rng
from mutirao.training.adapters import is_frame, is_table
from mutirao.training.class_labels import label_array, number_classes, renumber
from mutirao.training.inputs import tensors_in
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import ClientData, Samples

LOOKED_AT = 16  # samples of a set that is read when batches need it, by which it is known
RIGHT = "give a pair (x, y), a Dataset, a frame, a table, a dict of columns with target=, or a dict of clients"
Held = tuple[Samples, Samples | None]  # to train on, and to test by, if a client has any


@dataclass(frozen=True, eq=False)
class Given:
    """What clients hold, by name, or one set without a name that is dealt to them; and what all are judged by."""

    sets: Mapping[str, Held]
    test: Samples | None
    classes: tuple[str, ...]  # by number; none if labels are no classes
    told: str  # what it is known by: kind, sizes and digest

    @property
    def whole(self) -> Samples | None:
        """The one set that is to be dealt; None if it is known already who holds what."""
        return self.sets[""][0] if "" in self.sets else None

    @property
    def counts(self) -> bool:
        """Whether labels are whole numbers, and so classes."""
        return not next(iter(self.sets.values()))[0].y.is_floating_point()


def read_given(data: Any, target: str | None, client: str | None, test: Any, dealer: Any = None) -> Given:
    """Read what a user hands over; ConfigError, in one line, for what cannot be trained on.

    A `dealer`, a partitioner of flwr-datasets, deals one set to clients here and now: then the data come dealt.
    """
    try:
        kind, sets, common, classes = read_sets(data, target or "y", client, test)
    except ConfigError:
        raise
    except Exception as error:  # a user's Dataset may raise anything
        raise ConfigError(f"data: {one_line(error)}") from error
    if dealer is not None:
        sets = dealt_by(dealer, sets)
    for name, (train, _) in sets.items():
        if not len(train):
            raise ConfigError(f"data: {f'client {name!r}' if name else kind} holds no samples")
    told = f"{kind}, {sum(len(train) for train, _ in sets.values())} samples, {digest_of(sets, common)}"
    return Given(sets, common, classes, told)


def read_sets(
    data: Any, target: str, client: str | None, test: Any
) -> tuple[str, dict[str, Held], Samples | None, tuple[str, ...]]:
    """The kind of what was given, the sets of the clients, the common test set, and the names of the classes."""
    kind, whose = type(data).__name__, None
    held: dict[str, tuple[Any, Any]] = {"": (data, None)}
    if client is not None:
        rest, whose = part_from(data, client)
        held = {"": (rest, None)}
        test = {k: v for k, v in columns_of(test).items() if k != client} or test
    elif isinstance(data, Mapping) and target not in data and not any(map(is_column, data.values())):
        kind, held = f"dict of {len(data)} clients", {str(name): as_pair(one) for name, one in data.items()}
        check_names(held, len(data))
    given = [one for pair in held.values() for one in pair] + [test]
    known, classes = read_labelled([one for one in given if one is not None], target)
    found = iter(known)
    sets = {name: (next(found), None if own is None else next(found)) for name, (_, own) in held.items()}
    common = None if test is None else next(found)
    if whose is not None:
        train, names = sets[""][0], np.unique(whose)
        sets = {str(n): (Samples(train.x, train.y, np.flatnonzero(whose == n)), None) for n in names.tolist()}
        check_names(sets, len(names))
    return kind, sets, common, classes


def dealt_by(dealer: Any, sets: Mapping[str, Held]) -> dict[str, Held]:
    """One set as a partitioner deals it."""
    if "" not in sets:
        raise ConfigError(f"partition: the data come dealt to {len(sets)} clients; leave it out")
    whole = sets[""][0]
    if whole.y.is_floating_point() or whole.y.dim() != 1:
        raise ConfigError(f"partition={type(dealer).__name__}: it parts by classes, and these labels are none")
    parts = partition_by(dealer, own_labels(whole), rng(0, 0, "partition"))
    rows = np.arange(len(whole.y)) if whole.index is None else whole.index
    width = len(str(len(parts) - 1))
    return {f"c{i:0{width}d}": (Samples(whole.x, whole.y, rows[part]), None) for i, part in enumerate(parts)}


def read_labelled(given: Sequence[Any], target: str) -> tuple[list[Samples], tuple[str, ...]]:
    """Sets as samples, and the names of the classes, numbered in sorted order over all sets at once."""
    told = [labels_of(data, target) for data in given]
    texts = [np.asarray(y) for y in told if y is not None and label_array(y).dtype.kind in "US"]
    if texts:
        if len(texts) < len(given):
            raise ValueError("some labels are text and some are numbers; make them one or the other")
        numbers, names = number_classes(*texts)
        pairs = zip(given, texts, strict=True)
        return [Samples.of(with_labels(data, target, renumber(y, numbers)), target) for data, y in pairs], names
    sets = [Samples.of(data, target) for data in given]
    if any(s.y.is_floating_point() or s.y.dim() != 1 for s in sets):
        return sets, ()
    numbers, names = number_classes(*(own_labels(s) for s in sets))
    if any(value != number for value, number in numbers.items()):
        sets = [renumbered(s, numbers) for s in sets]
    return sets, names


def labels_of(data: Any, target: str) -> Any:
    """The labels as they are written; None where they are known only when samples are read."""
    if isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data[1], Tensor):
        return data[1]
    columns = columns_of(data, [target])
    return columns.get(target)


def with_labels(data: Any, target: str, y: Any) -> Any:
    """The same set with other labels."""
    return (data[0], y) if isinstance(data, tuple | list) else {**columns_of(data), target: y}


def own_labels(samples: Samples) -> Any:
    """The labels of these samples alone, of a storage that may hold others."""
    return samples.y.numpy() if samples.index is None else samples.y.numpy()[samples.index]


def renumbered(samples: Samples, numbers: Mapping[Any, int]) -> Samples:
    """The samples by other numbers of their classes."""
    y = samples.y.clone()
    y[slice(None) if samples.index is None else samples.index] = torch.from_numpy(
        renumber(own_labels(samples), dict(numbers))
    )
    return Samples(samples.x, y, samples.index)


def as_pair(held: Any) -> tuple[Any, Any]:
    """What a client trains on and tests by: ClientData, a pair (train, test) of sets, or one set."""
    if isinstance(held, ClientData):
        return held.train, held.test
    if isinstance(held, tuple) and len(held) == 2 and all(is_set(part) for part in held):
        return held
    return held, None


def is_set(data: Any) -> bool:
    """Whether it is a set by itself, and not the inputs or the labels of one."""
    known = isinstance(data, Samples | ClientData | Dataset | DataLoader)
    return known or isinstance(data, tuple) or is_frame(data) or hasattr(data, "column_names")


def is_column(values: Any) -> bool:
    """Whether it is one column, and no set."""
    return isinstance(values, np.ndarray | Tensor) or (hasattr(values, "to_numpy") and not is_frame(values))


def check_names(named: Iterable[str], count: int) -> None:
    """Clients are called by text that can be printed, each its own."""
    names = list(named)
    if not names:
        raise ConfigError(f"data: an empty dict; {RIGHT}")
    if len(names) < count:
        raise ConfigError("data: the names of two clients are the same, written as text")
    for name in names:
        if not name.strip() or not name.isprintable():
            raise ConfigError(f"data: {name!r} is no name for a client; it must be text that can be printed")


def columns_of(data: Any, only: Sequence[str] = ()) -> dict[str, Any]:
    """The columns of a dict, a frame, a table or a Hugging Face Dataset by name, or some; nothing if it has none."""
    named = isinstance(data, Mapping)
    names = data if named else data.columns if is_frame(data) else getattr(data, "column_names", None) or ()
    read = data.column if is_table(data) else data.__getitem__ if len(names) else None
    return {str(name): read(name) for name in names if not only or str(name) in only} if read else {}


def part_from(data: Any, client: str) -> tuple[dict[str, Any], Any]:
    """The columns without the one that says whose each row is, and that one."""
    columns = columns_of(data)
    if not columns:
        right = "give a frame, a table or a dict of columns, or a dict of clients without client="
        raise ConfigError(f"client={client!r}: a {type(data).__name__} has no columns; {right}")
    if client not in columns:
        raise ConfigError(f"client={client!r}: there is no such column{nearest(client, columns)}")
    whose = label_array(columns.pop(client))
    return columns, whose


def digest_of(sets: Mapping[str, Held], test: Samples | None) -> str:
    """What the content is known by: of sets that are not in memory, the labels and a few samples."""
    sha, seen = hashlib.sha256(), dict[int, int]()
    for name, held in [*sets.items(), ("\x1f", (test, None))]:
        sha.update(f"{name}\x1e".encode())
        for samples in (one for one in held if one is not None):
            for stored in (*([samples.x] if isinstance(samples.x, LazyInputs) else tensors_in(samples.x)), samples.y):
                if id(stored) not in seen:  # a storage that clients share is read once
                    for tensor in tensors_in(look_at(stored)) if isinstance(stored, LazyInputs) else [stored]:
                        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}\x1e".encode())
                        sha.update(np.ascontiguousarray(tensor.numpy()).data)
                sha.update(f"{seen.setdefault(id(stored), len(seen))}\x1e".encode())
            if samples.index is not None:
                sha.update(np.ascontiguousarray(samples.index, np.int64).data)
    return sha.hexdigest()[:32]


def look_at(x: LazyInputs) -> Any:
    """A few samples, from the first to the last."""
    return x.fetch(np.unique(np.linspace(0, len(x) - 1, LOOKED_AT).astype(np.intp)))
