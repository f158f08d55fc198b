"""What clients agree on before the first round: columns and their kinds, categories, scales, and what is predicted."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.errors import Refused
from mutirao.systems.tabular.table import Column, Kind, Table, is_name

Task = Literal["classification", "regression"]

SCHEMA = "schema"
MOST_CLASSES = 1000
MOST_CATEGORIES = 10_000  # of one column, over all clients
MOST_INPUTS = 100_000  # of a model
LARGEST = 1e150  # its square is still a number
MOST_BYTES = 16 * 2**20  # of a profile or a schema
KINDS = ("number", "date", "category", "empty")


@dataclass(frozen=True)
class Feature:
    """A column as the model sees it: a number on one scale, or a category as zeros and a one; and whether it is there.

    A category that is not in the list is all zeros; a missing number stands at the mean.
    """

    name: str
    kind: Kind
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] = ()
    missing: bool = False  # whether anybody misses values: then one more input says where

    @property
    def width(self) -> int:
        """How many inputs of the model it is."""
        return (len(self.categories) if self.kind == "category" else 1) + self.missing

    def encode(self, column: Column) -> npt.NDArray[np.float32]:
        """The inputs of these rows."""
        out = np.zeros((len(column.values), self.width), np.float32)
        gone = column.missing
        if self.kind == "category":
            place = {name: k for k, name in enumerate(self.categories)}
            names = column.labels() if column.kind != "empty" else [""] * len(out)
            at = np.array([place.get(name, -1) for name in names], np.intp)
            out[np.flatnonzero(at >= 0), at[at >= 0]] = 1.0
        elif column.kind != "empty":
            with np.errstate(over="ignore"):  # who looks at all columns finds it
                out[:, 0] = np.where(gone, 0.0, (column.numbers - self.mean) / self.std)
        if self.missing:
            out[:, -1] = gone
        return out


@dataclass(frozen=True)
class Schema:
    """The columns of every client in the order of their names, and what is predicted."""

    target: str
    task: Task
    features: tuple[Feature, ...]
    unused: tuple[tuple[str, Kind], ...] = ()  # columns that all have and that tell nothing
    classes: tuple[str, ...] = ()
    mean: float = 0.0  # of the target, where it is a number
    std: float = 1.0

    @property
    def inputs(self) -> int:
        """How many numbers the model takes."""
        return sum(feature.width for feature in self.features)

    @property
    def outputs(self) -> int:
        """How many numbers the model gives."""
        return len(self.classes) if self.task == "classification" else 1

    def content(self) -> bytes:
        """The schema as it travels: JSON, the same bytes for the same schema."""
        table = {
            "target": self.target,
            "task": self.task,
            "features": [vars(f) | {"categories": list(f.categories)} for f in self.features],
            "unused": dict(self.unused),
            "classes": list(self.classes),
            "mean": self.mean,
            "std": self.std,
        }
        return json.dumps(table, sort_keys=True, ensure_ascii=False, indent=1).encode()

    def hold(self, columns: Mapping[str, Column]) -> None:
        """Refused, with the names, if these are other columns, or of other kinds."""
        agreed = {f.name: f.kind for f in self.features} | dict(self.unused)
        faults = differences(agreed, {name: column.kind for name, column in columns.items()})
        if faults:
            raise Refused("agreed.schema", faults)

    def encode(self, table: Table, target: Column) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any], int]:
        """Inputs and labels of the rows whose target is known, and of how many it is not."""
        self.hold(table.columns)
        if self.task == "classification":
            place = {name: k for k, name in enumerate(self.classes)}
            labels = np.array([place.get(name, -1) for name in target.labels()], np.int64)
            known = labels >= 0
            y: npt.NDArray[Any] = labels[known]
        else:
            if target.kind == "category":
                raise Refused("agreed.schema", f"target {self.target!r} is text here, and a number is agreed on")
            known = ~target.missing
            with np.errstate(over="ignore"):
                y = ((target.numbers[known] - self.mean) / self.std).astype(np.float32)[:, None]
        x = np.concatenate([f.encode(table.columns[f.name]) for f in self.features], axis=1)
        if not np.isfinite(x).all() or not np.isfinite(y).all():
            raise Refused("agreed.schema", "numbers of this site are beyond all measure on the scale agreed on")
        return x[known], y, int((~known).sum())


def differences(agreed: Mapping[str, str], here: Mapping[str, str]) -> str:
    """How the columns of a client differ from those agreed on, in words; empty if they do not."""
    lacking, extra = sorted(agreed.keys() - here.keys()), sorted(here.keys() - agreed.keys())
    other = [n for n in sorted(agreed.keys() & here.keys()) if len({agreed[n], here[n]} - {"empty"}) > 1]
    said = [f"missing: {shown(lacking)}"] if lacking else []
    said += [f"too many: {shown(extra)}"] if extra else []
    said += [f"{shown([n])} is of the kind {here[n]} here, and {agreed[n]} is agreed on" for n in other[:3]]
    return f"the columns of this site are others: {'; '.join(said)}" if said else ""


def shown(names: Sequence[str]) -> str:
    """A few of these names."""
    return ", ".join(repr(name[:40]) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@lru_cache(maxsize=8)
def read_schema(content: bytes) -> Schema:
    """The schema in these bytes, which may come from anywhere; ValueError says what is wrong."""
    if len(content) > MOST_BYTES:
        raise ValueError("the schema is too large")
    try:
        table = json.loads(content)
        features = tuple(
            Feature(
                text(f["name"]),
                one_of(f["kind"], KINDS),
                number(f["mean"]),
                positive(f["std"]),
                texts(f["categories"]),
                f["missing"] is True,
            )
            for f in table["features"]
        )
        unused = tuple((text(name), one_of(kind, KINDS)) for name, kind in sorted(table["unused"].items()))
        task: Task = one_of(table["task"], ("classification", "regression"))
        mean, std = number(table["mean"]), positive(table["std"])
        schema = Schema(text(table["target"]), task, features, unused, texts(table["classes"]), mean, std)
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        why = f" {str(error)[:80]}" if isinstance(error, ValueError | KeyError) else ""
        raise ValueError(f"it is no schema of a table:{why or ' it has another form'}") from error
    names = [*(f.name for f in features), *(name for name, _ in unused)]
    if len(set(names)) < len(names) or schema.target in names or not schema.inputs:
        raise ValueError("it is no schema of a table: its columns are not one each")
    if schema.inputs > MOST_INPUTS:
        raise ValueError(f"it asks for {schema.inputs} inputs of the model, {MOST_INPUTS} are the most")
    if schema.task == "classification" and not 2 <= len(schema.classes) <= MOST_CLASSES:
        raise ValueError(f"it is no schema of a table: {len(schema.classes)} classes")
    return schema


def text(value: Any) -> str:
    """A name as it may stand in a profile or a schema."""
    if not isinstance(value, str) or not is_name(value):
        raise ValueError("a name is no text, or too long")
    return value


def texts(values: Any) -> tuple[str, ...]:
    """A list of names, each once."""
    found = tuple(text(v) for v in values) if isinstance(values, list) else None
    if found is None or len(set(found)) < len(found) or len(found) > MOST_CATEGORIES:
        raise ValueError("a list of names is none, too long, or has one twice")
    return found


def one_of(value: Any, choices: Sequence[str]) -> Any:
    """One of these words."""
    if value not in choices:
        raise ValueError(f"{str(value)[:40]!r} is not one of {', '.join(choices)}")
    return value


def number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError("a number is none, or not finite")
    return float(value)


def positive(value: Any) -> float:
    """A number above 0."""
    if not number(value) > 0:
        raise ValueError("a deviation is not above 0")
    return float(value)
