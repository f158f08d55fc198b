"""The profiles of tables that clients send before the first round, and how the server makes a schema of them.

Of its training rows a client sends each column's name, kind, and numbers of values and of missing values; of numbers
the sum and squared deviations, and of categories the names that occur at least `least` times. A column with fewer than
`least` numbers has no moments in the profile. The server combines profiles in whatever order they arrive.
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
    column_differences,
    finite_number,
    quote_names,
    valid_choice,
    valid_name,
    valid_names,
)
from mutirao.systems.tabular.table import Column, Kind, Table, is_name

log = logging.getLogger("mutirao")


def profile_table(table: Table, target: Column, task: Task, least: int) -> bytes:
    """A client's profile of its training rows, as JSON: all that leaves it before the first round."""
    columns: dict[str, Any] = {}
    for name in sorted(table.columns):
        column = table.columns[name]
        columns[name] = {"kind": column.kind, **profile_column(column, least)}
    about: dict[str, Any] = {"kind": target.kind}
    if task == "classification":
        # All classes, however rare: the model needs an output for each.
        about["classes"] = sorted(name for name in set(target.labels()) if name and is_name(name))
    else:
        about |= profile_column(target, least)
    return json.dumps({"columns": columns, "target": about}, sort_keys=True, ensure_ascii=False).encode()


def profile_column(column: Column, least: int) -> dict[str, Any]:
    """Numbers of values and of missing ones, and the moments or categories if there are enough values."""
    gone = column.missing
    profile: dict[str, Any] = {"count": int((~gone).sum()), "missing": int(gone.sum())}
    if column.kind == "category":
        # A rare category could identify a person, so only names that occur `least` times leave the client.
        counts = Counter(column.labels())
        profile["categories"] = sorted(name for name, n in counts.items() if name and n >= least and is_name(name))
    elif column.kind in ("number", "date") and profile["count"] >= least:
        moments = measure_moments(column.numbers[~gone][:, None])
        profile |= {"sum": float(moments["sum"][0]), "squares": float(moments["squares"][0])}
    return profile


def parse_table_profile(reply: Reply, task: Task) -> dict[str, Any]:
    """The profile in a reply, with every field checked; ValueError says what is wrong."""
    content = bytes_from_extra("profile", reply.extras)
    if not 0 < len(content) <= MOST_BYTES:
        raise ValueError("there is no profile in the reply, or it is too large")
    try:
        table = json.loads(content)
        columns = {valid_name(name): parse_column_profile(column) for name, column in table["columns"].items()}
        target = {"kind": valid_choice(table["target"]["kind"], KINDS)}
        if task == "classification":
            target["classes"] = valid_names(table["target"]["classes"])
        else:
            target |= parse_column_profile(table["target"])
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"its profile cannot be read: {str(error)[:80]}") from error
    if task == "regression" and target["kind"] == "category":
        raise ValueError("its target is text, but task=regression predicts a number; use task=classification for text")
    return {"columns": columns, "target": target}


def parse_column_profile(profile: Any) -> dict[str, Any]:
    """The profile of a column, checked."""
    kind = valid_choice(profile["kind"], KINDS)
    count = int(finite_number(profile["count"]))
    missing = int(finite_number(profile["missing"]))
    if count < 0 or missing < 0:
        raise ValueError("a count is negative")
    out: dict[str, Any] = {"kind": kind, "count": count, "missing": missing}
    if kind == "category":
        return out | {"categories": valid_names(profile["categories"])}
    if "sum" in profile:
        total = finite_number(profile["sum"])
        squares = finite_number(profile["squares"])
        if squares < 0 or not count:
            raise ValueError("squares are negative, or of no values")
        out["moments"] = {"count": np.array(count), "sum": np.array([total]), "squares": np.array([squares])}
    return out


def schema_from_profiles(target: str, task: Task, replies: Mapping[ClientId, Reply]) -> Schema:
    """The schema of the most common set of columns; clients with other columns are left out."""
    profiles: list[dict[str, Any]] = []
    faults: list[str] = []
    for client, reply in sorted(replies.items()):
        try:
            profiles.append(parse_table_profile(reply, task))
        except ValueError as error:
            faults.append(f"{client}: {error}")
            log.warning("%s: %s", client, error)
    if not profiles:
        raise ConfigError(f"no client sent a profile that can be read; {faults[0]}")
    kinds_of_clients = [column_kinds(profile) for profile in profiles]
    kinds = most_common_kinds(kinds_of_clients)
    # Clients with other columns refuse the schema later, by name; here they only must not shape it.
    used = [p for p, own in zip(profiles, kinds_of_clients, strict=True) if not column_differences(kinds, own)]
    features: list[Feature] = []
    unused: list[tuple[str, Kind]] = []
    for name, kind in sorted(kinds.items()):
        feature = combine_column(name, kind, [p["columns"][name] for p in used])
        if feature is None:
            unused.append((name, kind))
        else:
            features.append(feature)
    if not features:
        raise ConfigError("no column can be used: there is none but the target, or all have too few values")
    if task == "classification":
        classes = most_common_names([p["target"]["classes"] for p in used], MOST_CLASSES, f"target {target!r}")
        if len(classes) < 2:
            raise ConfigError(
                f"target: {target!r} has only one class, {quote_names(classes) or 'none'}; expected at least two"
            )
        return Schema(target, task, tuple(features), tuple(unused), tuple(sorted(classes, key=class_order)))
    scale = combine_column(target, "number", [p["target"] for p in used])
    if scale is None:
        raise ConfigError(f"target: {target!r} is constant, or no client has enough values of it")
    return Schema(target, task, tuple(features), tuple(unused), (), scale.mean, scale.std)


def column_kinds(profile: Mapping[str, Any]) -> dict[str, Kind]:
    """The kind of each column of a profile."""
    return {name: column["kind"] for name, column in profile["columns"].items()}


def most_common_kinds(clients: Sequence[Mapping[str, Kind]]) -> dict[str, Kind]:
    """The most common set of columns, each with its most common kind among clients with this set; ties by name."""
    sets = Counter(tuple(sorted(kinds)) for kinds in clients)
    chosen = min(sets, key=lambda columns: (-sets[columns], columns))
    used = [kinds for kinds in clients if tuple(sorted(kinds)) == chosen]
    out: dict[str, Kind] = {}
    for name in chosen:
        counts = Counter(kinds[name] for kinds in used if kinds[name] != "empty")
        # A client with an empty column has no say in its kind.
        out[name] = "empty"
        if counts:
            out[name] = min(counts, key=lambda kind: (-counts[kind], kind))
    return out


def combine_column(name: str, kind: Kind, profiles: Sequence[Mapping[str, Any]]) -> Feature | None:
    """A column over all clients; None if it is constant, or no client sent enough of it."""
    missing = any(p["missing"] for p in profiles)
    if kind == "category":
        categories = most_common_names([p.get("categories", ()) for p in profiles], MOST_CATEGORIES, f"column {name!r}")
        if not categories or (len(categories) == 1 and not missing):
            return None
        return Feature(name, kind, categories=tuple(categories), missing=missing)
    # Bounded, so that no single client can shift the scale of all.
    moments = bound_moments([p["moments"] for p in profiles if "moments" in p])
    if not moments or kind == "empty":
        return None
    mean, std = combine_moments(moments)
    # Of no use to a model: constant at each client, and the same constant at all.
    means = {float(m["sum"][0] / m["count"]) for m in moments}
    if len(means) == 1 and not any(float(m["squares"][0]) > 0 for m in moments):
        return None
    return Feature(name, kind, float(mean[0]), float(std[0]), missing=missing)


def most_common_names(lists: Sequence[Sequence[str]], most: int, where: str) -> list[str]:
    """All names, sorted; of too many those of the most clients, so that no single client can stop the run."""
    counts = Counter(name for names in lists for name in names)
    if len(counts) <= most:
        return sorted(counts)
    log.warning("%s has %d names, of which the %d most common ones are used", where, len(counts), most)
    return sorted(sorted(counts, key=lambda name: (-counts[name], name))[:most])


def class_order(name: str) -> tuple[int, float, str]:
    """Sort key: classes that are numbers by value, then the others by name."""
    try:
        value = float(name)
    except ValueError:
        return 1, 0.0, name
    if math.isfinite(value):
        return (0, value, name)
    return (1, 0.0, name)
