"""Number class labels from 0 for all clients at once; clients that numbered their own would disagree."""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

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
    labels = labels.to_numpy() if hasattr(labels, "to_numpy") else labels
    values = np.array(labels, object) if isinstance(labels, list | tuple) else np.asarray(labels)
    if values.dtype.kind == "O":
        flat = values.ravel().tolist()
        lost = [i for i, v in enumerate(flat) if not isinstance(v, str | bool | int | float) or v != v]
        values = np.array(flat) if not lost and not has_mixed_types(flat) else values
    else:
        lost = np.flatnonzero(np.isnan(values)).tolist() if values.dtype.kind == "f" else []
    if lost:
        raise ValueError(f"label {lost[0]} is missing, or neither text nor a number")
    if values.dtype.kind == "O":
        raise ValueError("labels are text and numbers at once; make them one or the other")
    return values


def has_mixed_types(values: list[Any]) -> bool:
    """Whether values contain both text and numbers."""
    return len({isinstance(v, str) for v in values}) > 1
