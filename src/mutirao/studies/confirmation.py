"""The output of tuning: a table of all trials, and a study file that confirms the best settings with fresh seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mutirao.config import flatten, toml_string, write_value
from mutirao.io import write_rows, write_whole
from mutirao.studies.comparison import markdown_table, number
from mutirao.studies.tuning import Trial, Tuning, warnings, winners

HEADER = ("method", "trial", "settings", "mean", "95% t", "runs", "chosen", "fault")


def trial_row(trial: Trial, chosen: bool) -> tuple[str, ...]:
    """A trial as the texts of a table row."""
    return (
        trial.method,
        str(trial.number),
        trial.settings,
        number(trial.result.mean),
        number(trial.result.half),
        str(len(trial.values)),
        "yes" if chosen else "",
        trial.fault,
    )


def trial_rows(tuning: Tuning, trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """All trials as rows of texts, with the header first."""
    best = winners(tuning, trials)
    return [HEADER, *(trial_row(trial, best.get(trial.method) is trial) for trial in trials)]


def write_tuning(tuning: Tuning, trials: Sequence[Trial], out: Path) -> Path:
    """Write `trials.csv`, `.md` and `.json`, and the study `confirm-NAME.toml`; return its path."""
    rows = trial_rows(tuning, trials)
    write_whole(out / "trials.csv", write_rows(rows))
    notes = "".join(f"\n{line}\n" for line in warnings(tuning, trials))
    write_whole(out / "trials.md", markdown_table(rows) + notes)
    write_whole(out / "trials.json", json.dumps(content_of(tuning, trials), indent=2) + "\n")
    study = out / f"confirm-{Path(tuning.study.file).name}"
    write_whole(study, confirming(tuning, trials))
    return study


def content_of(tuning: Tuning, trials: Sequence[Trial]) -> dict[str, Any]:
    """The content of `trials.json`."""
    best = winners(tuning, trials)

    def known(value: float) -> float | None:
        if math.isnan(value):
            return None
        return value

    rows = [
        {
            "method": trial.method,
            "trial": trial.number,
            "settings": dict(trial.point),
            "mean": known(trial.result.mean),
            "half_t": known(trial.result.half),
            "values": list(trial.values),
            "chosen": best.get(trial.method) is trial,
            "fault": trial.fault,
        }
        for trial in trials
    ]
    facts = {"recipe": tuning.study.called, "metric": tuning.metric, "judged_by": "validation"}
    effort = {"trials_each": tuning.effort, "runs_each": tuning.effort * tuning.places, "over": dict(tuning.axes)}
    chosen = {method: dict(trial.point) for method, trial in best.items()}
    return {"schema": 1, **facts, **effort, "chosen": chosen, "warnings": warnings(tuning, trials), "trials": rows}


def confirming(tuning: Tuning, trials: Sequence[Trial]) -> str:
    """The study file: the same methods with their best settings, and the study's own seeds, unused in tuning."""
    best = winners(tuning, trials)
    study = tuning.study
    table = dict(tuning.table)
    # The study's own seeds, which tuning must not use: settings chosen for their luck with a seed are found out.
    seeds = list(dict.fromkeys(value for cell in study.cells for key, value in cell.place if key == "seed"))
    settings = merged([*flatten(table.get("settings", {})), *tuning.fixed])
    methods = {}
    for method in study.methods:
        own = flatten(table["methods"][method])
        names = {plain_key(key) for key, _ in own}
        fixed = [pair for pair in tuning.fixed if plain_key(pair[0]) in names]
        methods[method] = merged([*own, *fixed, *(best[method].point if method in best else ())])
    kept = {k: v for k, v in table.items() if k not in ("tune", "settings", "methods", "seeds")}
    tried = f"{tuning.effort} x {tuning.places} runs for each method"
    lines = [f"# Confirms what was chosen by {tuning.metric} on validation data: {tried}."]
    for method, trial in best.items():
        lines.append(f"# {comment_text(method)}: {comment_text(trial.settings)}, which came to {came_to(trial)}")
    lines += [f"# WARNING: {comment_text(line)}" for line in warnings(tuning, trials)]
    return "\n".join(lines) + "\n" + write_toml({**kept, "seeds": seeds, "settings": settings, "methods": methods})


def came_to(trial: Trial) -> str:
    """The mean of a trial, with its confidence interval if there is one."""
    if math.isnan(trial.result.half):
        return f"{trial.result.mean:.4f}"
    return str(trial.result)


def comment_text(text: str) -> str:
    """Text for a comment: characters that would end the line, or that TOML forbids, become spaces."""
    return "".join(c if c.isprintable() else " " for c in text)


def plain_key(key: str) -> str:
    """The key of a part's name: `select` for `select.name`."""
    return key.removesuffix(".name")


def merged(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Settings as a nested table; later values replace earlier ones."""
    last: dict[str, Any] = {}
    for key, value in pairs:
        last[plain_key(key)] = value
    parts = {key.partition(".")[0] for key in last if "." in key}
    out: dict[str, Any] = {}
    for key, value in last.items():
        part, dot, sub = key.partition(".")
        if part in parts:
            out.setdefault(part, {})[sub if dot else "name"] = value
        else:
            out[key] = value
    return out


def write_toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """A table as TOML: values first, small tables in one line, then tables of tables."""
    lines: list[str] = []
    deeper: list[str] = []
    for key, value in table.items():
        if isinstance(value, Mapping) and not (len(path) > 1 and is_small(value)):
            deeper.append(f"\n{write_toml(value, (*path, key))}")
        else:
            lines.append(f"{toml_key(key)} = {toml_value(value)}\n")
    if path and (lines or not table):
        lines.insert(0, f"[{'.'.join(map(toml_key, path))}]\n")
    return "".join(lines + deeper)


def is_small(table: Mapping[str, Any]) -> bool:
    """Whether a table contains values only, no tables."""
    return bool(table) and not any(isinstance(v, Mapping) for v in table.values())


def toml_value(value: Any) -> str:
    """A value, list or small table in TOML."""
    if isinstance(value, Mapping):
        pairs = [f"{toml_key(key)} = {toml_value(inner)}" for key, inner in value.items()]
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return write_value(value)


def toml_key(key: str) -> str:
    """A TOML key, quoted if necessary."""
    bare = key.isascii() and bool(key) and all(c.isalnum() or c in "-_" for c in key)
    if bare:
        return key
    return toml_string(key)
