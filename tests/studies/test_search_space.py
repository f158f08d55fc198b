"""What is tried of a method: grids, and ranges that Optuna proposes from."""

from typing import Any

import pytest

from mutirao.errors import ConfigError
from mutirao.studies.search_space import Grid, Proposed, SearchRange, read_grid, read_ranges


def test_a_grid_is_every_combination_once() -> None:
    grid = Grid({"lr": [0.1, 0.2], "epochs": [1, 2, 3]})
    points = grid.ask()
    assert len(set(points)) == grid.size == 6
    assert points[0] == (("lr", 0.1), ("epochs", 1))
    assert grid.ask() == []


def test_a_winner_at_the_edge_of_its_grid_is_known() -> None:
    grid = Grid({"lr": [0.3, 0.1, 0.2], "epochs": [5], "select": ["a", "b"], "flag": [True, False]})
    inside = (("lr", 0.2), ("epochs", 5), ("select", "a"), ("flag", True))
    assert grid.edges(inside) == []
    assert grid.edges((("lr", 0.3), *inside[1:])) == ["lr = 0.3 is the largest tried"]
    assert grid.edges((("lr", 0.1), *inside[1:])) == ["lr = 0.1 is the smallest tried"]


def found(search: Proposed, score: Any) -> list[Any]:
    points = []
    while asked := search.ask():
        points += asked
        for point in asked:
            search.tell(point, score(dict(point)))
    return points


def test_optuna_proposes_the_same_points_for_the_same_results_and_learns_from_them() -> None:
    ranges = {"lr": SearchRange(1e-3, 1.0, log=True), "epochs": SearchRange(1, 5), "select": ["a", "b"]}

    def score(point: dict[str, Any]) -> float:
        return -abs(point["lr"] - 0.1) + (point["select"] == "b")

    first = found(Proposed(ranges, 40), score)
    assert first == found(Proposed(ranges, 40), score)
    assert first[:10] == found(Proposed(ranges, 10), score)  # so that more trials go on with those there are
    other = found(Proposed(ranges, 12), lambda point: point["lr"])
    assert first[:10] == other[:10]  # methods begin alike
    assert first[:12] != other
    assert all(
        1e-3 <= p["lr"] <= 1 and isinstance(p["epochs"], int) and 1 <= p["epochs"] <= 5 for p in map(dict, first)
    )
    late = [dict(p)["select"] for p in first[20:]]
    assert late.count("b") > 15  # the better half is what it goes for


def test_a_trial_that_failed_teaches_nothing_but_is_counted() -> None:
    search = Proposed({"lr": SearchRange(0.0, 1.0)}, 3)
    assert len(found(search, lambda point: None)) == 3


def test_the_ends_of_a_range_are_told_on_its_own_scale() -> None:
    search = Proposed({"lr": SearchRange(1e-3, 1.0, log=True), "mu": SearchRange(0.0, 1.0)}, 1)
    assert search.edges((("lr", 0.01), ("mu", 0.5))) == []
    assert search.edges((("lr", 0.9), ("mu", 0.5))) == ["lr = 0.9 is close to the high end of its range, 1"]
    assert search.edges((("lr", 0.00101), ("mu", 0.01))) == [
        "lr = 0.00101 is close to the low end of its range, 0.001",
        "mu = 0.01 is close to the low end of its range, 0",
    ]


def test_tables_may_be_nested_as_settings_are() -> None:
    assert read_grid("g", {"lr": [1], "aggregate": {"mu": [0.1, 1]}}) == {"lr": [1], "aggregate.mu": [0.1, 1]}
    nested = {"aggregate": {"mu": {"low": 0.1, "high": 1.0}}, "select": ["a", "b"]}
    assert read_ranges("r", nested) == {"aggregate.mu": SearchRange(0.1, 1.0), "select": ["a", "b"]}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "must be a table"),
        (3, "must be a table"),
        ({"lr": 0.1}, "must be a list"),
        ({"lr": []}, "must be a list"),
        ({"lr": [0.1, 0.1]}, "different numbers"),
        ({"lr": [[0.1]]}, "different numbers"),
    ],
)
def test_a_wrong_grid_is_refused(table: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_grid("tune.grid", table)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.1, "must be a range such as"),
        ({"low": 0.1}, "low and high must be numbers"),
        ({"low": 1, "high": 1}, "the first below the second"),
        ({"low": 0, "high": float("inf")}, "low and high must be numbers"),
        ({"low": "a", "high": 1}, "low and high must be numbers"),
        ({"low": 0.0, "high": 1.0, "log": True}, "low must be above 0"),
        ({"low": 0.0, "high": 1.0, "log": 3}, "true or false"),
        ({"low": 0.0, "hihg": 1.0}, "unknown key 'hihg'; did you mean 'high'?"),
    ],
)
def test_a_wrong_range_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_ranges("tune.range", {"lr": given})
    assert said in str(caught.value)
