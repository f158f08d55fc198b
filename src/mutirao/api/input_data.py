"""The `model` and `data` arguments of `mutirao.run`.

A model is a torch module with its initial weights, or a factory of one. Data are read once, with one numbering of the
classes for all clients, and a digest.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from mutirao.config import nearest, one_line
from mutirao.core.arrays import digest, fingerprint
from mutirao.errors import ConfigError
from mutirao.partitioning.flwr_partitioners import partition_by
from mutirao.randomness import rng
from mutirao.training.adapters import is_frame, is_table, label_array, number_classes, renumber
from mutirao.training.inputs import tensors_in
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.optimizers import arrays_of, seeded
from mutirao.training.samples import ClientData, Samples

EXPECTED_MODEL = "give an nn.Module, or a class or function without arguments that makes one"


@dataclass(frozen=True)
class Model:
    """A factory of modules: copies of the one that was passed, or the class or function itself, seeded by the run."""

    make: Callable[[], nn.Module]
    summary: str  # its class, and a digest of its initial arrays and of its repr

    @classmethod
    def of(cls, given: Any) -> "Model":
        """Read the `model` argument; raises ConfigError if it is no module and makes none."""
        if isinstance(given, nn.Module):
            kept = copied(given)
            return cls(lambda: copy.deepcopy(kept), f"{summarise(kept)}, its own weights")
        if isinstance(given, str) or not callable(given):
            raise ConfigError(f"model: expected nn.Module, got {type(given).__name__}; {EXPECTED_MODEL}")
        try:
            with seeded(0):
                made = given()
        # A user's code may raise anything.
        except Exception as error:
            name = getattr(given, "__name__", type(given).__name__)
            raise ConfigError(f"model: {name}() failed: {one_line(error)}; {EXPECTED_MODEL}") from error
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"model: expected a factory of nn.Module, but it returned {type(made).__name__}; {EXPECTED_MODEL}"
            )
        return cls(given, f"{summarise(made)}, from the seed")


def copied(module: nn.Module) -> nn.Module:
    """A deep copy on the CPU, so that training never changes the user's module."""
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:
        # A module may have attributes of any kind, and some cannot be copied.
        raise ConfigError(
            f"model: the module cannot be copied ({one_line(error)}); pass a function that makes it"
        ) from error


def summarise(module: nn.Module) -> str:
    """The class and digest of a module; raises ConfigError if its parameters have no shape yet."""
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError("model: lazy layers have no shape yet; call the module on one batch first")
    return f"{type(module).__name__} {fingerprint([digest(arrays_of(module)), str(module)])[:32]}"


# Of a data set that is read only when batches need it, so many samples go into its digest.
LOOKED_AT = 16
EXPECTED_DATA = "give a pair (x, y), a Dataset, a frame, a table, a dict of columns with target=, or a dict of clients"
TrainAndTest = tuple[Samples, Samples | None]


@dataclass(frozen=True, eq=False)
class Given:
    """Data by client, or one data set under the name "" that is still to be partitioned, and the common test set."""

    sets: Mapping[str, TrainAndTest]
    test: Samples | None
    classes: tuple[str, ...]  # by class index; empty for regression targets
    summary: str  # kind, sizes and digest

    @property
    def whole(self) -> Samples | None:
        """The one data set that is to be partitioned; None if clients are named already."""
        if "" in self.sets:
            return self.sets[""][0]
        return None

    @property
    def counts(self) -> bool:
        """Whether labels are integers, which are taken for classes."""
        return not next(iter(self.sets.values()))[0].y.is_floating_point()


def read_given(data: Any, target: str | None, client: str | None, test: Any, partitioner: Any = None) -> Given:
    """Read the user's data; raises ConfigError, in one line, for what cannot be trained on.

    A `partitioner` of flwr-datasets splits one data set at once.
    """
    try:
        kind, sets, common, classes = read_sets(data, target or "y", client, test)
    except ConfigError:
        raise
    except Exception as error:
        # A user's Dataset may raise anything.
        raise ConfigError(f"data: {one_line(error)}") from error
    if partitioner is not None:
        sets = split_by(partitioner, sets)
    for name, (train, _) in sets.items():
        if not len(train):
            raise ConfigError(f"data: {f'client {name!r}' if name else kind} has no samples")
    summary = f"{kind}, {sum(len(train) for train, _ in sets.values())} samples, {digest_of(sets, common)}"
    return Given(sets, common, classes, summary)


def read_sets(
    data: Any, target: str, client: str | None, test: Any
) -> tuple[str, dict[str, TrainAndTest], Samples | None, tuple[str, ...]]:
    """The kind of the data, the clients' data sets, the common test set, and the class names."""
    kind = type(data).__name__
    owners = None
    client_data: dict[str, tuple[Any, Any]] = {"": (data, None)}
    if client is not None:
        rest, owners = split_off_column(data, client)
        client_data = {"": (rest, None)}
        test = {k: v for k, v in columns_of(test).items() if k != client} or test
    elif isinstance(data, Mapping) and target not in data and not any(map(is_column, data.values())):
        kind = f"dict of {len(data)} clients"
        client_data = {str(name): as_pair(one) for name, one in data.items()}
        check_names(client_data, len(data))
    given = [one for pair in client_data.values() for one in pair] + [test]
    known, classes = read_labelled([one for one in given if one is not None], target)
    # In the order of `given`: each client's training set and its own test set, if any; the common test set last.
    found = iter(known)
    sets = {name: (next(found), None if own is None else next(found)) for name, (_, own) in client_data.items()}
    common = None if test is None else next(found)
    if owners is not None:
        train = sets[""][0]
        names = np.unique(owners)
        sets = {str(n): (Samples(train.x, train.y, np.flatnonzero(owners == n)), None) for n in names.tolist()}
        check_names(sets, len(names))
    return kind, sets, common, classes


def split_by(partitioner: Any, sets: Mapping[str, TrainAndTest]) -> dict[str, TrainAndTest]:
    """One data set, split by a partitioner of flwr-datasets."""
    if "" not in sets:
        raise ConfigError(f"partition: the data are already assigned to {len(sets)} clients; leave it out")
    whole = sets[""][0]
    if whole.y.is_floating_point() or whole.y.dim() != 1:
        raise ConfigError(
            f"partition={type(partitioner).__name__}: this partitioner splits by class, but the labels are not classes"
        )
    parts = partition_by(partitioner, own_labels(whole), rng(0, 0, "partition"))
    rows = np.arange(len(whole.y)) if whole.index is None else whole.index
    width = len(str(len(parts) - 1))
    return {f"c{i:0{width}d}": (Samples(whole.x, whole.y, rows[part]), None) for i, part in enumerate(parts)}


def read_labelled(given: Sequence[Any], target: str) -> tuple[list[Samples], tuple[str, ...]]:
    """Sets as samples, and the names of the classes, numbered in sorted order over all sets at once."""
    labels = [labels_of(data, target) for data in given]
    texts = [np.asarray(y) for y in labels if y is not None and label_array(y).dtype.kind in "US"]
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
    if isinstance(data, tuple | list):
        return (data[0], y)
    return {**columns_of(data), target: y}


def own_labels(samples: Samples) -> Any:
    """The labels of these samples alone, of a storage that may hold others."""
    if samples.index is None:
        return samples.y.numpy()
    return samples.y.numpy()[samples.index]


def renumbered(samples: Samples, numbers: Mapping[Any, int]) -> Samples:
    """The samples by other numbers of their classes."""
    y = samples.y.clone()
    y[slice(None) if samples.index is None else samples.index] = torch.from_numpy(
        renumber(own_labels(samples), dict(numbers))
    )
    return Samples(samples.x, y, samples.index)


def as_pair(data: Any) -> tuple[Any, Any]:
    """A client's training and test data, from ClientData, a pair (train, test) of data sets, or one data set."""
    if isinstance(data, ClientData):
        return data.train, data.test
    if isinstance(data, tuple) and len(data) == 2 and all(is_set(part) for part in data):
        return data
    return data, None


def is_set(data: Any) -> bool:
    """Whether it is a whole data set, and not only its inputs or labels."""
    known = isinstance(data, Samples | ClientData | Dataset | DataLoader)
    return known or isinstance(data, tuple) or is_frame(data) or hasattr(data, "column_names")


def is_column(values: Any) -> bool:
    """Whether it is one column of a data set."""
    return isinstance(values, np.ndarray | Tensor) or (hasattr(values, "to_numpy") and not is_frame(values))


def check_names(named: Iterable[str], count: int) -> None:
    """Refuse names of clients that cannot be printed, or that are the same as text."""
    names = list(named)
    if not names:
        raise ConfigError(f"data: an empty dict; {EXPECTED_DATA}")
    if len(names) < count:
        raise ConfigError("data: the names of two clients are the same, written as text")
    for name in names:
        if not name.strip() or not name.isprintable():
            raise ConfigError(f"data: {name!r} cannot be the name of a client; use printable text")


def columns_of(data: Any, only: Sequence[str] = ()) -> dict[str, Any]:
    """The columns of a dict, a frame, a table or a Hugging Face Dataset by name, or some; nothing if it has none."""
    names: Any
    if isinstance(data, Mapping):
        names = data
    elif is_frame(data):
        names = data.columns
    else:
        names = getattr(data, "column_names", None) or ()
    if is_table(data):
        read = data.column
    elif len(names):
        read = data.__getitem__
    else:
        return {}
    return {str(name): read(name) for name in names if not only or str(name) in only}


def split_off_column(data: Any, client: str) -> tuple[dict[str, Any], Any]:
    """The columns without the one that names each row's client, and that column."""
    columns = columns_of(data)
    if not columns:
        right = "give a frame, a table or a dict of columns, or a dict of clients without client="
        raise ConfigError(f"client={client!r}: a {type(data).__name__} has no columns; {right}")
    if client not in columns:
        raise ConfigError(f"client={client!r}: there is no such column{nearest(client, columns)}")
    owners = label_array(columns.pop(client))
    return columns, owners


def digest_of(sets: Mapping[str, TrainAndTest], test: Samples | None) -> str:
    """The digest of the data; of data that are not in memory, of the labels and a few samples."""
    sha = hashlib.sha256()
    seen: dict[int, int] = {}
    for name, pair in [*sets.items(), ("\x1f", (test, None))]:
        sha.update(f"{name}\x1e".encode())
        for samples in (one for one in pair if one is not None):
            for stored in stored_parts(samples):
                # Storage that clients share is read once, and later named by its number alone.
                if id(stored) not in seen:
                    tensors = [stored]
                    if isinstance(stored, LazyInputs):
                        tensors = tensors_in(look_at(stored))
                    for tensor in tensors:
                        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}\x1e".encode())
                        sha.update(np.ascontiguousarray(tensor.numpy()).data)
                sha.update(f"{seen.setdefault(id(stored), len(seen))}\x1e".encode())
            if samples.index is not None:
                sha.update(np.ascontiguousarray(samples.index, np.int64).data)
    return sha.hexdigest()[:32]


def stored_parts(samples: Samples) -> list[Any]:
    """The tensors of inputs and labels; lazy inputs are one part."""
    if isinstance(samples.x, LazyInputs):
        return [samples.x, samples.y]
    return [*tensors_in(samples.x), samples.y]


def look_at(x: LazyInputs) -> Any:
    """A few samples, from the first to the last."""
    return x.fetch(np.unique(np.linspace(0, len(x) - 1, LOOKED_AT).astype(np.intp)))
