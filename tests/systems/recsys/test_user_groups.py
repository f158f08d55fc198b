"""Users in groups are evaluated by their own group's items: with one matrix for all that is the ordinary evaluation."""

from typing import Any

import numpy as np
import pytest

from mutirao.clustering.formation import form
from mutirao.clustering.group_state import Groups
from mutirao.config import resolve
from mutirao.experiments.task import find
from mutirao.systems.recsys.fedrecon import ITEMS


def task_of(**more: Any) -> Any:
    settings = {"clients": 60, "cluster": "one", "dimension": 6, **more}
    return find("recsys").prepare(resolve(find("recsys").config, settings))


def halves(task: Any) -> Groups:
    names = sorted(task.population)
    signs = {c: np.full(2048, float(i % 2)) + np.arange(2048) / 1e6 * i for i, c in enumerate(names)}
    return form(signs, noise="nearest")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"split": "time"}, {"split": "users"}, {"split": "users", "loss": "weighted"}], ids=str
)
def test_one_matrix_for_all_groups_is_evaluated_as_ever(settings: dict[str, Any]) -> None:
    task = task_of(**settings)
    groups, items = halves(task), task.initial()
    assert groups.count == 2
    together, each = task.evaluate_groups(dict.fromkeys(groups.names, items), groups)
    whole = task.evaluate(items)
    for name, value in together.items():
        assert value == pytest.approx(whole[name], rel=1e-6)
    assert set(each) <= set(groups.names)


def test_each_user_is_evaluated_by_the_items_of_its_group() -> None:
    task = task_of(split="time")
    groups, items = halves(task), task.initial()
    bad = {ITEMS: items[ITEMS] + np.float32(3)}
    good, mixed = (task.evaluate_groups({"g0": items, "g1": other}, groups) for other in (items, bad))
    assert mixed[1]["g0"] == good[1]["g0"]
    assert mixed[1]["g1"]["rmse"] > good[1]["g1"]["rmse"]
    assert good[0]["rmse"] < mixed[0]["rmse"] < mixed[1]["g1"]["rmse"]
