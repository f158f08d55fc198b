"""`mutirao reproduce`: the list, all five systems on stand-ins, and what is said when data are not here."""

import html
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mutirao.cli.main import main
from mutirao.studies import reproduction, study
from mutirao.studies.reproduction import NAMES, Size, System, read_system

TINY: dict[str, dict[str, Any]] = {
    "fedrisk": {"rounds": 2, "queries": 50, "clients": 10, "per_round": 2},
    "aoiu": {"rounds": 4, "epochs": 1},
    "groups": {"rounds": 2, "epochs": 1, "warm_epochs": 6},
    "recsys": {"rounds": 3, "dimension": 5},
    "cytology": {"rounds": 2, "views": 1, "weights": "random", "side": 1024, "slides": 2},
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forms that take seconds, one run after another in this process, and nowhere any data."""

    def read(name: str) -> System:
        system = read_system(name)
        quick = system.quick
        small = {
            "seeds": quick.seeds[: 2 if name == "recsys" else 1],
            "over": {axis: values[:2] for axis, values in quick.over.items()},
        }
        claimed = {m for c in system.claims for m in c.methods}
        used = tuple(m for m in quick.methods if m in claimed)
        form: Size = replace(quick, **small, methods=used, settings={**quick.settings, **TINY[name]})
        data = replace(system.data, settings={**system.data.settings, **TINY[name]})
        return replace(system, quick=form, data=data)

    monkeypatch.setattr(reproduction, "read_system", read)
    monkeypatch.setattr(study, "run_study", partial(study.run_study, start="here"))
    monkeypatch.setattr("mutirao.report.plot_kinds.draw_study", lambda *_: [])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MUTIRAO_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "recsys"])
def test_each_system_runs_on_its_stand_in_and_says_so(name: str, tiny: None, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["reproduce", name, "--stand-in", "--out", "out"])
    assert done.exit_code == 0, done.output
    check_outcome(done.output, tmp_path / "out", read_system(name))


def check_outcome(output: str, out: Path, system: System) -> None:
    told = json.loads((out / "reproduction.json").read_text())
    assert told["stand_in"]
    assert told["claims"]
    assert {claim["verdict"] for claim in told["claims"]} == {"not shown"}  # whatever stand-ins say
    page = html.unescape((out / "report.html").read_text())
    for text in (output, page):
        assert "STAND-IN DATA, not the paper's" in text
        assert "stand-in data, on which:" in text
        assert told["claims"][0]["says"] in text
    assert "published" in output
    assert "Cut, rounds:" in page or "rounds" not in str(told["cuts"])
    assert system.title in output


@pytest.mark.slow
def test_the_same_command_goes_on_and_a_stop_keeps_what_was_done(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    run_cell = study.run_cell

    def counted(recipe: Any, place: Any) -> str:
        if len(made) == 5:
            made.append("stop")
            raise reproduction.OutOfTime
        made.append(place[0].name)
        return run_cell(recipe, place)

    monkeypatch.setattr(study, "run_cell", counted)
    first = CliRunner().invoke(main, ["reproduce", "recsys", "--stand-in", "--out", "out", "--json"])
    assert first.exit_code == 0, first.output
    assert "runs: 5 of 8 were made in 8.5 min; the same command makes the rest" in json.loads(first.stdout)["cuts"]
    again = CliRunner().invoke(main, ["reproduce", "recsys", "--stand-in", "--out", "out"])
    assert again.exit_code == 0, again.output
    assert len({*made}) == 9
    assert "were made in" not in again.output
    check_outcome(again.output, tmp_path / "out", read_system("recsys"))


def test_all_five_are_listed_with_their_data_and_time(tiny: None, tmp_path: Path) -> None:
    (tmp_path / "data" / "ml-1m").mkdir(parents=True)
    (tmp_path / "data" / "ml-1m" / "ratings.dat").touch()
    rows = json.loads(CliRunner().invoke(main, ["reproduce", "--json"]).stdout)
    assert [row["system"] for row in rows] == [*NAMES]
    assert [row["system"] for row in rows if row["found"]] == ["recsys"]
    said = CliRunner().invoke(main, ["reproduce"]).stdout
    assert "found  data/ml-1m" in said
    assert "not found; --stand-in: the embedded 8 x 8 digits" in said
    assert said.count("  time   quick ") == 5


WRONG = [
    (["groups"], "groups needs CIFAR-10 in its binary"),
    (["groups"], "--stand-in"),
    (["groups", "--data", "."], "expected CIFAR-10"),
    (["group"], "did you mean 'groups'"),
    (["groups", "--full", "--minutes", "3"], "give only one"),
    (["groups", "--stand-in", "--data", "."], "give only one"),
]


@pytest.mark.parametrize(("arguments", "why"), WRONG)
def test_what_is_wrong_is_said_on_one_line_before_anything_is_made(
    arguments: list[str], why: str, tiny: None, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["reproduce", *arguments])
    assert done.exit_code == 2
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not [*tmp_path.iterdir()]
