"""The columns of a run's tables: those named here are counters; all others are metrics or clients' figures."""

import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

# history.csv has a row for each round. All other columns are metrics; those that begin with `train_` are the clients'
# training metrics.
HISTORY = frozenset({"round", "seconds", "selected", "replied", "failed", "rejected", "bytes_down", "bytes_up"})
HISTORY |= {"probed", "probe_bytes", "probe_seconds", "sim_seconds", "sim_joules", "available", "waited", "clip"}
HISTORY |= {"drifted"}
# clients.csv has a row for each client selected in a round. All other columns are figures that clients reported or the
# method computed.
TEXTS = frozenset({"client", "group", "failure", "rejected"})  # never converted to numbers: a client may be called 007
SIMULATED = frozenset({"sim_seconds", "sim_joules"})
CLIENTS = TEXTS | SIMULATED | {"round", "try", "replied", "n", "n_declared", "weight", "age"}
USUAL = ("accuracy", "balanced_accuracy", "ndcg@5", "rmse", "auc")  # the monitor of runs that name none


def metrics_among(names: Iterable[str]) -> list[str]:
    """The columns of history.csv that are metrics of the model."""
    return [name for name in names if name not in HISTORY and not name.startswith("train_")]


def metrics_in_row(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a row of history, without the counters."""
    return {name: row[name] for name in metrics_among(row)}


def client_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The clients' figures in a row of clients.csv."""
    return {k: float(v) for k, v in row.items() if k not in CLIENTS and isinstance(v, int | float)}


def likely_monitor(names: Iterable[str]) -> str:
    """The metric that a run probably monitors, by the columns of its history."""
    metrics = metrics_among(names)
    return next((name for name in (*USUAL, *metrics) if name in metrics), "")


def typed_row(row: Mapping[str, str], texts: Set[str] = frozenset()) -> dict[str, Any]:
    """A row of a table with numbers converted, except in the text columns."""
    return {k: v if k in texts else typed(v) for k, v in row.items()}


def typed(text: str) -> Any:
    """A cell as an integer or float if it is one, otherwise unchanged."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
