"""Who took part, how evenly, and what it cost to get there: figures against hand-made tables."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.errors import ConfigError
from mutirao.metrics import gini, jain
from mutirao.report.plot_kinds import KINDS, draw
from mutirao.report.run_plots import draw_best, draw_participation, draw_shares
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.participation import all_clients, lorenz, participation, participation_in
from mutirao.runs.reader import Record
from mutirao.studies.selection_policies import compare_selectors, tables
from mutirao.studies.targets import (
    Reached,
    best_so_far,
    by_client,
    cost_to,
    count_rounds,
    dominance,
    runs_by_method,
    values,
    worst_decile,
)

ROWS = [(1, "ana"), (1, "bia"), (2, "ana"), (2, "caio"), (3, "ana"), (3, "bia")]


def rows(pairs: list[tuple[int, str]] = ROWS) -> list[dict[str, object]]:
    return [{"round": t, "client": c} for t, c in pairs]


counts = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@given(counts)
def test_fairness_by_definition(times: list[int]) -> None:
    x = np.array(times, float)
    n, total = len(x), x.sum()
    if total:
        assert gini(times) == pytest.approx(np.abs(x[:, None] - x[None]).sum() / (2 * n * total), abs=1e-12)
        assert jain(times) == pytest.approx(total**2 / (n * (x**2).sum()))
        share, part = lorenz(times)
        assert gini(times) == pytest.approx(1 - 2 * np.trapezoid(part, share), abs=1e-12)
        assert (np.diff(part, 2) >= -1e-12).all()  # the curve only bends upwards
    assert 1 / n - 1e-12 <= jain(times) <= 1 + 1e-12


def test_times_and_the_matrix_count_rounds_not_tries() -> None:
    found = participation([*rows(), {"round": 3, "client": "bia", "try": 2}], clients=5, rounds=4)
    assert found.clients == ["(unseen 1)", "(unseen 2)", "ana", "bia", "caio"]
    assert found.times.tolist() == [0, 0, 3, 2, 1]
    assert found.among(range(5)).shape == (5, 4)
    assert found.among([4, 3]).tolist() == [[False, True, False, False], [True, False, True, False]]
    assert found.figures == {
        "gini": gini([0, 0, 3, 2, 1]),
        "jain": 36 / 70,
        "least": 0,
        "most": 3,
        "range": 3,
        "never": 2,
    }


def test_names_of_virtual_clients_follow_from_their_number() -> None:
    assert all_clients(["c03", "c11"], 12) == [f"c{i:02d}" for i in range(12)]
    assert all_clients(["c3", "x"], 3) == ["(unseen 1)", "c3", "x"]
    assert all_clients(["ana"], 0) == ["ana"]


def write_run(folder: Path, accuracy: list[float | None], clients: list[list[str]], population: int = 4) -> None:
    folder.mkdir(parents=True)
    history = [
        {"round": t, "seconds": 2.0, "selected": 2, "bytes_down": 10, "bytes_up": 5, "sim_seconds": t}
        | ({} if a is None else {"accuracy": a})
        for t, a in enumerate(accuracy, 1)
    ]
    CsvTable(folder / "history.csv").append(history)
    lines = [
        {"round": t, "client": c, "try": 1, "replied": 1, "n": 5, "accuracy": (t + i) / 10}
        for t, names in enumerate(clients, 1)
        for i, c in enumerate(names)
    ]
    CsvTable(folder / "clients.csv").append(lines)
    (folder / "summary.json").write_text(json.dumps({"clients": population}))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    pairs, same = [["c0", "c1"], ["c2", "c3"]] * 2, [["c0", "c1"]] * 4
    write_run(tmp_path / "s/cells/fair/seed0", [0.2, 0.5, 0.4, 0.6], pairs)
    write_run(tmp_path / "s/cells/fair/seed1", [0.4, 0.5, 0.6, 0.6], pairs)
    write_run(tmp_path / "s/cells/dull/seed0", [0.5, 0.3, None, 0.4], same)
    write_run(tmp_path / "s/cells/dull/seed1", [0.5, 0.7, 0.4, 0.4], same)
    return tmp_path / "s"


def test_a_run_tells_best_so_far_costs_and_the_worst_decile(study: Path) -> None:
    dull = Record.begun(study / "cells/dull/seed0")
    np.testing.assert_array_equal(best_so_far(dull, "accuracy"), [0.5, 0.5, 0.5, 0.5])
    assert math.isnan(values(dull, "accuracy")[2])
    fair = Record.begun(study / "cells/fair/seed0")
    assert best_so_far(fair, "accuracy").tolist() == [0.2, 0.5, 0.5, 0.6]
    assert cost_to(fair, "accuracy", 0.6) == {"rounds": 4, "seconds": 8, "bytes": 60, "sim_seconds": 10}
    assert cost_to(fair, "accuracy", 0.9) is None
    assert by_client(fair) == pytest.approx({"c0": 0.3, "c1": 0.4, "c2": 0.4, "c3": 0.5})
    assert worst_decile(fair) == pytest.approx(0.3)
    assert participation_in(fair).gini == 0
    with pytest.raises(ConfigError, match="no round has a metric 'rmse'"):
        values(fair, "rmse")


def test_where_lower_is_better_the_best_is_the_lowest(study: Path) -> None:
    """As before, but the runs say that of their metric lower values are better, and of another one nothing."""
    for file in study.glob("cells/*/*/summary.json"):
        file.write_text(json.dumps({"clients": 4, "directions": {"accuracy": "lower"}}))
    fair = Record.begun(study / "cells/fair/seed0")
    assert best_so_far(fair, "accuracy").tolist() == [0.2, 0.2, 0.2, 0.2]
    assert cost_to(fair, "accuracy", 0.2) == {"rounds": 1, "seconds": 2, "bytes": 15, "sim_seconds": 1}
    assert worst_decile(fair) == pytest.approx(0.5)
    assert dominance(runs_by_method(study), "accuracy") == pytest.approx({"dull": 0.0, "fair": 1.0})
    with pytest.raises(ConfigError, match="direction of 'selected' is not declared"):
        best_so_far(fair, "selected")


def test_rounds_to_a_target_with_confidence_over_seeds(study: Path) -> None:
    methods = runs_by_method(study)
    assert list(methods) == ["dull", "fair"]
    found = count_rounds(methods["fair"], "accuracy", 0.6)
    assert found.rounds == (4, 3)
    assert found.interval.mean == 3.5
    assert found.interval.half == pytest.approx(12.706 * 0.5, rel=1e-3)  # Student's t with one degree of freedom
    assert str(found) == "3.5 ± 6.4 (4, 3)"
    assert str(count_rounds(methods["dull"], "accuracy", 0.6)) == "> 4, 2"
    assert math.isnan(Reached(0.6, (None, 2), 4).interval.mean)
    assert str(Reached(0.6, (3, 4, 4, 5, 4, 4), 9)) == "4.0 ± 0.7 (3 to 5)"
    assert str(Reached(0.6, (3, None, 4, 5, 4, 4), 9)) == "3 to 5; 1 of 6 not"
    assert str(Reached(0.6, (None,) * 6, 9)) == "never; 6 of 6 not"


def test_a_policy_leads_where_its_best_is_highest_and_a_tie_is_shared(study: Path) -> None:
    """Means of the best so far: fair 0.3, 0.5, 0.55, 0.6 and dull 0.5, 0.6, 0.6, 0.6."""
    assert dominance(runs_by_method(study), "accuracy") == pytest.approx({"dull": 3.5 / 4, "fair": 0.5 / 4})


def test_the_comparison_in_words_numbers_and_pictures(study: Path, tmp_path: Path) -> None:
    lines = {line["method"]: line for line in compare_selectors(runs_by_method(study), "accuracy", [0.5])}
    assert lines["fair"]["gini"] == 0
    assert lines["dull"]["gini"] == 0.5
    assert (lines["dull"]["least"], lines["dull"]["most"], lines["dull"]["never"]) == (0, 4, 2)
    assert lines["fair"]["bytes to 0.5"] == 30
    assert lines["fair"]["final"] == pytest.approx(0.6)
    text = tables(list(lines.values()), [0.5])
    assert "| fair | 2 | 4 | 0.0000 | 1.0000 | 2 | 2 | 0 | 12% |" in text
    files = draw(study, "selection", tmp_path / "out", targets=[0.5, 0.65])
    assert {f.name for f in files} == {
        "selection.md",
        "selection.json",
        "selection-curves.png",
        "selection-fairness.png",
    }
    assert all(f.stat().st_size > 100 for f in files)
    content = json.loads((tmp_path / "out/selection.json").read_text())
    assert content["targets"] == [0.5, 0.65]
    assert content["lines"][0]["bytes to 0.65"] is None  # not all of its runs got there
    with pytest.raises(ConfigError, match="not every run below"):
        draw(study, "selection", tmp_path / "out", metric="rmse")


def test_policies_of_any_task_are_compared_by_what_judges_its_runs(study: Path, tmp_path: Path) -> None:
    for run in study.glob("cells/*/*"):
        for file in ("history.csv", "clients.csv"):
            (run / file).write_text((run / file).read_text().replace("accuracy", "ndcg@5", 1))
        summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").is_file() else {}
        (run / "summary.json").write_text(json.dumps({**summary, "clients": 4, "judge": "ndcg@5"}))
    clients = study / "cells/fair/seed0/clients.csv"
    head, *lines = clients.read_text().splitlines()
    clients.write_text("\n".join([head.replace("ndcg@5", "mood"), *lines]) + "\n")  # nobody told it of itself
    draw(study, "selection", tmp_path / "out", targets=[0.5])
    content = json.loads((tmp_path / "out/selection.json").read_text())
    assert content["metric"] == "ndcg@5"
    assert {line["method"]: line["worst_decile"] for line in content["lines"]}["fair"] is None
    assert "| fair | 0.6000 | 0.6000 | - |" in (tmp_path / "out/selection.md").read_text()


def test_pictures_of_one_run_and_of_many_clients(study: Path, tmp_path: Path) -> None:
    for kind in ("participation", "curves"):
        (file,) = draw(study / "cells/fair/seed0", kind, tmp_path)
        assert file.read_bytes().startswith(b"\x89PNG")
    many = participation([{"round": t, "client": f"c{i:04d}"} for t in (1, 2) for i in range(0, 2000, t)], 2000)
    draw_participation(many, tmp_path / "many.svg")
    assert "of 2,000 shown" in (tmp_path / "many.svg").read_text()
    eight = {f"policy {i}": runs_by_method(study)["fair"] for i in range(8)}
    draw_best(eight, "accuracy", [], tmp_path / "best.png")
    draw_shares(eight, tmp_path / "shares.png")


def test_what_is_no_folder_or_no_kind_is_refused_in_one_line(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no kind of picture is called 'lorentz'"):
        draw(study, "lorentz")
    with pytest.raises(ConfigError, match="is not a folder with a run or a study"):
        draw(tmp_path / "nowhere", "selection")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="contains neither a run nor a study"):
        draw(tmp_path / "empty", "selection")
    with pytest.raises(ConfigError, match="holds no run"):
        draw(tmp_path / "empty", "participation")
    assert set(KINDS) >= {"curves", "participation", "selection"}
