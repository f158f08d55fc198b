"""What a policy gains over random selection: by hand-made curves, and against scipy."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from research.gains import Field, clock, compare_all, draw_gains, end_of, figures_of, shown_of, spent_to, swing_of
from scipy.stats import ttest_rel

from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.reader import Record


def run(folder: Path, accuracy: list[float], seconds: list[float] | None = None) -> Record:
    """A run with these accuracies by round; the worst clients are at half of them."""
    folder.mkdir(parents=True)
    rows = [{"round": t, "accuracy": a, "accuracy_worst_decile": a / 2} for t, a in enumerate(accuracy, 1)]
    for row, took in zip(rows, seconds or [], strict=False):
        row["sim_seconds"] = took
    CsvTable(folder / "history.csv").append(rows)
    (folder / "summary.json").write_text(json.dumps({"directions": {"accuracy": "higher"}}))
    return Record.begun(folder)


def test_the_end_is_the_mean_of_ten_rounds_within_the_budget(tmp_path: Path) -> None:
    slow = run(tmp_path / "a", [t / 100 for t in range(1, 31)], [2.0] * 30)
    assert clock(slow).tolist() == [2.0 * t for t in range(1, 31)]
    assert end_of(slow, "accuracy", 60) == pytest.approx(0.255)  # rounds 21 to 30
    assert end_of(slow, "accuracy", 41) == pytest.approx(0.155)  # rounds 11 to 20
    assert np.isnan(end_of(slow, "accuracy", 1))


def test_to_be_there_is_to_stay_there_for_five_rounds_on_average(tmp_path: Path) -> None:
    swings = run(tmp_path / "a", [0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0])
    assert spent_to(swings, 0.7, 99) == 10  # not 3, where a single round is
    assert spent_to(swings, 0.9, 99) == 99
    timed = run(tmp_path / "b", [0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0], [1.5] * 11)
    assert spent_to(timed, 0.7, 99) == 15


def test_the_swing_of_a_curve_is_over_its_last_rounds_that_were_evaluated(tmp_path: Path) -> None:
    fair = run(tmp_path / "fair", [0.2, 0.5, 0.4, 0.6])
    dull = run(tmp_path / "dull", [0.5, 0.3, math.nan, 0.4])
    assert swing_of(fair, "accuracy", 3) == pytest.approx((math.sqrt(0.02 / 3), 0.15))
    assert swing_of(fair, "accuracy") == pytest.approx((np.std([0.2, 0.5, 0.4, 0.6]), 0.2))
    assert swing_of(dull, "accuracy", 3) == pytest.approx((0.05, 0.1))  # rounds 2 to 4, of which one was not evaluated
    assert math.isnan(swing_of(dull, "accuracy", 1).change)


def cases(folder: Path) -> dict[str, dict[str, dict[int, Record]]]:
    """Two cases: in one `good` is there sooner and ends higher, in the other all are alike but for chance."""
    made: dict[str, dict[str, dict[int, Record]]] = {}
    for case, rise in (("real", 0.05), ("chance", 0.0)):
        for policy, more in (("random", 0.0), ("good", rise)):
            for seed in range(6):
                ends = 0.8 + more + 0.003 * (-1) ** (seed if policy == "good" else seed // 2)
                curve = [min(ends, 0.04 * (1 + 10 * more) * t) for t in range(1, 41)]
                made.setdefault(case, {}).setdefault(policy, {})[seed] = run(folder / f"{case}-{policy}-{seed}", curve)
    return made


def test_gains_are_paired_by_seed_and_corrected_over_all_cases(tmp_path: Path) -> None:
    made = cases(tmp_path)
    found = compare_all(made)
    own = figures_of(made["real"])
    ends = {m: [own["final"][m][s] for s in range(6)] for m in ("random", "good")}
    real = found["final"]["real", "good"]
    assert real.difference.mean == pytest.approx(0.05, abs=0.01)
    assert real.p_t == pytest.approx(ttest_rel(ends["good"], ends["random"]).pvalue)
    assert found["worst"]["real", "good"].difference.mean == pytest.approx(real.difference.mean / 2)
    assert found["sooner"]["real", "good"].difference.mean == pytest.approx(1 / 3, abs=0.1)  # steeper by a half
    assert shown_of(found["final"]) == {("real", "good")}
    one = {("real", "good"): found["final"]["chance", "good"]}
    assert not shown_of(one)


def test_a_policy_whose_rounds_are_short_gains_nothing_by_never_getting_there(tmp_path: Path) -> None:
    usual = run(tmp_path / "r", [0.8] * 40, [10.0] * 40)
    quick = run(tmp_path / "q", [0.2] * 40, [1.0] * 40)
    sooner = figures_of({"random": {0: usual}, "quick": {0: quick}})["sooner"]
    assert sooner["quick"][0] < sooner["random"][0] == -1


def test_the_picture_has_a_field_a_figure(tmp_path: Path) -> None:
    gain = {("a", "x"): 1.0, ("a", "y"): -2.0, ("b", "x"): 0.0}
    fields = [Field(title, gain, frozenset({("a", "x")}), "+.1f", 4.0) for title in ("one", "two")]
    draw_gains({"a": "case a", "b": "case b"}, ["x", "y"], fields, tmp_path / "gains.svg")
    text = (tmp_path / "gains.svg").read_text()
    assert "one" in text
    assert text.count("+1.0") == 2
