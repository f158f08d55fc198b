"""An ensemble of the models of several groups, weighted for one client: weights, accuracies and predictions."""

import csv
import io
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.clustering.auto import normalise
from mutirao.clustering.ensemble import combine, weights_by_distance, weights_by_sample, weights_by_validation
from mutirao.clustering.formation import centroids
from mutirao.clustering.group_state import Grouping
from mutirao.config import read_toml, resolve
from mutirao.core.fleet import ClientId
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task, find
from mutirao.io import write_whole
from mutirao.runs.run_folder import load_run
from mutirao.runs.trust import Trust, check_trust, distrust, is_own_run

WEIGHTS = ("sample", "validation", "distance", "equal")
FEW = 20  # samples of the client that weigh the groups
MOST = 2000  # test samples of all clients that are evaluated at most

Labels = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GroupEnsemble:
    """The ensemble's weights for a client, and accuracies on two sets of test data."""

    client: ClientId
    group: str  # its own; empty if it waits for one
    by: str
    weights: dict[str, float]
    own: dict[str, float]  # accuracy on the client's own test data: of `combined`, and of each group's model alone
    union: dict[str, float]  # accuracy on the test data of all clients
    guesses: list[tuple[int, int, float]]  # label, prediction and its probability, for each own test sample

    def write(self, folder: Path) -> list[Path]:
        """Write `weights.json` and `predictions.csv`; return both paths."""
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "predictions.csv"
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["sample", "label", "guess", "probability"])
        for sample, (label, guess, probability) in enumerate(self.guesses):
            rows.writerow([sample, label, guess, f"{probability:.6f}"])
        write_whole(table, text.getvalue())
        content = asdict(self)
        del content["guesses"]
        write_whole(folder / "weights.json", json.dumps(content, indent=1) + "\n")
        return [folder / "weights.json", table]


def combine_run(
    folder: Path, client: ClientId, by: str = "sample", few: int = FEW, trust: Trust = distrust
) -> GroupEnsemble:
    """The ensemble of a run's groups for one of its simulated clients."""
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
    """The ensemble of a run's groups for one client."""
    from mutirao.training.samples import Samples, own_test_samples

    if task.opinions is None:
        raise ConfigError("combine: expected a task that classifies; this one gives no class probabilities")
    classes = {group: list(names) for group, names in state.classes.items()}
    own_samples = Samples.of(task.population[client]).first(few)
    own_test = own_test_samples(task.population[client])
    own_predictions = predict_by_group(task, run, own_test)
    own_labels = true_labels(own_test)
    parts: list[dict[str, Probabilities]] = []
    label_parts: list[Labels] = []
    for name in sorted(task.population):
        test = own_test_samples(task.population[name])
        parts.append(predict_by_group(task, run, test))
        label_parts.append(true_labels(test))
    predictions = {group: np.concatenate([part[group] for part in parts]) for group in classes}
    labels = np.concatenate(label_parts)
    # Spread over all clients: they are joined by name, so the first samples would be those of few clients.
    evaluated = np.linspace(0, len(labels) - 1, min(MOST, len(labels))).astype(np.intp)
    if by == "sample":
        weights = weights_by_sample(predict_by_group(task, run, own_samples), classes, true_labels(own_samples))
    elif by == "validation":
        # Half of the common samples give the weights; accuracy is measured on the other half alone.
        validation = evaluated[::2]
        evaluated = evaluated[1::2]
        weights = weights_by_validation(
            accuracy_of_each(pick_rows(predictions, validation), classes, labels[validation])
        )
    elif by == "equal":
        weights = dict.fromkeys(classes, 1.0)
    else:
        weights = weights_by_distance(distances_to_groups(state, client))
    total = 1 + max(int(labels.max()), *itertools.chain(*classes.values()))
    combined = combine(own_predictions, classes, weights, total)
    guesses = combined.argmax(1)
    union = pick_rows(predictions, evaluated)
    union_labels = labels[evaluated]
    return GroupEnsemble(
        client=client,
        group=state.groups.group_of(client),
        by=by,
        weights=normalise_weights(weights),
        own={
            "combined": float(np.mean(guesses == own_labels)),
            **accuracy_of_each(own_predictions, classes, own_labels),
        },
        union={
            "combined": ensemble_accuracy(union, classes, weights, union_labels),
            **accuracy_of_each(union, classes, union_labels),
        },
        guesses=list(zip(own_labels.tolist(), guesses.tolist(), combined.max(1).tolist(), strict=True)),
    )


def predict_by_group(task: Task, run: Run, samples: Any) -> dict[str, Probabilities]:
    """Each group's class probabilities of the samples."""
    if not len(samples):
        raise ConfigError("client: it has no samples of its own to predict")
    if task.opinions is not None:
        return dict(task.opinions(run, samples))
    return {}


def pick_rows(predictions: Mapping[str, Probabilities], rows: npt.NDArray[np.intp]) -> dict[str, Probabilities]:
    """The same predictions of some samples."""
    return {group: values[rows] for group, values in predictions.items()}


def accuracy_of_each(
    predictions: Mapping[str, Probabilities], classes: Mapping[str, list[int]], labels: Labels
) -> dict[str, float]:
    """The accuracy of each group's model alone."""
    return {group: ensemble_accuracy({group: values}, classes, None, labels) for group, values in predictions.items()}


def true_labels(samples: Any) -> Labels:
    """The labels of samples."""
    return np.asarray(samples.batch(slice(0, len(samples)))[1].numpy(), np.int64)


def ensemble_accuracy(
    predictions: Mapping[str, Any],
    classes: Mapping[str, list[int]],
    weights: Mapping[str, float] | None,
    labels: Labels,
) -> float:
    """Accuracy of the groups' combined predictions."""
    return float(np.mean(combine(predictions, classes, weights).argmax(1) == labels))


def distances_to_groups(state: Grouping, client: ClientId) -> dict[str, float]:
    """Distances of the client's signature from the centre of each group."""
    groups = state.groups
    if client not in groups.clients or not groups.signatures.shape[1]:
        raise ConfigError(f"weights=distance: the run has no signature of {client!r}; use sample")
    points = normalise(groups.signatures, groups.directions)
    known = groups.labels >= 0
    centres = centroids(points[known], groups.labels[known], groups.count)
    away = np.linalg.norm(centres - points[groups.clients.index(client)], axis=1)
    return dict(zip(groups.names, away.tolist(), strict=True))


def normalise_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights, scaled to sum to one."""
    total = sum(weights.values())
    return {g: w / total for g, w in sorted(weights.items())}
