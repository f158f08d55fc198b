"""A run played again: its own policy selects whom it selected, another one whom it would have."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError
from mutirao.report import execute
from mutirao.runs.reader import Record
from mutirao.runs.replay import replay, replay_folder
from mutirao.systems.selection_lab import Config

SMALL = {"clients": 20, "per_round": 4, "epochs": 1, "rounds": 12, "own_test": 20}


def made(folder: Path, **more: Any) -> Path:
    execute("selection", resolve(Config, SMALL | more), folder, pictures=False)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("replay") / "run")


@pytest.mark.parametrize(
    "more",
    [
        {"select": "uniform"},
        {"select": "oort"},
        {"select": "mix", "select.scores": "0.5 since_reply + 0.5 update_norm"},
        {"select": "aoiu", "available": "markov"},
        {"select": "fedcs", "select.candidates": 8},
    ],
    ids=lambda more: more["select"],
)
def test_the_runs_own_policy_selects_the_same(tmp_path: Path, more: dict[str, Any]) -> None:
    _, found = replay_folder(made(tmp_path / "run", **more))
    assert found.other == found.actual
    assert found.overlap == [1.0] * 12


def test_the_default_policy_too_and_the_way_back_is_the_same(finished: Path) -> None:
    part, found = replay_folder(finished)
    assert part.name == "aoiu"
    assert found.other == found.actual
    _, own = replay_folder(finished, own=True)
    assert own.other == found.actual  # what its clients told is what they told


def test_another_policy_in_the_place_of_the_run_or_on_its_own(finished: Path) -> None:
    part, found = replay_folder(finished, [("select", "aoi")], own=True)
    assert part.name == "aoi"
    counts = found.participation(found.other).times
    assert (counts.min(), counts.max(), counts.sum()) == (2, 3, 48)
    _, placed = replay_folder(finished, [("select", "aoiu"), ("select.alpha", 1.0)])
    rows = Record.begun(finished).asked
    for t, chosen in enumerate(placed.other, 1):
        last = dict.fromkeys(placed.clients, 0) | {r["client"]: r["round"] for r in rows if r["round"] < t}
        ages = sorted((t - last[c] for c in placed.clients), reverse=True)
        assert sorted((t - last[c] for c in chosen), reverse=True) == ages[:4]  # the oldest, as the run had it


def test_a_policy_that_probes_goes_by_what_is_known(finished: Path) -> None:
    _, found = replay_folder(finished, [("select", "powerofchoice"), ("select.candidates", 20)])
    rows = Record.begun(finished).asked
    last: dict[str, float] = {}
    for t, chosen in enumerate(found.other, 1):
        if len(last) >= 4:
            assert sorted((last.get(c, -1) for c in chosen), reverse=True) == sorted(last.values(), reverse=True)[:4]
        last |= {r["client"]: r["loss"] for r in rows if r["round"] == t}


def test_failures_and_second_tries_are_followed() -> None:
    lines = [
        {"round": 1, "client": "ana", "try": 1, "replied": 0, "n": 0},
        {"round": 1, "client": "bia", "try": 2, "replied": 1, "n": 5, "loss": 0.5},
        {"round": 2, "client": "caio", "try": 1, "replied": 1, "n": 5, "loss": 0.7, "failure": ""},
    ]
    seen: list[tuple[list[int], list[int], list[float]]] = []

    def spy(roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
        losses = roster.figure("loss", -1.0).tolist()
        seen.append((roster.last_selected.tolist(), roster.last_replied.tolist(), losses))
        return ["ana"]

    found = replay(lines, 3, spy)
    assert seen[1] == ([1, 1, 0], [0, 1, 0], [-1.0, 0.5, -1.0])
    assert found.actual == [["ana"], ["caio"]]
    assert found.overlap == [1.0, 0.0]


def test_the_command(finished: Path, tmp_path: Path) -> None:
    def mutirao(*words: str) -> Any:
        return CliRunner().invoke(main, words)

    said = mutirao("replay", str(finished), "--set", "select=aoi", "--own").stdout
    assert "Gini" in said
    assert "aoi selects the same clients as the run:" in said
    placed = mutirao("replay", str(finished))
    assert "100.0% of a round's" in placed.stdout
    assert "Gini" not in placed.stdout
    content = json.loads(mutirao("replay", str(finished), "--set", "select=uniform", "--json").stdout)
    assert content["select"]["name"] == "uniform"
    assert len(content["other"]) == len(content["overlap"]) == 12
    drawn = mutirao("plot", str(finished), "participation", "--out", str(tmp_path))
    assert drawn.exit_code == 0
    assert (tmp_path / "participation.png").exists()
    assert "participation" in mutirao("plot", str(finished)).stdout
    for words, text in (
        (["replay", "nowhere"], "nowhere holds no run"),
        (["replay", str(finished), "--set", "rounds=3"], "rounds: only select"),
        (["replay", str(finished), "--set", "select=aoiuu"], "did you mean 'aoiu'"),
        (["plot", str(finished), "heat"], "no kind of picture is called 'heat'"),
    ):
        wrong = mutirao(*words)
        assert wrong.exit_code != 0
        assert text in wrong.stderr
        assert "Traceback" not in wrong.stderr


def test_settings_that_belong_to_the_run_cannot_change(finished: Path) -> None:
    with pytest.raises(ConfigError, match="lr: only select"):
        replay_folder(finished, [("lr", 0.5)])
