"""What the runs of a study have in common: their settings, and where each run is."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mutirao.runs.reader import Record

Table = Mapping[str, Any]


def records_of(folder: Path, cells: Mapping[str, str]) -> dict[str, Record]:
    """The runs of a study that have begun."""
    return {name: Record.of(folder / "cells" / name) for name, state in cells.items() if state != "not begun"}


def common_of(configs: Iterable[Table]) -> tuple[dict[str, Any], set[str]]:
    """The settings that are the same in all configurations, and the keys of the others; seeds are neither.

    >>> common_of([{"lr": 0.1, "rounds": 5, "seed": 0}, {"lr": 0.2, "rounds": 5, "seed": 1}])
    ({'rounds': 5}, {'lr'})
    """
    every = list(configs)
    keys = dict.fromkeys(key for config in every for key in config if key != "seed")
    same = [k for k in keys if all(k in config and config[k] == every[0][k] for config in every)]
    return {k: every[0][k] for k in same}, {*keys} - {*same}


def lines_of(settings: Table) -> str:
    """Settings as lines of a configuration, parts by their dotted keys."""
    lines = []
    for key, value in settings.items():
        inside = value.items() if isinstance(value, Mapping) else [("", value)]
        lines += [f"{f'{key}.{k}'.removesuffix('.name').removesuffix('.')} = {v}" for k, v in inside]
    return "\n".join(lines)


def address_of(folder: Path, cell: str) -> str:
    """Where a run is, as seen from the study's page: its report if it has one, else its folder."""
    page = folder / "cells" / cell / "report.html"
    return quote(f"cells/{cell}/{page.name if page.is_file() else ''}")
