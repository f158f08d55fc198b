"""The regimes of docs/reproductions/selection-regimes.md: every one can be made, and is what the page says."""

from pathlib import Path

import numpy as np

from mutirao.config import parse_assignment, resolve
from mutirao.experiments.task import find
from mutirao.simulation.availability import read_schedule
from mutirao.studies.study import Study, read_study
from research import regimes

ROOT = Path(__file__).parents[2]


def study_of(name: str) -> Study:
    regime = regimes.REGIMES[name]
    return read_study(ROOT / "studies" / regime.file, [parse_assignment(text) for text in (*regime.sets, "seeds=1")])


def classes_of(study: Study) -> dict[str, set[int]]:
    """The classes of each client in the first cell."""
    task = find("selection").task(resolve(find("selection").config, {}, study.cells[0].settings))
    return {name: set(samples.train.y[samples.train.index].tolist()) for name, samples in task.population.items()}


def test_every_regime_has_all_policies_of_the_ordinary_case() -> None:
    usual = study_of("ordinary").methods
    assert usual[0] == "random"
    for name in regimes.REGIMES:
        assert study_of(name).methods[: len(usual)] == usual
        assert f"<!-- {name} -->\n" in regimes.PAGE.read_text()


def test_who_comes_late_are_the_clients_of_two_classes() -> None:
    held = classes_of(study_of("late"))
    late = read_schedule(str(ROOT / "studies/late-classes.csv"))
    assert {from_ for times in late.values() for from_, _ in times} == {51}
    assert set.union(*(held[c] for c in late)) == {8, 9}
    assert not set.union(*(held[c] for c in held if c not in late)) & {8, 9}


def test_two_classes_are_with_three_clients_each() -> None:
    held = classes_of(study_of("rare"))
    owners = np.sort([sum(c in mine for mine in held.values()) for c in range(10)])
    assert owners[:2].tolist() == [3, 3]
    assert owners[2] > 10
