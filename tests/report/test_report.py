"""Reports of runs and studies: what they say is what the folder holds, whatever the folder holds."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from iris import iris
from mutirao.cli import main
from mutirao.config import resolve
from mutirao.core.fleet import Answers, Failure
from mutirao.errors import ConfigError, TooFewReplies
from mutirao.experiments import task as recipes
from mutirao.report import charts, execute, render, write_report
from mutirao.report import charts as charts_of
from mutirao.report.charts import distinct_metrics
from mutirao.report.html_page import Page, is_steady
from mutirao.report.run_report import add_ends
from mutirao.report.run_state import RunState, state_of
from mutirao.report.sentences import sentences
from mutirao.report.study_report import study_page
from mutirao.research_notice import NOTICE
from mutirao.runs import csv_tables
from mutirao.runs.reader import Columns, Record, clean
from mutirao.runs.run_folder import Folder
from mutirao.simulation.local_fleet import LocalFleet


class Lossy(LocalFleet):
    """A local fleet in which some clients are always late."""

    silent: tuple[str, ...] = ("c1",)

    def ask(self, requests: Any) -> Answers:
        answers = super().ask({c: r for c, r in requests.items() if c not in self.silent})
        late = {c: Failure("late", "no answer in time") for c in self.silent if c in requests}
        return Answers(answers.replies, answers.failures | late)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small real run in which c1 never answers."""
    monkeypatch.setattr(recipes, "NAMES", recipes.NAMES | {"iris": ("iris:iris", "iris")})
    config = resolve(iris.config, {"rounds": 8, "clients": 6, "per_round": 3})
    task = iris.task(config)
    out = tmp_path / "run"
    execute("iris", config, out, fleet=Lossy(task.handler, task.population), pictures=False)
    write_report(out)
    return out


def data_of(page: str) -> list[dict[str, Any]]:
    """The charts of a page, as its script reads them."""
    found = re.search(r"<script type=application/json id=data>(.*?)</script>", page, re.DOTALL)
    assert found
    specs: list[dict[str, Any]] = json.loads(found[1])
    return specs


def test_the_report_says_what_the_folder_holds(run: Path) -> None:
    page = (run / "report.html").read_text()
    specs = {s["title"]: s for s in data_of(page)}
    history = list(csv.DictReader((run / "history.csv").open()))
    accuracy = specs["accuracy"]["series"][0]
    assert accuracy["y"] == [float(r["accuracy"]) for r in history]
    assert accuracy["x"] == [float(r["round"]) for r in history]
    clients = list(csv.DictReader((run / "clients.csv").open()))
    assert sum(sum(row) for row in specs["Selected when"]["values"]) == len(clients)
    late = sum("late" in r["failure"] for r in clients)
    assert late > 0
    assert f"{late} of {len(clients)} requests brought nothing usable (late {late})" in page
    assert sum(specs["Requests that brought nothing usable"]["series"][0]["values"]) == late
    assert "1 of 6 clients never took part" in page
    assert json.loads((run / "summary.json").read_text())["digest"] in page
    assert "mutirao run config.toml" in page


def test_every_chart_is_also_in_words(run: Path) -> None:
    page = (run / "report.html").read_text()
    specs = data_of(page)
    assert len(specs) > 8
    assert page.count("<figcaption>") == page.count("<p class=about>") == len(specs)
    assert all(len(s["about"]) > 10 for s in specs)


def test_nothing_is_loaded_from_elsewhere(run: Path) -> None:
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(v or "" for k, v in attrs if k in ("src", "href", "action", "data"))

    page = (run / "report.html").read_text()
    Links().feed(page)
    assert [link for link in found if not link.startswith("data:")] == []
    assert "://" not in page
    assert "default-src 'none'" in page
    assert (run / "report.html").stat().st_size < 3_000_000


def test_the_summary_keeps_to_its_schema(run: Path) -> None:
    schema = json.loads((Path(charts_of.__file__).parent / "assets" / "summary.schema.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    jsonschema.validate(summary, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(summary | {"digest": "x"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({k: v for k, v in summary.items() if k != "judge"}, schema)


def test_what_other_methods_write_is_shown(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary |= {
        "groups": {"a": ["c0", "c1"], "b": ["c2"]},
        "privacy": {"kind": "central", "epsilon": 2.5, "delta": 1e-5},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "plane.csv").write_text("client,x,y\nc0,0.5,1\nc1,1.5,-1\nc2,3,4\n")
    (run / "partition.csv").write_text("client,0,1\n0,5,7\n1,0,9\n")
    table = list(csv.DictReader((run / "clients.csv").open()))
    for i, row in enumerate(table):
        row |= {"risk": f"{i / 10 - 1}", "entropy": f"{1 / (i + 1)}"}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]))
    writer.writeheader()
    writer.writerows(table)
    (run / "clients.csv").write_text(text.getvalue())
    page = render(run)
    specs = {s["title"]: s for s in data_of(page)}
    assert [s["labels"] for s in specs["Clients in the plane"]["series"]] == [["c0", "c1"], ["c2"]]
    assert specs["Who has what"]["series"][1]["values"] == [7, 9]
    assert "entropy, over the clients of a round" in specs
    assert specs["Weight of each client, coloured by its risk"]["shade"]["label"] == "risk"
    assert "Privacy spent: epsilon 2.5 at delta 1e-05." in page
    assert "2 groups of 1 to 2 clients." in page


def test_epsilon_is_drawn_beside_what_it_bought(tmp_path: Path) -> None:
    terms = {"name": "central", "epsilon": 3.0, "clip_quantile": 0.5}
    execute("iris:iris", resolve(iris.config, {"aggregate": "fedavg", "privacy": terms}), tmp_path)
    page = (tmp_path / "report.html").read_text()
    history = json.loads((tmp_path / "history.json").read_text())
    specs = {s["title"]: s for s in data_of(page)}
    spent, budget = specs["Epsilon spent"]["series"]
    assert (spent["x"], budget["y"]) == ([1, 2, 3, 4], [3, 3, 3, 3])
    assert spent["y"] == pytest.approx([row["epsilon"] for row in history], rel=1e-3)
    [bought] = specs["accuracy by epsilon spent"]["series"]
    assert bought["x"] == spent["y"]
    assert bought["y"] == pytest.approx([row["accuracy"] for row in history], rel=1e-3)
    assert [title for title in specs if title.startswith("accuracy by")] == ["accuracy by epsilon spent"]  # not twice
    assert specs["Clip by round"]["series"][0]["y"] == pytest.approx([row["clip"] for row in history], rel=1e-3)
    assert "of 3 at delta 1e-05. It protects a client with all its data." in page


def test_a_run_that_failed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "NAMES", recipes.NAMES | {"iris": ("iris:iris", "iris")})
    config = resolve(iris.config, {"rounds": 4, "min_replies": 3})
    task = iris.task(config)
    fleet = Lossy(task.handler, task.population)
    fleet.silent = tuple(task.population)
    with pytest.raises(TooFewReplies):
        execute("iris", config, tmp_path, fleet=fleet)
    page = render(tmp_path)
    assert "badge failed" in page
    assert "usable replies, 3 needed" in page


@pytest.mark.parametrize(
    "name", ["history.csv", "clients.csv", "summary.json", "audit.jsonl", "config.toml", "partition.csv"]
)
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00garbage,\n1,2,3\n", b"{]", b"round,client\n-5,a\nx,y\n1e999,b\n"]
)
def test_a_spoilt_file_spoils_no_report(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    assert "<h1>" in render(run)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no finished run"):
        render(tmp_path)


def test_the_words_know_one_from_many(tmp_path: Path) -> None:
    record = Record(tmp_path, config={"clients": 100, "rounds": 5})
    (tmp_path / "clients.csv").write_text(
        "round,client,try,replied,rejected,failure\n" + "".join(f"1,c{i},1,1,,\n" for i in range(88))
    )
    said = " ".join(sentences(record, RunState("stopped")))
    assert "12 of 100 clients never took part" in said
    assert "Stopped after 0 of 5 rounds." in said
    assert "Every client that was selected gave a usable reply." in said


@given(
    st.lists(st.tuples(st.integers(1, 5), st.floats(-1e6, 1e6)), min_size=1, max_size=60),
    st.sampled_from([0.1, 0.5, 0.9]),
)
@settings(max_examples=60, deadline=None)
def test_quantiles_by_round_are_numpys(points: list[tuple[int, float]], q: float) -> None:
    rounds, values = np.array([p[0] for p in points], float), np.array([p[1] for p in points])
    order = np.lexsort((values, rounds))
    at, starts, counts = np.unique(rounds[order], return_index=True, return_counts=True)
    ours = charts_of.quantile(values[order], starts, counts, q)
    theirs = [np.quantile(values[rounds == r], q) for r in at]
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-6)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
@settings(max_examples=60, deadline=None)
def test_what_is_cleaned_is_json(value: Any) -> None:
    json.dumps(clean(value), allow_nan=False)


def test_heat_maps_of_many_clients_are_counted_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{r},c{c}" for r in range(1, 451) for c in rng.choice(3000, 20, replace=False)]
    (tmp_path / "clients.csv").write_text("round,client\n" + "\n".join(rows) + "\n")
    heat = next(iter(charts.chart_participation(Record(tmp_path))))
    assert len(heat["rows"]) <= 100
    assert len(heat["cols"]) <= 200
    assert sum(map(sum, heat["values"])) == len(rows)
    assert "A row stands for" in heat["about"]


def test_of_many_clients_the_ends_are_named(tmp_path: Path) -> None:
    often = [f"{r},c{c:03d},1,,late: no answer" for r in range(1, 5) for c in range(0, 120, r)]
    (tmp_path / "clients.csv").write_text("round,client,replied,rejected,failure\n" + "\n".join(often) + "\n")
    page = Page("")
    add_ends(page, Record(tmp_path))
    (table,) = page.parts
    assert "<td>c000</td><td class=number>4</td><td class=number>4</td><td class=number>4</td>" in table
    assert "<td>110 more</td>" in table
    assert "<td>c119</td><td class=number>1</td>" in table
    assert table.count("<tr>") == 12
    (tmp_path / "clients.csv").write_text("round,client\n" + "\n".join(f"1,c{c}" for c in range(100)) + "\n")
    add_ends(page, Record(tmp_path))
    assert len(page.parts) == 1  # each has a line in the heat map


def test_columns_go_in_parts_and_keep_every_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_tables, "PART", 3)
    rows = [f'{i},"a, {i % 4}",{i if i % 3 else ""}' for i in range(10)]
    (tmp_path / "t.csv").write_text("n,who,x\n" + "\n".join(rows) + '\n10,"two\nlines",1e400\n11,cut')
    table = Columns(tmp_path / "t.csv")
    assert table.lengths == [3, 3, 3, 2]
    assert table.texts("who") == (*(f"a, {i % 4}" for i in range(10)), "two lines")
    names, codes = table.codes("who")
    assert names == ["a, 0", "a, 1", "a, 2", "a, 3", "two lines"]
    assert codes.tolist() == [i % 4 for i in range(10)] + [4]
    np.testing.assert_array_equal(table.numbers("x"), [*(i if i % 3 else np.nan for i in range(10)), np.nan])
    assert table.wholes("x").tolist() == [i if i % 3 else 0 for i in range(10)] + [0]
    assert table.where("who", "a, 1").nonzero()[0].tolist() == [1, 5, 9]
    assert table.texts("none") == ("",) * 11
    assert table.codes("none")[0] == [""]


def test_columns_read_whole_rows_only(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,x\n2,\ninf,y\n3,z")
    table = Columns(tmp_path / "t.csv")
    assert len(table) == 3
    assert table.texts("b") == ("x", "", "y")
    np.testing.assert_array_equal(table.numbers("a"), [1, 2, np.nan])
    np.testing.assert_array_equal(table.numbers("b"), [np.nan] * 3)
    np.testing.assert_array_equal(table.numbers("none"), [np.nan] * 3)


def test_the_state_is_told_without_touching_the_lock(run: Path) -> None:
    assert state_of(run, {"event": "finished"}).name == "finished"
    assert state_of(run, {"event": "failed", "reason": "no"}) == RunState("failed", "no")
    with Folder.open(run):
        found = state_of(run, {"event": "round"})
        assert found.name == "running"
        (run / "run.log").write_text("2026 WARNING waiting up to 60 s for 3 clients; 1 so far\n")
        assert state_of(run, {"event": "round"}).name == "waiting"
        with Folder.open(run / "other"):
            pass
    assert state_of(run, {"event": "round"}).name == "stopped"


def test_a_lock_that_names_an_innocent_process_points_at_nobody(run: Path) -> None:
    import os
    import socket

    (run / ".lock").write_text(f"{socket.gethostname()} {os.getppid()}\n")
    assert state_of(run, {"event": "round"}).pid == 0
    (run / ".lock").write_text("elsewhere 1\n")
    assert state_of(run, {"event": "round"}).name == "stopped"


STUDY = """
recipe = "iris"
baseline = "plain"
metrics = ["accuracy"]
seeds = 3
[threshold]
accuracy = 0.5
[settings]
rounds = 4
[methods.plain]
aggregate = "fedavg"
[methods."<b>bold"]
aggregate = { name = "fedavgm", momentum = 0.5 }
"""


def test_a_study_has_a_report_with_tables_bands_and_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mutirao.studies.comparison import compare_methods, write_tables
    from mutirao.studies.study import plan_of, read_study, run_cell

    monkeypatch.setattr(recipes, "NAMES", recipes.NAMES | {"iris": ("iris:iris", "iris")})
    (tmp_path / "study.toml").write_text(STUDY)
    study, out = read_study(tmp_path / "study.toml"), tmp_path / "out"
    for cell in study.cells:
        assert run_cell("iris", (cell, out / "cells" / cell.name)) == ""
    (out / "study.json").write_text(json.dumps(plan_of(study)))
    write_tables(study, compare_methods(study, out), out)
    done = CliRunner().invoke(main, ["report", str(out)])
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text()
    specs = {s["title"]: s for s in data_of(page)}
    lines = {x["method"]: x for x in json.loads((out / "table.json").read_text())["lines"]}
    assert {s["name"] for s in specs["accuracy by round"]["series"]} == set(lines)
    for series in specs["accuracy by round"]["series"]:
        assert series["y"][-1] == pytest.approx(lines[series["name"]]["mean"])
        assert series["hi"][-1] - series["y"][-1] == pytest.approx(lines[series["name"]]["half_t"])
    points = specs["accuracy of every run"]
    assert points["points"] == [lines[m]["values"] for m in points["categories"]]
    assert points["names"][0] == ["seed0", "seed1", "seed2"]
    assert "6 of 6 runs finished." in page
    assert "&lt;b&gt;bold" in page
    assert "<b>bold" not in page
    assert "aggregate.momentum = 0.5" in page
    assert ">rounds to 0.5</th>" in page
    assert "until accuracy is at least 0.5" in page
    assert 'href="cells/plain/seed0/"' in page
    assert "Settings that are the same in all runs" in page
    assert "rounds = 4" in page


def test_a_study_of_cells_carries_the_notice(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"recipe": "cytology", "cells": ["a/seed0"]}))
    assert f"<p class=notice>{NOTICE}</p>" in study_page(tmp_path).html()


def test_one_round_is_told_in_words_and_not_drawn(tmp_path: Path) -> None:
    execute("iris:iris", resolve(iris.config, {"rounds": 1}), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert not [s for s in data_of(page) if s["kind"] == "lines" and s["x"]["label"] == "round"]
    assert "The band holds" not in page
    assert "Checkpoints of the start and 1 round take" in page


def test_a_flat_band_is_a_constant_and_a_moving_one_is_not() -> None:
    curve = {"x": [1, 2], "y": [0.2, 0.2], "lo": [0.1, 0.1], "hi": [0.3, 0.3]}
    assert is_steady({"kind": "lines", "series": [curve]})
    assert not is_steady({"kind": "lines", "series": [curve | {"hi": [0.3, 0.4]}]})


def test_a_metric_that_differs_by_rounding_alone_is_shown_once(run: Path) -> None:
    rows = list(csv.DictReader((run / "history.csv").open()))
    for row in rows:
        row["again"] = str(float(row["accuracy"]) * (1 + 1e-7))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    (run / "history.csv").write_text(text.getvalue())
    assert "again" in Record.of(run).metrics
    assert "again" not in distinct_metrics(Record.of(run))
