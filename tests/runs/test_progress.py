"""What a person or a program sees of a run that goes on."""

import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from iris import iris, iris_task
from mutirao.cli import main
from mutirao.core.rounds import Round, Run
from mutirao.experiments.task import Task
from mutirao.runs.progress import Progress, clock, json_line, sparkline

TASK = iris_task(iris.config())
QUICK = ["--set", "rounds=3", "--set", "clients=10", "--set", "per_round=4", "--set", "epochs=1"]


def row(number: int, **more: float) -> dict[str, float]:
    line = {"round": number, "selected": 10, "failed": 0, "rejected": 0, "bytes_down": 1000, "bytes_up": 500}
    return line | {"accuracy": 1 - 1 / (number + 1)} | more


def follow(progress: Progress, rounds: int, task: Task = TASK, **more: float) -> None:
    run = Run({})
    for number in range(1, rounds + 1):
        run.round = number
        progress(run, Round(row(number, **more), []), task)


@pytest.mark.parametrize("width", [10, 30, 50, 80, 200])
def test_the_line_fits_any_width_and_keeps_the_round(width: int) -> None:
    progress = Progress(40, mode="lines")
    follow(progress, 20, failed=2)
    line = progress.line(20, row(20, failed=2), "accuracy", width)
    assert len(line) < width
    assert "round 20/40".startswith(line) or line.startswith("round 20/40")
    if width >= 50:
        assert "accuracy 0.9524" in line
    if width >= 80:
        assert "2 of 10 clients lost" in line
    if width >= 200:
        assert "left" in line
        assert "30 kB" in line


def test_piped_output_is_plain_lines_with_the_last_round(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(30) as progress:
        follow(progress, 30)
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.strip().splitlines()
    assert lines[-1].startswith("round 30/30")
    assert len(lines) < 10  # a second apart: a log is not flooded
    assert "\x1b" not in said.err


def test_jsonl_is_a_line_a_round_and_the_summary(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["run", "quickstart", *QUICK, "--out", str(tmp_path / "a"), "--progress", "jsonl"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [x["event"] for x in lines] == ["round", "round", "round", "finished"]
    assert lines[2]["round"] == lines[3]["rounds"] == 3
    assert lines[2]["accuracy"] == lines[3]["final"]["accuracy"]
    assert json.loads(json_line({"loss": math.nan, "n": np.int64(3)})) == {"loss": None, "n": 3}


def test_quiet_says_nothing_but_the_result(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["run", "quickstart", *QUICK, "--out", str(tmp_path / "a"), "--progress", "quiet"])
    assert done.exit_code == 0
    assert done.stderr == ""


@pytest.mark.slow
def test_a_terminal_of_forty_columns_is_never_overrun(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/runs']; from test_progress import *\n"
        "with Progress(12) as p:\n    follow(p, 12)\n    assert p.live is not None"
    )
    master, slave = pty.openpty()
    env = os.environ | {"COLUMNS": "40", "PYTHONIOENCODING": "utf-8", "TERM": "xterm"}
    child = subprocess.Popen([sys.executable, "-c", code], stderr=slave, env=env, cwd=Path(__file__).parents[2])
    os.close(slave)
    seen = b""
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:
            break
        if not block:
            break
        seen += block
    assert child.wait(60) == 0
    text = seen.decode()
    assert "round 12/12" in text
    assert "█" in text
    import re

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert max(len(line) for line in re.split(r"[\r\n]+", plain)) <= 40


@example([1.0, 0.0, 1.0], 2)
@example([0.0, 5e-324], 2)
@example([-1e308, 1e308], 2)
@given(st.lists(st.floats(allow_nan=True), max_size=200), st.integers(1, 40))
def test_a_sparkline_is_never_wider_than_asked_and_ends_with_the_last_value(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    known = [v for v in values if math.isfinite(v)]
    assert len(line) == min(width, len(known))
    if len(line) > 1 and known[-1] == max(known) > min(known):
        assert line[-1] == "█"


def test_clock() -> None:
    assert [clock(s) for s in (0, 65, 7200)] == ["0:00", "1:05", "2:00:00"]
