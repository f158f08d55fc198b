"""The schema that clients agree on: columns with kinds, categories and scales, and the target."""

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
MOST_CATEGORIES = 10_000  # of a column, over all clients
MOST_INPUTS = 100_000  # of a model
LARGEST = 1e150  # its square is still finite
MOST_BYTES = 16 * 2**20  # of a profile or a schema
KINDS = ("number", "date", "category", "empty")


@dataclass(frozen=True)
class Feature:
    """A column as inputs of the model: a standardised number or a one-hot category, and an indicator of missing values.

    An unknown category is all zeros; a missing number is replaced by the mean.
    """

    name: str
    kind: Kind
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] = ()
    missing: bool = False  # whether any client has missing values, which takes an input for the indicator

    @property
    def width(self) -> int:
        """Number of inputs of the model."""
        inputs = 1
        if self.kind == "category":
            inputs = len(self.categories)
        return inputs + self.missing

    def encode(self, column: Column) -> npt.NDArray[np.float32]:
        """Encode a column as inputs."""
        out = np.zeros((len(column.values), self.width), np.float32)
        gone = column.missing
        if self.kind == "category":
            place = {name: k for k, name in enumerate(self.categories)}
            at = np.array([place.get(name, -1) for name in column.labels()], np.intp)
            # A category outside the schema has no input of its own.
            out[np.flatnonzero(at >= 0), at[at >= 0]] = 1.0
        elif column.kind != "empty":
            # Numbers far beyond the scale become infinite, which `Schema.encode` refuses.
            with np.errstate(over="ignore"):
                out[:, 0] = np.where(gone, 0.0, (column.numbers - self.mean) / self.std)
        if self.missing:
            out[:, -1] = gone
        return out


@dataclass(frozen=True)
class Schema:
    """The columns of every client, by name, and the target."""

    target: str
    task: Task
    features: tuple[Feature, ...]
    unused: tuple[tuple[str, Kind], ...] = ()  # columns of all clients that are constant or too sparse
    classes: tuple[str, ...] = ()
    mean: float = 0.0  # of the target, where it is a number
    std: float = 1.0

    @property
    def inputs(self) -> int:
        """Number of inputs of the model."""
        return sum(feature.width for feature in self.features)

    @property
    def outputs(self) -> int:
        """Number of outputs of the model."""
        if self.task == "classification":
            return len(self.classes)
        return 1

    def content(self) -> bytes:
        """The schema as JSON: the same bytes for the same schema."""
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

    def check_columns(self, columns: Mapping[str, Column]) -> None:
        """Refused, with the names, if columns or their kinds differ from the schema."""
        agreed = {f.name: f.kind for f in self.features} | dict(self.unused)
        faults = column_differences(agreed, {name: column.kind for name, column in columns.items()})
        if faults:
            raise Refused("agreed.schema", faults)

    def encode(self, table: Table, target: Column) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any], int]:
        """Inputs and labels of the rows with a target in the schema, and the number of other rows."""
        self.check_columns(table.columns)
        if self.task == "classification":
            place = {name: k for k, name in enumerate(self.classes)}
            labels = np.array([place.get(name, -1) for name in target.labels()], np.int64)
            known = labels >= 0
            y: npt.NDArray[Any] = labels[known]
        else:
            if target.kind == "category":
                raise Refused("agreed.schema", f"target {self.target!r} is text here, but a number is agreed on")
            known = ~target.missing
            with np.errstate(over="ignore"):
                y = ((target.numbers[known] - self.mean) / self.std).astype(np.float32)[:, None]
        x = np.concatenate([f.encode(table.columns[f.name]) for f in self.features], axis=1)
        if not np.isfinite(x).all() or not np.isfinite(y).all():
            raise Refused("agreed.schema", "numbers of this site overflow on the scale agreed on")
        return x[known], y, int((~known).sum())


def column_differences(agreed: Mapping[str, str], here: Mapping[str, str]) -> str:
    """A description of how a client's columns differ from those agreed on; empty if they do not."""
    lacking = sorted(agreed.keys() - here.keys())
    extra = sorted(here.keys() - agreed.keys())
    other = [n for n in sorted(agreed.keys() & here.keys()) if len({agreed[n], here[n]} - {"empty"}) > 1]
    found: list[str] = []
    if lacking:
        found.append(f"missing: {quote_names(lacking)}")
    if extra:
        found.append(f"too many: {quote_names(extra)}")
    for name in other[:3]:
        found.append(f"{quote_names([name])} is of the kind {here[name]} here, but {agreed[name]} is agreed on")
    if found:
        return f"the columns of this site differ: {'; '.join(found)}"
    return ""


def quote_names(names: Sequence[str]) -> str:
    """Up to eight of these names, quoted."""
    text = ", ".join(repr(name[:40]) for name in names[:8])
    if len(names) > 8:
        text += f" and {len(names) - 8} more"
    return text


@lru_cache(maxsize=8)
def parse_schema(content: bytes) -> Schema:
    """Parse a schema from untrusted bytes; ValueError says what is wrong."""
    if len(content) > MOST_BYTES:
        raise ValueError("the schema is too large")
    # The bytes may come from anyone: every field is checked before it is used.
    try:
        table = json.loads(content)
        features = tuple(
            Feature(
                valid_name(f["name"]),
                valid_choice(f["kind"], KINDS),
                finite_number(f["mean"]),
                positive_number(f["std"]),
                valid_names(f["categories"]),
                f["missing"] is True,
            )
            for f in table["features"]
        )
        unused = tuple((valid_name(name), valid_choice(kind, KINDS)) for name, kind in sorted(table["unused"].items()))
        task: Task = valid_choice(table["task"], ("classification", "regression"))
        mean = finite_number(table["mean"])
        std = positive_number(table["std"])
        schema = Schema(valid_name(table["target"]), task, features, unused, valid_names(table["classes"]), mean, std)
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        why = "a field is missing or has the wrong type"
        if isinstance(error, ValueError | KeyError):
            why = str(error)[:80]
        raise ValueError(f"it is no schema of a table: {why}") from error
    names = [*(f.name for f in features), *(name for name, _ in unused)]
    if len(set(names)) < len(names) or schema.target in names or not schema.inputs:
        raise ValueError("it is no schema of a table: a column is repeated, or there is none")
    if schema.inputs > MOST_INPUTS:
        raise ValueError(f"it requires {schema.inputs} inputs of the model; at most {MOST_INPUTS} are possible")
    if schema.task == "classification" and not 2 <= len(schema.classes) <= MOST_CLASSES:
        raise ValueError(f"it is no schema of a table: {len(schema.classes)} classes; expected 2 to {MOST_CLASSES}")
    return schema


def valid_name(value: Any) -> str:
    """Check a name of a profile or a schema."""
    if not isinstance(value, str) or not is_name(value):
        raise ValueError("a name is no text, or too long")
    return value


def valid_names(values: Any) -> tuple[str, ...]:
    """Check a list of names without repetition."""
    found = tuple(valid_name(v) for v in values) if isinstance(values, list) else None
    if found is None or len(set(found)) < len(found) or len(found) > MOST_CATEGORIES:
        raise ValueError("expected a list of names that is not too long and has no repetition")
    return found


def valid_choice(value: Any, choices: Sequence[str]) -> Any:
    """Check that a value is one of these."""
    if value not in choices:
        raise ValueError(f"{str(value)[:40]!r} is not one of {', '.join(choices)}")
    return value


def finite_number(value: Any) -> float:
    """Check a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError("expected a finite number")
    return float(value)


def positive_number(value: Any) -> float:
    """Check a number above 0."""
    if not finite_number(value) > 0:
        raise ValueError("a deviation is not above 0")
    return float(value)
