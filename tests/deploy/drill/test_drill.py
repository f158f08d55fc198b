"""The drill itself: what is listed can be carried out, and what goes wrong is a bad trial."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy import leak_drill
from mutirao.deploy.leak_drill import LeakDrill
from mutirao.errors import MutiraoError
from mutirao.privacy.trials import TRIALS, Trial


def test_every_trial_is_listed_and_another_is_refused() -> None:
    done = CliRunner().invoke(main, ["drill", "--list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TRIALS)
    done = CliRunner().invoke(main, ["drill", "leek"])
    assert done.exit_code != 0
    assert "no trial is called 'leek'" in done.output
    assert "leak" in done.output


def test_a_trial_that_fails_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, trial: Trial, drill: LeakDrill) -> None:
        raise MutiraoError("the run did not end")

    monkeypatch.setattr(leak_drill, "drill_leak", broken)
    done = CliRunner().invoke(main, ["drill", "leak", "--folder", str(tmp_path), "--json"])
    assert done.exit_code == 1
    assert [(t["verdict"], t["happened"]) for t in json.loads(done.stdout)] == [("BAD", "FAILED: the run did not end")]
