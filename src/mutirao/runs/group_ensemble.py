"""What the models of several groups say together, for one client that asks: weights, accuracies and predictions."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.clustering.auto import normalise
from mutirao.clustering.ensemble import combine, weights_by_distance, weights_by_sample, weights_by_validation
from mutirao.clustering.group_state import Grouping
from mutirao.clustering.late_joiners import centroids
from mutirao.config import read_toml, resolve
from mutirao.core.fleet import ClientId
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task, find
from mutirao.io import write_whole
from mutirao.runs.run_folder import load_run
from mutirao.runs.trust import Trust, check_trust, distrust, is_own_run

WEIGHTS = ("sample", "validation", "distance", "equal")
FEW, MOST = 20, 2000  # samples an asker weighs groups by, and test samples of all clients that are judged at most

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupEnsemble:
    """What the groups' models say together: weights, and shares of right answers on two sets of test data."""

    client: ClientId
    group: str  # its own; empty if it waits
    by: str
    weights: dict[str, float]
    own: dict[str, float]  # on the client's own test data: `combined`, and the model of each group alone
    union: dict[str, float]  # on the test data of all clients
    guesses: list[tuple[int, int, float]]  # label, guess and its probability, of each own test sample

    def write(self, folder: Path) -> list[Path]:
        """Write `weights.json` and `predictions.csv`; which files."""
        folder.mkdir(parents=True, exist_ok=True)
        table, text = folder / "predictions.csv", io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["sample", "label", "guess", "probability"])
        rows.writerows([i, label, guess, f"{p:.6f}"] for i, (label, guess, p) in enumerate(self.guesses))
        write_whole(table, text.getvalue())
        told = {k: v for k, v in asdict(self).items() if k != "guesses"}
        write_whole(folder / "weights.json", json.dumps(told, indent=1) + "\n")
        return [folder / "weights.json", table]


def combine_run(
    folder: Path, client: ClientId, by: str = "sample", few: int = FEW, trust: Trust = distrust
) -> GroupEnsemble:
    """Ask the models of a run's groups together, for a client of it that is simulated here."""
    table = read_toml(folder / "config.toml")
    check_trust(folder / "config.toml", table, trust, (), lambda: is_own_run(folder))
    recipe = find(str(table.pop("recipe", "")))
    run = load_run(folder)
    state = Grouping.from_memory(run.memory)
    if state is None:
        raise ConfigError(f"{folder}: the run has no groups to combine; set cluster=auto, or run groups")
    task = recipe.prepare(resolve(recipe.config, table))
    if client not in task.population:
        known = ", ".join(list(task.population)[:8])
        raise ConfigError(f"client: there is no {client!r} in {folder}; there are {known}")
    return combine_for(task, run, state, client, by, few)


def combine_for(task: Task, run: Run, state: Grouping, client: ClientId, by: str, few: int) -> GroupEnsemble:
    """The same of a task and a run."""
    from mutirao.training.samples import Samples, own_test_samples

    if task.opinions is None:
        raise ConfigError("combine: it asks models that tell classes apart, which those of this task cannot be asked")
    data = task.population[client]
    mine, test = Samples.of(data).first(few), own_test_samples(data)
    everybody = [own_test_samples(task.population[c]) for c in sorted(task.population)]
    said, labels = predict_by_group(task, run, test), true_labels(test)
    union, right = zip(*((predict_by_group(task, run, part), true_labels(part)) for part in everybody), strict=True)
    classes = {g: list(names) for g, names in state.classes.items()}
    all_said = {g: np.concatenate([part[g] for part in union]) for g in classes}
    all_labels = np.concatenate(right)
    chosen = np.linspace(0, len(all_labels) - 1, min(MOST, len(all_labels))).astype(np.intp)
    judged = chosen
    if by == "sample":
        weights = weights_by_sample(predict_by_group(task, run, mine), classes, true_labels(mine))
    elif by == "validation":  # half of the common samples weigh, the other half judges
        held, judged = chosen[::2], chosen[1::2]
        weights = weights_by_validation(
            {g: ensemble_accuracy({g: p[held]}, classes, None, all_labels[held]) for g, p in all_said.items()}
        )
    else:
        weights = (
            dict.fromkeys(classes, 1.0) if by == "equal" else weights_by_distance(distances_to_groups(state, client))
        )
    total = 1 + max(int(all_labels.max()), *(c for names in classes.values() for c in names))
    whole = combine(said, classes, weights, total)
    guess = whole.argmax(1)
    of_union = {g: p[judged] for g, p in all_said.items()}
    alone = {g: ensemble_accuracy({g: p}, classes, None, labels) for g, p in said.items()}
    alone_union = {g: ensemble_accuracy({g: p}, classes, None, all_labels[judged]) for g, p in of_union.items()}
    return GroupEnsemble(
        client=client,
        group=state.groups.group_of(client),
        by=by,
        weights=normalise_weights(weights),
        own={"combined": float(np.mean(guess == labels)), **alone},
        union={"combined": ensemble_accuracy(of_union, classes, weights, all_labels[judged]), **alone_union},
        guesses=[(int(y), int(g), float(whole[i, g])) for i, (y, g) in enumerate(zip(labels, guess, strict=True))],
    )


def predict_by_group(task: Task, run: Run, samples: Any) -> dict[str, npt.NDArray[np.float64]]:
    """What the model of each group says of samples."""
    if not len(samples):
        raise ConfigError("client: it has no samples of its own to ask about")
    return dict(task.opinions(run, samples)) if task.opinions is not None else {}


def true_labels(samples: Any) -> Labels:
    """The classes of samples."""
    return np.asarray(samples.batch(slice(0, len(samples)))[1].numpy(), np.int64)


def ensemble_accuracy(
    said: Mapping[str, Any], classes: Mapping[str, list[int]], weights: Mapping[str, float] | None, labels: Labels
) -> float:
    """The share of samples that groups name rightly together."""
    return float(np.mean(combine(said, classes, weights).argmax(1) == labels))


def distances_to_groups(state: Grouping, client: ClientId) -> dict[str, float]:
    """How far the client's signature is from the middle of each group."""
    groups = state.groups
    if client not in groups.clients or not groups.signatures.shape[1]:
        raise ConfigError(f"weights=distance: the run has no signature of {client!r}; use sample")
    points = normalise(groups.signatures, groups.directions)
    known = groups.labels >= 0
    centres = centroids(points[known], groups.labels[known], groups.count)
    away = np.linalg.norm(centres - points[groups.clients.index(client)], axis=1)
    return dict(zip(groups.names, away.tolist(), strict=True))


def normalise_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights that sum to one."""
    total = sum(weights.values())
    return {g: w / total for g, w in sorted(weights.items())}
