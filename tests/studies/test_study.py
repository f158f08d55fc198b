"""A study: a grid that resumes, tables that claim no more than they show."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.config import parse_assignment
from mutirao.errors import ConfigError
from mutirao.studies.comparison import compare, latex, markdown, reached_in
from mutirao.studies.study import carry_out, load

STUDY = """
recipe = "quickstart"
baseline = "fedavg"
metrics = ["accuracy", "loss"]
seeds = 3
[threshold]
accuracy = 0.3
[settings]
rounds = 3
clients = 6
per_round = 6
epochs = 1
[methods.fedavg]
aggregate = "fedavg"
[methods.slow]
lr = 0.001
[methods.adam]
aggregate = { name = "fedadam", lr = 0.05 }
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.toml").write_text(STUDY)
    study = load(folder / "small.toml")
    assert len(study.cells) == 9
    assert carry_out(study, folder / "out", workers=1) == []
    return folder


def test_the_table_says_what_the_runs_show(finished: Path) -> None:
    study = load(finished / "small.toml")
    lines = {(x.method, x.metric): x for x in compare(study, finished / "out")}
    ends = [
        json.loads((finished / "out/cells" / cell.name / "summary.json").read_text())["final"]["accuracy"]
        for cell in study.cells
        if cell.method == "slow"
    ]
    slow = lines["slow", "accuracy"]
    assert slow.values == tuple(ends)
    assert slow.final.mean == pytest.approx(sum(ends) / 3)
    assert slow.verdict == "worse"
    assert lines["slow", "loss"].verdict == "worse"  # a larger loss is worse
    assert lines["fedavg", "accuracy"].verdict == "baseline"
    assert slow.reached.endswith("(0 of 3)")
    assert slow.reached.startswith("> 3")
    assert slow.p_holm >= slow.against.p if slow.against else False


def test_finished_cells_are_kept_and_lost_ones_made_again(finished: Path) -> None:
    study, out = load(finished / "small.toml"), finished / "out"
    kept = out / "cells/fedavg/seed0/summary.json"
    lost = out / "cells/fedavg/seed1/summary.json"
    before, digest = kept.stat().st_mtime_ns, json.loads(lost.read_text())["digest"]
    lost.unlink()
    seen: list[str] = []
    assert carry_out(study, out, workers=1, watch=lambda done, name: seen.append(name)) == []
    assert len(seen) == 9
    assert kept.stat().st_mtime_ns == before
    assert json.loads(lost.read_text())["digest"] == digest


def test_a_cell_made_with_other_settings_is_not_taken_for_this_one(finished: Path) -> None:
    study = load(finished / "small.toml", [parse_assignment("lr=0.2"), parse_assignment("seeds=1")])
    problems = carry_out(study, finished / "out", workers=1)
    assert len(problems) == 3
    assert all("other settings" in p for p in problems)


def test_the_command_writes_tables_and_curves(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    done = CliRunner().invoke(main, ["study", "small.toml", "--out", "out", "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "worse" in done.stdout
    for name in ("table.csv", "table.md", "table.tex", "table.json", "curves_accuracy.png"):
        assert (finished / "out" / name).stat().st_size > 50
    table = json.loads((finished / "out/table.json").read_text())
    assert table["baseline"] == "fedavg"
    assert {line["verdict"] for line in table["lines"]} <= {"baseline", "better", "worse", "not shown"}
    lines = compare(load(finished / "small.toml"), finished / "out")
    assert markdown(lines).count("\n") == 2 + len(lines)
    assert r"\textbf{" in latex(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "name at least one method"),
        ('recipe = "quickstart"\nmethod = 1', "unknown key 'method'; did you mean 'methods'?"),
        ('recipe = "quikstart"\n[methods.a]', "did you mean 'quickstart'?"),
        ('recipe = "quickstart"\nbaseline = "b"\n[methods.a]', "the baseline 'b' is not one of the methods"),
        ('recipe = "quickstart"\n[over]\nlr = 1\n[methods.a]', "lr must be a list"),
        ('recipe = "quickstart"\n[methods.a]\nlr = "x"', "method 'a': lr: 'x' is not a number"),
        ('recipe = "quickstart"\nseeds = "x"\n[methods.a]', "seed must be a list"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "wrong.toml")
    assert said in str(caught.value)


def test_rounds_to_a_threshold_with_runs_that_never_get_there() -> None:
    curves = [list(enumerate(values, 1)) for values in ([0.1, 0.5], [0.6, 0.7], [0.1, 0.2], [0.2, 0.3])]
    assert reached_in([*curves[:2], curves[3]], 0.5) == "2 (2 of 3)"
    assert reached_in([curves[0], *curves[2:]], 0.5) == "> 2 (1 of 3)"
    falling = [(10, 0.95), (20, 0.91), (30, 0.9)]  # judged every tenth round, and lower is better
    assert reached_in([falling], 0.91, lower=True) == "20 (1 of 1)"
    assert reached_in([falling], 0.8, lower=True) == "> 30 (0 of 1)"


def test_a_cell_made_before_a_setting_existed_is_still_that_cell(finished: Path) -> None:
    study = load(finished / "small.toml")
    file = finished / "out/cells" / study.cells[0].name / "config.toml"
    whole = file.read_text()
    file.write_text(whole.replace('\n[devices]\nname = "none"\n', "\n").replace("clients_every = 0\n", ""))
    assert file.read_text() != whole
    assert carry_out(study, finished / "out", workers=1) == []
    file.write_text(whole.replace("rounds = 3", "rounds = 4"))
    (problem,) = carry_out(study, finished / "out", workers=1)
    assert "was made with other settings" in problem
    file.write_text(whole)
