"""A run as a notebook shows it."""

from pathlib import Path

import numpy as np

from mutirao.core.rounds import Run
from mutirao.report.notebook import show
from mutirao.runs.execute import execute

ROWS = [{"round": i, "selected": 10, "accuracy": 1 - 1 / (i + 1), "<b>": 1.0 / i, "regret": i} for i in (1, 2, 3)]


def test_a_notebook_shows_a_run_with_its_curve() -> None:
    page = show(Run({"w": np.zeros(2)}, round=3, history=ROWS))._repr_html_()
    assert "round 3" in page
    assert page.count("<polyline") == 3
    assert "accuracy: last 0.75, best 0.75" in page
    assert "<b>:" not in page.replace("<b>Run</b>:", "")
    assert "<polyline" not in show(Run({}))._repr_html_()


def test_the_run_of_a_folder_is_shown_as_it_ended(tmp_path: Path) -> None:
    execute("quickstart", {"rounds": 2, "epochs": 1}, tmp_path / "run")
    page = show(tmp_path / "run")._repr_html_()
    assert "round 2" in page


def test_a_best_value_is_named_only_where_it_is_known_which_way_is_better() -> None:
    run = Run({}, round=3, history=ROWS)
    assert "regret: last 3<" in show(run)._repr_html_()
    assert "regret: last 3, best 1<" in show(run, {"regret": "lower"})._repr_html_()
