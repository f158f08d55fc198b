"""The groups recipe: what each setting does to clients, groups and models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mutirao.clustering import combine
from mutirao.clustering.ensemble import weights_by_sample
from mutirao.config import build, resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.run_folder import load_run
from mutirao.training.samples import Samples

RECIPE = find("groups")
SMALL = {
    "clients": 20,
    "rounds": 2,
    "epochs": 2,
    "warm_epochs": 8,
    "per_round": 1.0,
    "judge_samples": 40,
    "references": 0,
}


def config_of(**settings: Any) -> Any:
    return resolve(RECIPE.config, {**SMALL, **settings})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "signature", "epochs"),
    [("skewed", "bias", 8), ("permuted", "weights", 20), ("rotated", "projection", 40)],
)
def test_hidden_populations_are_found_and_served(hidden: str, signature: str, epochs: int, tmp_path: Path) -> None:
    settings = {"hidden": hidden, "populations": 3, "clients": 12, "warm_epochs": epochs, "epochs": 4, "rounds": 4}
    config = config_of(signature=signature, **settings)
    found = execute("groups", config, tmp_path / "groups", pictures=False)["final"]
    assert found["rand"] == 1.0
    one = execute("groups", config_of(cluster="one", **settings), tmp_path / "one", pictures=False)["final"]
    assert one["groups"] == 1
    if hidden != "skewed":  # one model serves clients that differ only in how often they see a class
        assert found["accuracy"] > one["accuracy"]


def test_clients_hold_what_their_population_says() -> None:
    for hidden in ("skewed", "permuted", "rotated"):
        config = config_of(hidden=hidden, populations=4)
        task = RECIPE.task(config)
        truth = task.knows.truth
        assert sorted(np.bincount(list(truth.values()))) == [5, 5, 5, 5]
        everyone = np.concatenate([h.train.index for h in task.population.values()])
        assert len(np.unique(everyone)) == len(everyone) == 1437
        if hidden == "skewed":
            for c, holdout in task.population.items():
                labels = holdout.train.y.numpy()[holdout.train.index]
                friends = [d for d, g in truth.items() if g == truth[c] and d != c]
                other = np.concatenate(
                    [task.population[d].train.y.numpy()[task.population[d].train.index] for d in friends]
                )
                ours, theirs = (np.bincount(v, minlength=10) / len(v) for v in (labels, other))
                assert np.abs(ours - theirs).sum() < 0.4


def test_everyone_is_alike_without_hidden_differences(tmp_path: Path) -> None:
    summary = execute("groups", config_of(partition="iid"), tmp_path / "run", pictures=False)
    assert list(summary["groups"]) == ["g0"]
    assert summary["final"]["rand"] == 1.0


def test_a_group_of_the_first_classes_is_served_as_others_are(tmp_path: Path) -> None:
    """A head of the classes 0 and 1 was once taken for one of all classes, and its clients failed."""
    settings = {"clients": 10, "rounds": 2, "optimizer": "adam", "lr": 0.01, "momentum": 0.0}
    config = config_of(partition={"name": "by_class", "order": "sorted"}, **settings)
    summary = execute("groups", config, tmp_path / "run", pictures=False)
    assert summary["class_maps"] == {f"g{i}": [2 * i, 2 * i + 1] for i in range(5)}
    assert summary["group_accuracy"].keys() == summary["class_maps"].keys()
    assert all(row["failed"] == "0" for row in CsvTable(tmp_path / "run" / "history.csv").read())


def test_a_full_head_keeps_all_classes(tmp_path: Path) -> None:
    summary = execute("groups", config_of(head="full"), tmp_path / "run", pictures=False)
    assert set(map(len, summary["class_maps"].values())) == {10}
    assert summary["final"]["accuracy_known"] >= summary["final"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["sign_flip", "label_flip", "inner_product"])
def test_liars_are_kept_out(attack: str, tmp_path: Path) -> None:
    settings = {"partition": {"name": "by_class", "classes": 5}, "rounds": 4}
    clean = execute("groups", config_of(**settings), tmp_path / "clean", pictures=False)["final"]
    held = config_of(attack=attack, screen="robust", **settings)
    screened = execute("groups", held, tmp_path / "screened", pictures=False)["final"]
    believed = execute("groups", config_of(attack=attack, **settings), tmp_path / "open", pictures=False)["final"]
    assert screened["caught"] > 0.9
    assert screened["false_rejections"] < 0.05
    assert screened["accuracy"] > clean["accuracy"] - 0.03
    assert screened["accuracy"] > believed["accuracy"]


def test_models_of_groups_are_combined_over_the_union_of_classes(tmp_path: Path) -> None:
    config = config_of(rounds=6, epochs=4, partition={"name": "by_class", "classes": 5})
    execute("groups", config, tmp_path / "run", pictures=False)
    task, run = RECIPE.task(config), load_run(tmp_path / "run")
    own = task.population["c03"]
    p, classes = task.knows.member.predictions(run, own.test)
    y = own.test.y.numpy()
    few = Samples(own.train.x, own.train.y, own.train.index[:20])
    small, _ = task.knows.member.predictions(run, few)
    weights = weights_by_sample(small, classes, own.train.y.numpy()[few.index])
    assert max(weights.values()) > 0.99  # the asker's own group
    guess = combine(p, classes, weights, total=10).argmax(1)
    assert np.mean(guess == y) > 0.85
    blind = combine(p, classes, total=10).argmax(1)
    assert 0.3 < np.mean(blind == y) <= np.mean(guess == y)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="centralised"):
        RECIPE.prepare(config_of(centralised=True))
    with pytest.raises(ConfigError, match="populations"):
        RECIPE.task(config_of(hidden="skewed", populations=30))
    with pytest.raises(ConfigError, match="no part is called 'magic'"):
        config_of(cluster="magic")
    with pytest.raises(ConfigError, match="min_samples is 1, but must be 0 or at least 2"):
        build("cluster", config_of(cluster={"name": "auto", "min_samples": 1}).cluster)
    with pytest.raises(ConfigError, match="signature"):
        resolve(RECIPE.config, {**SMALL, "signature": {"name": "projection", "width": 3}})


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "classes", "groups"), [("iid", 0, 1), ("by_class", 2, 5), ("by_class", 5, 2)])
def test_real_pictures_give_one_five_and_two_groups(
    partition: str, classes: int, groups: int, real_data: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"partition": {"name": partition, **({"classes": classes} if classes else {})}}
    settings |= {"data": str(real_data), "clients": 10, "samples": 300, "warm_epochs": 5, "lr": 0.01}
    config = config_of(**{**settings, "rounds": 1, "epochs": 1, "judge_samples": 20, "per_round": 0.1, "seed": 3})
    summary = execute("groups", config, tmp_path / "run", pictures=False)
    assert len(summary["groups"]) == groups
    assert summary["final"]["rand"] == 1.0


@pytest.mark.parametrize("aggregate", ["scaffold", "feddyn"])
def test_what_clients_keep_for_a_group_does_not_outlive_it(aggregate: str, tmp_path: Path) -> None:
    settings = {"clients": 10, "aggregate": aggregate, "regroup": 2, "rounds": 3}
    with pytest.raises(ConfigError, match=f"aggregate={aggregate}: clients keep a state .* use regroup=0"):
        execute("groups", settings, tmp_path / "run")
