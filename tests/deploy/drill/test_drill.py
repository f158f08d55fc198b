"""The drill itself: kills in process end with the digest they should, and what cannot be done is said as not run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy.drill import course, kills, trials, troubles
from mutirao.deploy.drill.course import run_trials
from mutirao.deploy.drill.federation import TRIVIAL, rounds_made
from mutirao.deploy.drill.trials import TRIALS, Impossible, Trial
from mutirao.errors import ConfigError, MutiraoError


def test_every_trial_is_listed_and_can_be_carried_out() -> None:
    told = CliRunner().invoke(main, ["drill", "--list"])
    assert told.exit_code == 0
    assert [line.split()[0] for line in told.stdout.splitlines()] == list(TRIALS)
    assert set(TRIALS) == set(troubles.TROUBLES) | {"kills", "in-process", "leak", "ratings"}
    with pytest.raises(ConfigError, match=r"no trial is called 'clok'.*clock"):
        list(run_trials(["clok"]))


@pytest.mark.slow
def test_killed_runs_end_with_the_digest_of_one_that_was_not(tmp_path: Path) -> None:
    (trial,) = kills.local_kills(tmp_path, 5, seed=1, rounds=25)
    assert trial.good, trial.happened
    assert trial.kills == 5
    assert rounds_made(tmp_path / "undisturbed") == 25


def test_another_digest_is_a_bad_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["a", "", "b"])
    monkeypatch.setattr(kills, "run_forked", lambda work, fate: next(digests))
    (trial,) = kills.local_kills(tmp_path, 1, seed=0, rounds=2)
    assert not trial.good
    assert "DIFFERS" in trial.happened


def test_what_this_machine_does_not_allow_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(folder: Path, trial: Trial) -> None:
        raise Impossible("network namespaces need Linux and root")

    def broken(folder: Path, trial: Trial) -> None:
        raise MutiraoError("the run did not end")

    monkeypatch.setattr(course, "TROUBLES", {"cut": never, "slow": broken})
    told = CliRunner().invoke(main, ["drill", "cut", "slow", "--folder", str(tmp_path), "--json"])
    assert told.exit_code == 1
    assert [t["verdict"] for t in json.loads(told.stdout)] == ["not run", "BAD"]


def test_a_shifted_clock_is_shifted(tmp_path: Path) -> None:
    import subprocess
    import sys
    import time

    try:
        env = troubles.shift_clock(tmp_path, 3600)
    except Impossible:
        pytest.skip("no C compiler")
    code = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=True
    )
    wall, date, steady = (float(word) for word in told.stdout.split())
    assert abs(wall - time.time() - 3600) < 60
    assert abs(date - time.time() - 3600) < 60
    assert abs(steady - time.monotonic()) < 60


def test_a_script_takes_its_steps_one_after_the_other(tmp_path: Path) -> None:
    taken: list[str] = []

    class Calm:
        def mend(self) -> None:
            taken.append("mend")

    calm: Any = Calm()
    script = troubles.Script(calm, troubles.after_round(1), troubles.do(lambda: taken.append("done")))
    script(tmp_path)
    assert taken == ["mend"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "state_001.safetensors").touch()
    for _ in range(3):
        script(tmp_path)
    assert taken.count("done") == 1
    assert script.steps == []


def test_a_round_with_a_client_missing_is_repeated_so_that_digests_can_be_compared() -> None:
    assert TRIVIAL["min_replies"] == TRIVIAL["clients"]
    assert trials.Trial("x", "y").verdict == "BAD"
