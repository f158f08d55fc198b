"""The drill itself: what is listed can be carried out, and what goes wrong is a bad trial."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy.drill import sequence
from mutirao.deploy.drill.leak import Leaking
from mutirao.deploy.drill.trials import TRIALS, Trial
from mutirao.errors import MutiraoError


def test_every_trial_is_listed_and_another_is_refused() -> None:
    told = CliRunner().invoke(main, ["drill", "--list"])
    assert told.exit_code == 0
    assert [line.split()[0] for line in told.stdout.splitlines()] == list(TRIALS)
    told = CliRunner().invoke(main, ["drill", "leek"])
    assert told.exit_code != 0
    assert "no trial is called 'leek'" in told.output
    assert "leak" in told.output


def test_a_trial_that_fails_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, trial: Trial, about: Leaking) -> None:
        raise MutiraoError("the run did not end")

    monkeypatch.setattr(sequence, "leak", broken)
    told = CliRunner().invoke(main, ["drill", "leak", "--folder", str(tmp_path), "--json"])
    assert told.exit_code == 1
    assert [(t["verdict"], t["happened"]) for t in json.loads(told.stdout)] == [("BAD", "FAILED: the run did not end")]
