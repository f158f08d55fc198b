"""Queries won and lost against another run: the picture counts them, and what cannot be compared is named."""

import csv
from pathlib import Path

import pytest

from mutirao.errors import ConfigError
from mutirao.report import execute
from mutirao.report.plot_kinds import draw
from mutirao.systems.ranking import report

TINY = {"queries": 60, "clients": 4, "rounds": 1, "hidden": 4}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("runs")
    for name, more in (("a", {}), ("b", {"lr": 0.3, "aggregate": "mean"})):
        execute("ranking", TINY | more, home / name, pictures=False)
    return home / "a", home / "b"


def test_two_runs_are_held_against_each_other(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plotted = {}
    monkeypatch.setattr(report, "draw_wins", lambda found, label, path: plotted.update(found, label=label))
    a, b = two
    assert draw(a, "wins", against=str(b)) == [a / "wins.png"]
    assert plotted.pop("label") == "ndcg@5, difference"
    sides = []
    for run in two:
        with (run / "queries.csv").open(newline="") as file:
            sides.append({row["query"]: float(row["ndcg@5"]) for row in csv.DictReader(file)})
    ((title, found),) = plotted.items()
    assert sorted(found) == pytest.approx(sorted(value - sides[1][query] for query, value in sides[0].items()))
    assert title.startswith("a against b\nURisk ")


def test_the_picture_is_written(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    draw(a, "wins", tmp_path / "p.png", metric="mrr@10", against=str(b))
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "--against FOLDER"),
        ({"against": "nowhere"}, "nowhere has no queries.csv"),
        ({"against": "B", "metric": "ndcg@6"}, "no query has a metric 'ndcg@6'"),
    ],
)
def test_what_cannot_be_compared_is_named(two: tuple[Path, Path], given: dict[str, str], named: str) -> None:
    a, b = two
    with pytest.raises(ConfigError, match=named):
        draw(a, "wins", **{k: str(b) if v == "B" else v for k, v in given.items()})
