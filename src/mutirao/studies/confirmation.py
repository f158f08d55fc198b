"""What tuning leaves: a table of all trials, and the study file that confirms the settings with fresh seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mutirao.config import flatten, toml_string, write_value
from mutirao.io import write_rows, write_whole
from mutirao.studies.tuning import Trial, Tuning, warnings, winners

HEADER = ("method", "trial", "settings", "mean", "95% t", "runs", "chosen", "fault")


def trial_row(trial: Trial, chosen: bool) -> tuple[str, ...]:
    """A trial as the texts of a table row."""
    numbers = ("-" if math.isnan(value) else f"{value:.4f}" for value in (trial.result.mean, trial.result.half))
    rest = (str(len(trial.values)), "yes" if chosen else "", trial.fault)
    return (trial.method, str(trial.number), trial.settings, *numbers, *rest)


def trial_rows(tuning: Tuning, trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """All trials as texts, below their heading."""
    best = winners(tuning, trials)
    return [HEADER, *(trial_row(trial, best.get(trial.method) is trial) for trial in trials)]


def write_tuning(tuning: Tuning, trials: Sequence[Trial], out: Path) -> Path:
    """Write `trials.csv`, `.md` and `.json`, and the study `confirm-NAME.toml`, whose path is returned."""
    head, *body = trial_rows(tuning, trials)
    write_whole(out / "trials.csv", write_rows([head, *body]))
    lines = [f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body)]
    write_whole(out / "trials.md", "".join(lines) + "".join(f"\n{line}\n" for line in warnings(tuning, trials)))
    write_whole(out / "trials.json", json.dumps(content_of(tuning, trials), indent=2) + "\n")
    study = out / f"confirm-{Path(tuning.study.file).name}"
    write_whole(study, confirming(tuning, trials))
    return study


def content_of(tuning: Tuning, trials: Sequence[Trial]) -> dict[str, Any]:
    """The trials for machines."""
    best = winners(tuning, trials)

    def known(value: float) -> float | None:
        return None if math.isnan(value) else value

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
    told = {"recipe": tuning.study.called, "metric": tuning.metric, "judged_by": "validation"}
    effort = {"trials_each": tuning.effort, "runs_each": tuning.effort * tuning.places, "over": dict(tuning.axes)}
    chosen = {method: dict(trial.point) for method, trial in best.items()}
    return {"schema": 1, **told, **effort, "chosen": chosen, "warnings": warnings(tuning, trials), "trials": rows}


def confirming(tuning: Tuning, trials: Sequence[Trial]) -> str:
    """The study file: the same methods with the settings that won, and the study's own seeds, which nobody has seen."""
    best, study, table = winners(tuning, trials), tuning.study, dict(tuning.table)
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
    """Its mean, with the interval if there is one."""
    return f"{trial.result.mean:.4f}" if math.isnan(trial.result.half) else str(trial.result)


def comment_text(text: str) -> str:
    """Text that may stand in a comment: what would end the line, or no TOML file may hold, is left out."""
    return "".join(c if c.isprintable() else " " for c in text)


def plain_key(key: str) -> str:
    """A part's name under its own key: `select.name` is `select`."""
    return key.removesuffix(".name")


def merged(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Settings of which later ones hold, a part with settings of its own as a table of them."""
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
    """A table as TOML: values first, small tables within a line, then tables of tables."""
    values = {k: v for k, v in table.items() if not isinstance(v, Mapping) or (len(path) > 1 and is_small(v))}
    lines = [f"[{'.'.join(map(toml_key, path))}]"] if path and (values or not table) else []
    lines += [f"{toml_key(k)} = {toml_value(v)}" for k, v in values.items()]
    deeper = [write_toml(v, (*path, k)) for k, v in table.items() if k not in values]
    return "\n".join([*lines, ""] if lines else []) + "".join(f"\n{text}" for text in deeper)


def is_small(table: Mapping[str, Any]) -> bool:
    """Whether a table holds values alone."""
    return bool(table) and not any(isinstance(v, Mapping) for v in table.values())


def toml_value(value: Any) -> str:
    """A value, a list or a small table, as TOML writes it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return write_value(value)


def toml_key(key: str) -> str:
    """A key, quoted if it must be."""
    bare = key.isascii() and bool(key) and all(c.isalnum() or c in "-_" for c in key)
    return key if bare else toml_string(key)
