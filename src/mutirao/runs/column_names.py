"""What the columns of a run's tables mean: ours have a name here; the others are metrics, or figures of clients."""

import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

# history.csv, a row a round. All else are metrics; those that begin with `train_` are the clients', from training.
HISTORY = frozenset({"round", "seconds", "selected", "replied", "failed", "rejected", "bytes_down", "bytes_up"})
HISTORY |= {"probed", "probe_bytes", "probe_seconds", "sim_seconds", "sim_joules", "available", "waited", "clip"}
HISTORY |= {"drifted"}
# clients.csv, a row for each client selected in a round. All else are figures that clients told or the method found.
TEXTS = frozenset({"client", "group", "failure", "rejected"})  # stay text, whatever they look like
SIMULATED = frozenset({"sim_seconds", "sim_joules"})
CLIENTS = TEXTS | SIMULATED | {"round", "try", "replied", "n", "n_declared", "weight", "age"}
USUAL = ("accuracy", "balanced_accuracy", "ndcg@5", "rmse", "auc")  # what runs are judged by, if they do not say


def metrics_among(names: Iterable[str]) -> list[str]:
    """Those columns of history.csv that are metrics of the model."""
    return [name for name in names if name not in HISTORY and not name.startswith("train_")]


def metrics_in_row(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a line of history, without the counters every run has."""
    return {name: row[name] for name in metrics_among(row)}


def client_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures in a row of clients.csv."""
    return {k: float(v) for k, v in row.items() if k not in CLIENTS and isinstance(v, int | float)}


def likely_monitor(names: Iterable[str]) -> str:
    """The metric a run is probably judged by, of the columns of its history."""
    metrics = metrics_among(names)
    return next((name for name in (*USUAL, *metrics) if name in metrics), "")


def typed_row(row: Mapping[str, str], texts: Set[str] = frozenset()) -> dict[str, Any]:
    """A row of a table with numbers as numbers again, but for the columns that are text."""
    return {k: v if k in texts else typed(v) for k, v in row.items()}


def typed(text: str) -> Any:
    """A cell as the number it is, or else as it stands."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
