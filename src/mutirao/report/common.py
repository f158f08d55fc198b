"""What the runs of a study have in common: their settings, a sentence of them, and where each run is."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mutirao.runs.reader import Record
from mutirao.runs.sentence import ALL, Told, known_of
from mutirao.runs.wording import count, joined, listed, say

Table = Mapping[str, Any]
MOST_NAMED = 6  # methods, or settings, in the sentence
CLAUSES = {  # a clause of the sentence, and the settings that must be the same in all runs to tell it
    "data": ("data",),
    "holders": ("data", "partition", "clients", "populations", "hidden", "sites", "centralised", "client"),
    "rounds": ("rounds", "per_round", "select", "clients", "centralised"),
}


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


def describe_study(records: Mapping[str, Record], methods: list[str], baseline: str) -> str:
    """The study in one sentence: which methods, on which data, over how many runs, and what all of them share."""
    if not records:
        return ""
    first = next(iter(records.values()))
    began = next((e for e in first.events if e.get("event") == "started"), {})
    known = known_of(began)
    common, varied = common_of(record.config for record in records.values())
    full, found = Told(common, known["base"]), first.summary.get("clients")
    clients = found if isinstance(found, int) else None

    def told(clause: str) -> bool:
        return not varied.intersection(CLAUSES[clause])

    names = [f"{m} (the baseline)" if m == baseline else m for m in methods]
    if len(names) > MOST_NAMED:
        names[MOST_NAMED - 1 :] = [f"{len(names) - MOST_NAMED + 1} more methods"]
    over = f" on {full.data()}" if told("data") else ""
    clauses = [f"{listed(names)}{over}"]
    clauses += [full.holders(clients, known["dealt"])] if told("holders") else []
    clauses += [full.rounds(None, clients)] if told("rounds") else []
    shown = {key: value for key, value in full.apart.items() if key.partition(".")[0] not in full.told}
    but = [say(key, value) for key, value in joined(shown.items())]
    if len(but) > MOST_NAMED:
        but[MOST_NAMED - 1 :] = [f"{len(but) - MOST_NAMED + 1} more settings"]
    rest = f"otherwise {full.whose}{' except ' + listed(but) if but else ''}"
    text = f"{', '.join(c for c in clauses if c)}; {count(len(records), 'run')} in all, {rest}."
    return text.replace(f", {ALL}", ", all clients in every round")


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
