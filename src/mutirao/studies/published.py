"""Published values of a study's methods and metrics, to be shown beside ours."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mutirao.config import nearest
from mutirao.errors import ConfigError

KEYS = {"source", "note", "values", "rounds_to"}
OWN = {"value", "half", "source", "note"}


@dataclass(frozen=True)
class PublishedValue:
    """A published value, half the width of its interval if given, and rounds to the study's threshold."""

    value: float = math.nan
    half: float = math.nan
    rounds: float = math.nan
    source: str = ""
    note: str = ""

    def __str__(self) -> str:
        if math.isnan(self.value):
            return ""
        text = f"{self.value:.4g}"
        if not math.isnan(self.half):
            text += f" ± {self.half:.4g}"
        return text


@dataclass(frozen=True)
class PublishedValues:
    """Published values by method and metric, with their source and a note."""

    source: str = ""
    note: str = ""
    claims: Mapping[tuple[str, str], PublishedValue] = field(default_factory=dict)


def read_published_values(
    table: Any, methods: Collection[str], metrics: Collection[str], thresholds: Collection[str]
) -> PublishedValues:
    """The `[published]` table of a study file; all its methods and metrics must be in the study.

    Without `metrics`, any metric is accepted: the first cell will show which ones there are.
    """
    if table is None:
        return PublishedValues()
    if not isinstance(table, Mapping):
        raise ConfigError('published must be a table: [published] with source = "...", then [published.values.METHOD]')
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"published: unknown key {key!r}{nearest(key, KEYS)}")
    source = text_in("published", table, "source")
    note = text_in("published", table, "note")
    if not source:
        raise ConfigError('published: name the source of the values: source = "authors, venue and year, table"')
    claims: dict[tuple[str, str], PublishedValue] = {}
    for method, metric, given in entries("values", table, methods):
        check_published_metric(f"published.values.{method}", metric, metrics)
        claims[method, metric] = parse_value(f"published.values.{method}: {metric}", given, source)
    for method, metric, given in entries("rounds_to", table, methods):
        where = f"published.rounds_to.{method}"
        if metric not in thresholds:
            raise ConfigError(f"{where}: {metric!r} has no [threshold] that rounds could be counted to")
        known = claims.get((method, metric), PublishedValue(source=source))
        claims[method, metric] = replace(known, rounds=number_in(f"{where}: {metric}", given))
    return PublishedValues(source, note, claims)


def entries(key: str, table: Mapping[str, Any], methods: Collection[str]) -> Iterator[tuple[str, str, Any]]:
    """(method, metric, value) of a table by method."""
    for method, own in methods_table("published", table, key).items():
        if method not in methods:
            raise ConfigError(f"published.{key}: the study has no method {method!r}{nearest(method, methods)}")
        if not isinstance(own, Mapping):
            raise ConfigError(f"published.{key}.{method} must be a table of values by metric")
        for metric, given in own.items():
            yield method, metric, given


def check_published_metric(where: str, metric: str, metrics: Collection[str]) -> None:
    """Refuse a published metric that the study does not have."""
    if metrics and metric not in metrics:
        raise ConfigError(f"{where}: {metric!r} is not one of the study's metrics{nearest(metric, metrics)}")


def parse_value(where: str, given: Any, source: str) -> PublishedValue:
    """A value from a number, or from a table with `value`, `half`, `source` and `note`."""
    if not isinstance(given, Mapping):
        return PublishedValue(number_in(where, given), source=source)
    for key in given:
        if key not in OWN:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, OWN)}")
    if "value" not in given:
        raise ConfigError(f"{where}: the value is missing; write {{ value = 0.5, half = 0.1 }}")
    half = number_in(f"{where}: half", given["half"]) if "half" in given else math.nan
    if half < 0:
        raise ConfigError(f"{where}: half must be half the width of an interval, at least 0")
    own = text_in(where, given, "source") or source
    return PublishedValue(number_in(where, given["value"]), half, source=own, note=text_in(where, given, "note"))


def methods_table(where: str, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table below a key; empty if missing."""
    found = table.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}.{key} must be a table of methods")
    return found


def text_in(where: str, table: Mapping[str, Any], key: str) -> str:
    """The text below a key, on one line; empty if missing."""
    found = table.get(key, "")
    if not isinstance(found, str):
        raise ConfigError(f"{where}: {key} must be text, not {found!r}")
    return " ".join(found.split())


def number_in(where: str, given: Any) -> float:
    """A finite number; ConfigError for anything else."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ConfigError(f"{where}: {given!r} is not a number")
    return float(given)
