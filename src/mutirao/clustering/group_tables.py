"""Tables of a run's groups: members, the evidence for the number of groups, and the data of their pictures."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.clustering.auto import Division, Points, Range, divide, knee, min_samples_for, normalise, scan
from mutirao.clustering.clusterers import NAMES
from mutirao.clustering.formation import quality
from mutirao.clustering.group_state import MAX_CLUSTERED, Grouping, Groups
from mutirao.core.fleet import ClientId
from mutirao.core.rounds import Run
from mutirao.io import write_whole
from mutirao.randomness import rng

COMPARED = 200  # clients on which other clusterers are tried


def summarise_groups(run: Run, truth: Mapping[ClientId, int] | None = None, metric: str = "accuracy") -> dict[str, Any]:
    """The entries of summary.json on groups; `metric` is their score."""
    state = Grouping.from_memory(run.memory)
    if state is None:
        return {}
    summary: dict[str, Any] = {
        "groups": state.groups.members(),
        "waiting": state.groups.waiting(),
        f"group_{metric}": {g: rows[-1][1] for g, rows in sorted(state.scores.items()) if rows},
        "class_maps": state.classes,
        "settled": state.settled,
        "group_quality": quality(state.groups, truth),
        "other_clusterers": count_by_others(state.groups, run.seed),
        "eps_range": fitting_range(state.groups),
    }
    if truth:
        summary["true_groups"] = by_true_group(run, truth)
    return summary


def by_true_group(run: Run, truth: Mapping[ClientId, int]) -> dict[str, dict[str, float]]:
    """The mean of the last metrics of each true group's clients on their own test data."""
    out: dict[str, dict[str, float]] = {}
    for group in sorted(set(truth.values())):
        rows = [run.roster.row(c) for c, g in truth.items() if g == group and c in run.roster]
        values = {name: run.roster.figure(f"own_{name}")[rows] for name in ("accuracy", "accuracy_known")}
        out[str(group)] = {k: float(np.nanmean(v)) for k, v in values.items() if np.isfinite(v).any()}
    return out


def count_by_others(groups: Groups, seed: int) -> dict[str, int]:
    """How many groups each clusterer finds in the same signatures."""
    if not groups.has_signatures:
        return {}
    points = groups.signatures[:: max(1, len(groups.clients) // COMPARED)]
    makers = {name: make for name, make in NAMES.items() if name not in ("one", "dbscan")}
    found = {name: make()(points, groups.directions, rng(seed, 0, "groups"))[0] for name, make in makers.items()}
    return {name: int(labels.max(initial=-1)) + 1 for name, labels in found.items()}


def fitting_range(groups: Groups) -> list[float] | None:
    """The range of eps for which DBSCAN finds as many groups as were formed and leaves no client out; None if none."""
    points = thin(groups)
    if len(points) < 2:
        return None
    fitting = [r for r in scan(points, neighbours(groups)) if r.groups == groups.count and r.noise == 0]
    if fitting:
        return [fitting[0].low, min(fitting[-1].high, 1e9)]
    return None


def thin(groups: Groups) -> Points:
    """The normalised signatures of the initial clients, thinned to at most about `MAX_CLUSTERED`."""
    if not groups.has_signatures:
        return groups.signatures[:0]
    return normalise(groups.signatures, groups.directions)[:: max(1, len(groups.clients) // MAX_CLUSTERED)]


def neighbours(groups: Groups) -> int:
    """The `min_samples` of the automatic choice, or what it would have been."""
    if groups.divisions:
        return groups.divisions[0].min_samples
    return min_samples_for(min(len(groups.clients), MAX_CLUSTERED))


def evidence(groups: Groups) -> dict[str, Any]:
    """The evidence for the groups: each division examined, and the knee of all k-distances."""
    points = thin(groups)
    k = neighbours(groups)
    looked = groups.divisions or ((divide(points, min_samples=k)[0],) if len(points) > 1 else ())
    rows = [{**asdict(d), "high": d.high if np.isfinite(d.high) else None, "holds": d.holds} for d in looked]
    return {"divisions": rows, "min_samples": k, "knee": knee(points, k) if len(points) > 1 else None}


def scans(groups: Groups) -> dict[str, list[Range]]:
    """The scans of eps in the full space of signatures, and in the components in which the choice was made."""
    points = thin(groups)
    k = neighbours(groups)
    if len(points) < k:
        return {}
    found, within = divide(points, min_samples=k)
    return {"signatures": scan(points, k), f"first {found.components} components": scan(within, k)}


def write_evidence(run: Run, path: Path, metric: str = "accuracy") -> None:
    """Write `groups.json`: members, distances, scores by round, and the evidence for the number of groups."""
    if (state := Grouping.from_memory(run.memory)) is not None:
        scores = {g: [{"round": r, metric: v} for r, v in rows] for g, rows in state.scores.items()}
        table = summarise_groups(run, metric=metric) | {"scores": scores, "evidence": evidence(state.groups)}
        write_whole(path, json.dumps(table, indent=1) + "\n")


def write_scan(run: Run, path: Path) -> None:
    """Write `eps_scan.csv`: the number of groups that DBSCAN finds in each range of eps."""
    if (state := Grouping.from_memory(run.memory)) is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["space", "from", "to", "groups", "noise"])
        for space, rows in scans(state.groups).items():
            writer.writerows([space, f"{r.low:.6g}", f"{r.high:.6g}", r.groups, f"{r.noise:.4f}"] for r in rows)
        write_whole(path, text.getvalue())


@dataclass(frozen=True, eq=False)
class Plane:
    """The clients in the plane of the first two principal components of their signatures."""

    groups: Groups
    points: Points  # one row for each client
    shares: tuple[float, float]  # of the variance, of the two components


def plane_of(run: Run) -> Plane | None:
    """The clients of a run in the plane; None if no groups were formed, or not by signatures."""
    if (state := Grouping.from_memory(run.memory)) is None or not state.groups.has_signatures:
        return None
    groups = state.groups
    points = normalise(groups.signatures, groups.directions)
    away = points - points.mean(0)
    _, s, components = np.linalg.svd(away[:: max(1, len(away) // MAX_CLUSTERED)], full_matrices=False)
    plane = np.zeros((len(points), 2))
    wide = min(2, len(s))
    plane[:, :wide] = away @ components[:wide].T
    first, second = [*(s**2 / max(float(np.sum(s**2)), 1e-300))[:2].tolist(), 0.0, 0.0][:2]
    return Plane(groups, plane, (first, second))


@dataclass(frozen=True, eq=False)
class Scan:
    """The number of groups that DBSCAN finds for each eps, by space, and the division that was chosen."""

    tables: dict[str, list[Range]]
    chosen: Division


def scan_of(run: Run) -> Scan | None:
    """The scan of a run; None if no groups were formed, or of too few."""
    state = Grouping.from_memory(run.memory)
    if state is None or not (tables := scans(state.groups)):
        return None
    return Scan(tables, divide(thin(state.groups), min_samples=neighbours(state.groups))[0])


FILES = {"eps_scan.csv": write_scan, "groups.json": write_evidence}
