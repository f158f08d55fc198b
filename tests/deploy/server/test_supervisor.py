"""A deployed run is seen through: who holds it, when it is submitted again, and when no more."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mutirao.config import resolve
from mutirao.deploy.provisioning import create_server
from mutirao.deploy.server import supervisor
from mutirao.deploy.server.submission import RoundPrinter, writing_process
from mutirao.deploy.server.supervisor import supervise
from mutirao.errors import MutiraoError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.audit_trail import Audit

SETTINGS: dict[str, Any] = {"rounds": 2, "clients": 3, "per_round": 3, "hidden": 4, "epochs": 1}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(supervisor, "PAUSE", 0.01)
    monkeypatch.setattr(supervisor, "START_TIMEOUT", 0.05)
    monkeypatch.setattr(supervisor, "is_answering", lambda server: True)
    return create_server(tmp_path / "server", ["127.0.0.1"]).folder


def submitted(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[Path], None]) -> list[bool]:
    """Stand in for Flower: the n-th run that is submitted does the n-th act."""
    calls: list[bool] = []

    def submit(folder: Path, recipe: str, sets: Any, out: Path, resume: bool, timeout: float) -> str:
        calls.append(resume)
        acts[min(len(calls), len(acts)) - 1](out)
        return str(len(calls))

    monkeypatch.setattr(supervisor, "submit", submit)
    return calls


def rounds(count: int) -> Callable[[Path], None]:
    def act(out: Path) -> None:
        config = resolve(find("quickstart").config, SETTINGS | {"rounds": count})
        execute("quickstart", config, out, resume=True, pictures=False)

    return act


def dies(out: Path) -> None:
    """As a killed process leaves it: its name in the lock, a round made, no end."""
    rounds(1)(out)
    (out / "summary.json").unlink()
    dead = subprocess.Popen(["true"])
    dead.wait()
    (out / ".lock").write_text(f"here {dead.pid}\n")


def gives_up(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    Audit(out / "audit.jsonl").append("failed", round=1, reason="too few")


def test_a_run_whose_process_is_gone_is_submitted_again(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = submitted(monkeypatch, dies, rounds(2))
    done = supervise(server, "quickstart", SETTINGS.items(), seconds=60)
    assert (done["rounds"], done["flower_runs"], calls) == (2, 2, [True, True])
    again = supervise(server, "quickstart", SETTINGS.items(), seconds=60)
    assert again["flower_runs"] == 0


def test_each_round_is_told_once_whoever_makes_it(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(monkeypatch, dies, rounds(2))
    said: list[str] = []
    tell = RoundPrinter(server / "runs" / "quickstart", 0.0, said.append)
    supervise(server, "quickstart", SETTINGS.items(), seconds=60, meanwhile=tell)
    assert [line.split()[0] for line in said] == ["round=1", "round=2"]
    assert "accuracy=" in said[1]


def test_a_run_that_ends_before_it_has_a_folder_is_left_alone_with_its_reason(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = submitted(monkeypatch, lambda out: None)
    monkeypatch.setattr(supervisor, "why_app_ended", lambda folder, run: "there is no folder /nowhere")
    with pytest.raises(MutiraoError, match="failed before its first round: there is no folder /nowhere"):
        supervise(server, "quickstart", SETTINGS.items(), seconds=60)
    assert len(calls) == 2


def test_more_rounds_of_a_finished_run_are_made(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(monkeypatch, rounds(1), rounds(2))
    assert supervise(server, "quickstart", (SETTINGS | {"rounds": 1}).items(), seconds=60)["rounds"] == 1
    assert supervise(server, "quickstart", SETTINGS.items(), seconds=60)["rounds"] == 2


def test_a_run_that_gives_up_twice_at_the_same_place_is_left_alone(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = submitted(monkeypatch, gives_up)
    with pytest.raises(MutiraoError, match=r"round 1 failed repeatedly.*too few"):
        supervise(server, "quickstart", SETTINGS.items(), seconds=60)
    assert len(calls) == 2


def test_one_failure_that_is_seen_again_while_the_server_is_away_is_one_failure(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = submitted(monkeypatch, gives_up, rounds(2))
    answers = iter([True, False, False, False])  # away right after the first run failed
    monkeypatch.setattr(supervisor, "is_answering", lambda server: next(answers, True))
    done = supervise(server, "quickstart", SETTINGS.items(), seconds=60)
    assert (done["rounds"], len(calls)) == (2, 2)


def test_a_server_that_takes_no_run_is_asked_until_time_is_up(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(out: Path) -> None:
        raise MutiraoError("the run was not taken")

    calls = submitted(monkeypatch, refuses)
    with pytest.raises(MutiraoError, match="did not end within"):
        supervise(server, "quickstart", SETTINGS.items(), seconds=0.3)
    assert len(calls) > 1


def test_who_holds_a_run_is_known_by_a_living_process(tmp_path: Path) -> None:
    assert writing_process(tmp_path) == 0
    for text, pid in ((f"here {os.getpid()}\n", os.getpid()), ("", 0), ("nonsense", 0), ("here x\n", 0)):
        (tmp_path / ".lock").write_text(text)
        assert writing_process(tmp_path) == pid
    assert json.dumps(supervisor.last_failure(tmp_path)) == "null"
