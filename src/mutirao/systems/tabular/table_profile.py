"""What a client tells before the first round, and how the server joins it: nothing else leaves.

Of its training rows a client tells each column's name, kind, and how many values it has and misses; of numbers sum and
squared deviations, of categories the names it has at least `least` times. With fewer numbers than `least` in a column
it tells nothing of them. The server joins these into a `Schema`, in whatever order they come.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mutirao.core.agreement import bytes_from_extra
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.moments import bound_moments, combine_moments, measure_moments
from mutirao.errors import ConfigError
from mutirao.systems.tabular.schema import (
    KINDS,
    MOST_BYTES,
    MOST_CATEGORIES,
    MOST_CLASSES,
    Feature,
    Schema,
    Task,
    differences,
    number,
    one_of,
    shown,
    text,
    texts,
)
from mutirao.systems.tabular.table import Column, Kind, Table, is_name

log = logging.getLogger("mutirao")


def tell_profile(table: Table, target: Column, task: Task, least: int) -> bytes:
    """All that leaves a client before the first round, of its training rows: JSON."""
    columns: dict[str, Any] = {}
    for name in sorted(table.columns):
        column = table.columns[name]
        columns[name] = {"kind": column.kind, **tell_column(column, least)}
    what: dict[str, Any] = {"kind": target.kind}
    if task == "classification":
        what["classes"] = sorted(name for name in set(target.labels()) if name and is_name(name))
    else:
        what |= tell_column(target, least)
    return json.dumps({"columns": columns, "target": what}, sort_keys=True, ensure_ascii=False).encode()


def tell_column(column: Column, least: int) -> dict[str, Any]:
    """How many values there are and how many are missing; and of enough of them the moments or the categories."""
    gone = column.missing
    told: dict[str, Any] = {"count": int((~gone).sum()), "missing": int(gone.sum())}
    if column.kind == "category":
        counts = Counter(column.labels())
        told["categories"] = sorted(name for name, n in counts.items() if name and n >= least and is_name(name))
    elif column.kind in ("number", "date") and told["count"] >= least:
        moments = measure_moments(column.numbers[~gone][:, None])
        told |= {"sum": float(moments["sum"][0]), "squares": float(moments["squares"][0])}
    return told


def read_profile(reply: Reply, task: Task) -> dict[str, Any]:
    """The profile in a reply, checked word by word; ValueError says what is wrong."""
    content = bytes_from_extra("profile", reply.extras)
    if not 0 < len(content) <= MOST_BYTES:
        raise ValueError("there is no profile in the reply, or it is too large")
    try:
        table = json.loads(content)
        columns = {text(name): read_told(column) for name, column in table["columns"].items()}
        target = {"kind": one_of(table["target"]["kind"], KINDS)}
        if task == "classification":
            target["classes"] = texts(table["target"]["classes"])
        else:
            target |= read_told(table["target"])
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"its profile cannot be read: {str(error)[:80]}") from error
    if task == "regression" and target["kind"] == "category":
        raise ValueError("its target is text, and a number is to be predicted; is it task=classification?")
    return {"columns": columns, "target": target}


def read_told(told: Any) -> dict[str, Any]:
    """What was told of a column, checked."""
    kind = one_of(told["kind"], KINDS)
    count, missing = (int(number(told[key])) for key in ("count", "missing"))
    if count < 0 or missing < 0:
        raise ValueError("a count is negative")
    out: dict[str, Any] = {"kind": kind, "count": count, "missing": missing}
    if kind == "category":
        return out | {"categories": texts(told["categories"])}
    if "sum" in told:
        total, squares = number(told["sum"]), number(told["squares"])
        if squares < 0 or not count:
            raise ValueError("squares are negative, or of no values")
        out["moments"] = {"count": np.array(count), "sum": np.array([total]), "squares": np.array([squares])}
    return out


def join_profiles(target: str, task: Task, replies: Mapping[ClientId, Reply]) -> Schema:
    """The schema of what most clients have: those whose columns are others have no part in it."""
    told: dict[ClientId, dict[str, Any]] = {}
    faults: dict[ClientId, str] = {}
    for client, reply in sorted(replies.items()):
        try:
            told[client] = read_profile(reply, task)
        except ValueError as error:
            faults[client] = str(error)
            log.warning("%s: %s", client, error)
    if not told:
        client, fault = next(iter(faults.items()))
        raise ConfigError(f"no client told a profile that can be read; {client}: {fault}")
    kinds = most_common_kinds([{n: c["kind"] for n, c in p["columns"].items()} for p in told.values()])
    alike = [p for p in told.values() if not differences(kinds, {name: c["kind"] for name, c in p["columns"].items()})]
    features: list[Feature] = []
    unused: list[tuple[str, Kind]] = []
    for name, kind in sorted(kinds.items()):
        made = join_column(name, kind, [p["columns"][name] for p in alike])
        if made is None:
            unused.append((name, kind))
        else:
            features.append(made)
    if not features:
        raise ConfigError("no column can be used: clients have none but the target, or too few values of each")
    if task == "classification":
        classes = most_told([p["target"]["classes"] for p in alike], MOST_CLASSES, f"target {target!r}")
        if len(classes) < 2:
            raise ConfigError(f"target: {target!r} has one class alone, {shown(classes) or 'none'}; two are needed")
        return Schema(target, task, tuple(features), tuple(unused), tuple(sorted(classes, key=class_order)))
    found = join_column(target, "number", [p["target"] for p in alike])
    if found is None:
        raise ConfigError(f"target: {target!r} has one value alone, or no client has enough of them")
    return Schema(target, task, tuple(features), tuple(unused), (), found.mean, found.std)


def most_common_kinds(held: Sequence[Mapping[str, Kind]]) -> dict[str, Kind]:
    """The columns that most clients have, each of the kind that most of these have; the first of equals by name."""
    names = Counter(tuple(sorted(kinds)) for kinds in held)
    chosen = min(names, key=lambda columns: (-names[columns], columns))
    alike = [kinds for kinds in held if tuple(sorted(kinds)) == chosen]
    out: dict[str, Kind] = {}
    for name in chosen:
        counts = Counter(kinds[name] for kinds in alike if kinds[name] != "empty")
        out[name] = min(counts, key=lambda kind: (-counts[kind], kind)) if counts else "empty"
    return out


def join_column(name: str, kind: Kind, told: Sequence[Mapping[str, Any]]) -> Feature | None:
    """A column as all see it; None if it tells nothing: one value alone, or none that enough clients could tell of."""
    missing = any(t["missing"] for t in told)
    if kind == "category":
        categories = most_told([t.get("categories", ()) for t in told], MOST_CATEGORIES, f"column {name!r}")
        alone = len(categories) == 1 and not missing
        return Feature(name, kind, categories=tuple(categories), missing=missing) if categories and not alone else None
    moments = bound_moments([t["moments"] for t in told if "moments" in t])
    if not moments or kind == "empty":
        return None
    mean, std = combine_moments(moments)
    middles = {float(m["sum"][0] / m["count"]) for m in moments}
    spread = len(middles) > 1 or any(float(m["squares"][0]) > 0 for m in moments)
    return Feature(name, kind, float(mean[0]), float(std[0]), missing=missing) if spread else None


def most_told(lists: Sequence[Sequence[str]], most: int, where: str) -> list[str]:
    """All names that were told, by name; of too many those that most clients told, so that no one can stop the run."""
    counts = Counter(name for names in lists for name in names)
    if len(counts) <= most:
        return sorted(counts)
    log.warning("%s has %d names, of which the %d most common ones count", where, len(counts), most)
    return sorted(sorted(counts, key=lambda name: (-counts[name], name))[:most])


def class_order(name: str) -> tuple[int, float, str]:
    """Classes that are numbers in the order of these, then the others by name."""
    try:
        value = float(name)
    except ValueError:
        return 1, 0.0, name
    return (0, value, name) if math.isfinite(value) else (1, 0.0, name)
