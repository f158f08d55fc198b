"""Read inputs and labels from what users have: arrays, Datasets, DataLoaders, columns, frames and Arrow tables.

Class labels are numbered from 0 for all clients at once; clients that numbered their own would disagree.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from mutirao.training.inputs import (
    Inputs,
    as_input_tensor,
    as_inputs,
    as_labels,
    as_tensor,
    check_shapes,
    map_tensors,
    tensors_in,
)
from mutirao.training.lazy_samples import LazyInputs

Pair = tuple[Inputs | LazyInputs, Tensor]
LIMIT = 1 << 30  # bytes of a Dataset that are held in memory
LAZY_DIVISOR = 2  # of a larger one, one part in so many: a round needs memory, too
CACHE_ATTRIBUTE = "_mutirao"  # the attribute of a Dataset where it is noted what was read of it
SUPPORTED = "give a pair (x, y), a Dataset with a length, a dict of columns, a frame or a table"


def read_data(data: Any, target: str, limit: int) -> Pair:
    """Inputs and labels of any supported kind of data; ValueError with one line for any other kind."""
    if isinstance(data, DataLoader):
        data = dataset_of(data)
    if isinstance(data, IterableDataset):
        raise ValueError(
            f"{describe_type(data)} has no length, so batches cannot be sampled from it; give a map-style Dataset"
        )
    if isinstance(data, TensorDataset):
        return split_item(data.tensors, target)
    if is_table(data):
        return join_columns({str(c): data.column(c) for c in data.column_names}, target)
    if is_frame(data):
        return join_columns({str(c): data[c] for c in data.columns}, target)
    if isinstance(data, Mapping):
        return join_columns(dict(data), target)
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise ValueError(f"a {type(data).__name__} of {len(data)} is not a pair (x, y); {SUPPORTED}")
        x, y = data
        if is_frame(x):
            x = stack_columns({str(c): x[c] for c in x.columns})
        return x, y
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not isinstance(data, str | np.ndarray | Tensor)):
        return read_cached(data, target, limit)
    raise ValueError(f"{describe_type(data)} cannot be trained on; {SUPPORTED}")


def describe_type(data: Any) -> str:
    """The type of a value, as an error names it."""
    return f"a {type(data).__name__}"


def is_frame(data: Any) -> bool:
    """Whether it is a frame of pandas or polars."""
    return hasattr(data, "columns") and hasattr(data, "to_numpy")


def is_table(data: Any) -> bool:
    """Whether it is a table of Arrow."""
    return hasattr(data, "column_names") and hasattr(data, "column")


def dataset_of(loader: "DataLoader[Any]") -> Any:
    """The Dataset behind a DataLoader, restricted to the samples of its sampler; batches are made anew."""
    # SubsetRandomSampler has indices: a common way to split a set.
    rows = getattr(loader.sampler, "indices", None)
    if rows is None:
        return loader.dataset
    return Subset(loader.dataset, [int(i) for i in rows])


def join_columns(columns: Mapping[str, Any], target: str) -> Pair:
    """Inputs and labels from named columns."""
    if target not in columns:
        raise ValueError(f"there is no column {target!r} to learn; set target= to one of: {', '.join(columns)}")
    for name, column in columns.items():
        if isinstance(column, Dataset | Mapping) or is_frame(column) or hasattr(column, "column_names"):
            raise ValueError(f"{name!r} holds {describe_type(column)}, not a column; give data[{name!r}]")
    y = as_labels(columns[target], f"column {target!r}")
    return stack_columns({name: column for name, column in columns.items() if name != target}), y


def stack_columns(columns: Mapping[str, Any]) -> Inputs:
    """Columns of one number a row as one matrix, in their order; a dict of tensors if a column has more."""
    if not columns:
        raise ValueError("there is no input column besides the target")
    tensors = {str(name): as_tensor(column, f"column {str(name)!r}") for name, column in columns.items()}
    lengths = {name: len(t) for name, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {', '.join(f'{n} {k}' for n, k in lengths.items())}")
    return join_tensors(tensors, rows=1)


def join_tensors(tensors: dict[str, Tensor], rows: int) -> Inputs:
    """Named tensors as inputs: numbers as one float32 vector a row, a single array by itself, otherwise a dict."""
    if all(t.dim() == rows for t in tensors.values()):
        return torch.stack([t.to(torch.float32) for t in tensors.values()], rows)
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    return tensors


def split_item(item: Any, target: str) -> Pair:
    """Inputs and label of one sample, or of all of them at once: (x, y), (x, z, y), or a dict with the target."""
    if isinstance(item, Mapping):
        if target not in item:
            raise ValueError(f"a sample has no {target!r} to learn; set target= to one of: {', '.join(item)}")
        rest = {str(k): as_input_tensor(v, f"{k!r} of a sample") for k, v in item.items() if k != target}
        if not rest:
            raise ValueError(f"a sample has no inputs besides {target!r}")
        return join_tensors(rest, rows=0), as_labels(item[target], repr(target))
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise ValueError(f"a sample is {describe_type(item)}, not (x, y) or a dict with the target")
    *x, y = item
    if len(x) == 1:
        return as_inputs(x[0]), as_labels(y)
    return as_inputs(tuple(x)), as_labels(y)


class ReadCache(dict[tuple[str, int], Pair]):
    """What was read from a Dataset, stored on the Dataset while it is unchanged; a copy of it starts empty."""

    def __init__(self, mark: Any = None) -> None:
        super().__init__()
        self.mark = mark

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ReadCache, ()


def read_cached(data: Any, target: str, limit: int) -> Pair:
    """The result of `read_items`, read only once: clients need their data every round, and reading may be slow."""
    own = getattr(data, "__dict__", {})
    # A shallow copy of the Dataset has the same cache, hence its id. An attribute that was replaced, such as a
    # transform, makes the cache stale; a change inside an attribute cannot be seen.
    mark = id(data), dataset_length(data), [(name, id(value)) for name, value in own.items() if name != CACHE_ATTRIBUTE]
    notes = own.get(CACHE_ATTRIBUTE)
    if not isinstance(notes, ReadCache) or notes.mark != mark:
        notes = own[CACHE_ATTRIBUTE] = ReadCache(mark)
    if (target, limit) not in notes:
        notes[target, limit] = read_items(data, target, limit)
    return notes[target, limit]


def dataset_length(data: Any) -> int:
    """The length of a Dataset; ValueError if it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        raise ValueError(f"{describe_type(data)} has no length; give it __len__ and __getitem__") from None


def read_items(data: Any, target: str, limit: int) -> Pair:
    """All samples of a map-style Dataset, stacked if they fit into `limit` bytes, otherwise read when needed."""
    if not (count := dataset_length(data)):
        raise ValueError(f"{describe_type(data)} is empty")
    x, y = split_item(data[0], target)
    if hasattr(data, "column_names") and isinstance(data[0], Mapping) and size_of(x) * count <= limit:
        # Hugging Face's Datasets give all columns at once.
        return join_columns(data[:], target)
    example = map_tensors(x, lambda t: t[None].clone())
    whole = size_of(x) * count <= limit
    kept = limit
    if not whole:
        kept = limit // LAZY_DIVISOR
    lazy = LazyInputs(lambda i: split_item(data[i], target)[0], count, example, kept)
    # A Dataset that is read lazily may know its labels without reading its samples.
    if not whole and (labels := stored_labels(data, target, y)) is not None:
        return lazy, labels
    labels = y.new_empty((count, *y.shape))
    for i in range(count):
        found, label = split_item(data[i], target)
        check_shapes((y, label), "labels")
        labels[i] = label
        lazy.keep(i, found)
    if whole:
        return lazy.whole(), labels
    return lazy, labels


def size_of(x: Inputs | LazyInputs) -> int:
    """The size of inputs in bytes."""
    return sum(t.nbytes for t in tensors_in(x))


def stored_labels(data: Any, target: str, first: Tensor) -> Tensor | None:
    """The labels that a Dataset stores itself, as a column or as `targets`, if its samples agree with them."""
    stored = data[target][:] if hasattr(data, "column_names") else getattr(data, "targets", None)
    # `target_transform` changes a label when its sample is read: the stored labels are those before it.
    if stored is None or getattr(data, "target_transform", None) is not None:
        return None
    y = as_labels(stored)
    # Only the ends are compared: to read every sample for its label is what this saves.
    last = split_item(data[len(data) - 1], target)[1]
    if len(y) == len(data) and torch.equal(y[0], first) and torch.equal(y[-1], last):
        return y
    return None


log = logging.getLogger("mutirao")

FEW = 6  # names shown in a line


def number_classes(*labels: Any) -> tuple[dict[Any, int], tuple[str, ...]]:
    """The number of each class in the labels of all clients, in sorted order, and the classes' names by number.

    >>> number_classes(["no", "yes"], ["no"])
    ({'no': 0, 'yes': 1}, ('no', 'yes'))
    """
    found: set[Any] = set()
    for some in labels:
        found.update(np.unique(label_array(some)).tolist())
    if not found:
        raise ValueError("there are no labels to number")
    if len({isinstance(v, str) for v in found}) > 1:
        raise ValueError("labels are text and numbers at once; make them one or the other")
    classes = sorted(found)
    names = tuple(f"{c:g}" if isinstance(c, float) else str(c) for c in classes)
    if any(not isinstance(c, int) or isinstance(c, bool) or c != i for i, c in enumerate(classes)):
        shown = ", ".join(f"{name} is {i}" for i, name in enumerate(names[:FEW]))
        log.warning("labels are numbered in sorted order: %s%s", shown, ", ..." if len(names) > FEW else "")
    return {c: i for i, c in enumerate(classes)}, names


def renumber(labels: Any, numbers: dict[Any, int]) -> npt.NDArray[np.int64]:
    """Labels by the numbers that `number_classes` gave; ValueError for an unknown label.

    >>> numbers, names = number_classes(["sick", "well"], ["well"])
    >>> renumber(["well", "sick"], numbers)
    array([1, 0])
    """
    values = label_array(labels)
    known, place = np.unique(values, return_inverse=True)
    for value in known.tolist():
        if value not in numbers:
            raise ValueError(f"label {value!r} is none of the classes {', '.join(map(str, list(numbers)[:FEW]))}")
    return np.array([numbers[v] for v in known.tolist()], np.int64)[place].reshape(values.shape)


def label_array(labels: Any) -> npt.NDArray[Any]:
    """Labels of any kind as an array; ValueError if some are missing."""
    if hasattr(labels, "to_numpy"):
        labels = labels.to_numpy()
    kind: type | None = None
    if isinstance(labels, list | tuple):
        # As objects: NumPy makes text of [1, "a"], so that the mix would go unnoticed.
        kind = object
    values: npt.NDArray[Any] = np.asarray(labels, kind)
    lost: list[int] = []
    if values.dtype.kind == "O":
        flat = values.ravel().tolist()
        lost = [i for i, v in enumerate(flat) if not isinstance(v, str | bool | int | float) or v != v]
        if not lost and not has_mixed_types(flat):
            values = np.array(flat)
    elif values.dtype.kind == "f":
        lost = np.flatnonzero(np.isnan(values)).tolist()
    if lost:
        raise ValueError(f"label {lost[0]} is missing, or neither text nor a number")
    if values.dtype.kind == "O":
        raise ValueError("labels are text and numbers at once; make them one or the other")
    return values


def has_mixed_types(values: list[Any]) -> bool:
    """Whether values contain both text and numbers."""
    return len({isinstance(v, str) for v in values}) > 1
