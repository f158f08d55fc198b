"""The command line as a person or a script uses it, in real processes."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mutirao.cli import main

QUICK = ["--set", "rounds=2", "--set", "clients=10", "--set", "per_round=4", "--set", "epochs=1"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def mutirao(*words: str) -> Result:
    """The command in this process, which saves a start of Python for each."""
    return CliRunner().invoke(main, words)


def process(*words: str) -> subprocess.CompletedProcess[str]:
    """The command as a person starts it."""
    return subprocess.run([sys.executable, "-m", "mutirao.cli", *words], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_run_verify_repeat_and_report(tmp_path: Path) -> None:
    done = process("run", "quickstart", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert "round 2/2" in done.stderr
    out = tmp_path / "runs" / "quickstart"
    for name in ("curves.png", "partition.png", "report.html", "summary.json"):
        assert (out / name).stat().st_size > 100
    assert "://" not in (out / "report.html").read_text()

    again = mutirao("run", "runs/quickstart/config.toml", "--json")
    digest = json.loads(again.stdout)["digest"]
    assert digest == json.loads((out / "summary.json").read_text())["digest"]
    assert (tmp_path / "runs" / "quickstart-2").is_dir()

    assert mutirao("verify", "runs/quickstart").exit_code == 0
    (out / "history.csv").write_text((out / "history.csv").read_text().replace("1,", "3,", 1))
    spoilt = mutirao("verify", "runs/quickstart")
    assert spoilt.exit_code == 1
    assert "ALTERED  history.csv" in spoilt.stdout
    (out / "report.html").unlink()
    assert mutirao("report", "runs/quickstart").exit_code == 0
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "quikstart"], "no recipe is called 'quikstart'; did you mean 'quickstart'?"),
        (["run", "missing.toml"], "cannot read missing.toml: No such file"),
        (["run", "quickstart", "--set", "round=3"], "unknown setting 'round'; did you mean 'rounds'?"),
        (["run", "quickstart", "--set", "rounds"], "is not of the form key=value"),
        (["run", "quickstart", "--set", "rounds=0"], "rounds: 0 is too small"),
        (["run", "quickstart", "--set", "rounds=two"], "rounds: 'two' is not a whole number"),
        (["run", "quickstart", "--set", "aggregate=fedavgg"], "did you mean 'fedavg'?"),
        (["run", "quickstart", "--set", "aggregate.mu=1"], "aggregate=fedavg has no setting 'mu'"),
        (["run", "quickstart", "--set", "data=nowhere"], "data: there is no folder or file 'nowhere'"),
        (["run", "quickstart", "--set", "clients=2000"], "partition"),
        (["run", "nowhere:recipe"], "cannot load 'nowhere:recipe'"),
        (["verify", "nowhere"], "nowhere holds no run"),
        (["report", "nowhere"], "nowhere holds no finished run"),
        (["data", "check", "cifar11", "x"], "cifar10"),
        (["data", "check", "cifar10", "nowhere"], "nowhere"),
        (["list", "quikstart"], "did you mean 'quickstart'?"),
    ],
)
def test_wrong_input_ends_in_one_clear_line(tmp_path: Path, words: list[str], said: str) -> None:
    done = mutirao(*words)
    assert done.exit_code not in (0, 1) or words[0] in ("report",)
    assert done.exit_code != 0
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_every_command_has_help_with_an_example(tmp_path: Path) -> None:
    commands = ["", "list", "run", "verify", "report", "dash", "plot", "export", "data", "data list", "data check"]
    for command in commands:
        done = mutirao(*command.split(), "--help")
        assert done.exit_code == 0
        assert "Example" in done.stdout, command


def test_summaries_of_commands_are_whole_and_fit_a_line(tmp_path: Path) -> None:
    commands = dict(main.commands)
    for name, group in main.commands.items():
        if isinstance(group, click.Group):
            commands |= {f"{name} {inner}": command for inner, command in group.commands.items()}
    assert len(commands) > 50
    for name, command in commands.items():
        summary = command.get_short_help_str(limit=1000)
        first_line = command.help.strip().splitlines()[0]
        assert summary.rstrip(".") == first_line.rstrip("."), name  # click decides about the full stop
        assert len(summary) <= 70, name


def test_every_command_stands_under_one_heading(tmp_path: Path) -> None:
    listed = [name for names in main.headings.values() for name in names]
    assert sorted(listed) == sorted(main.commands)
    text = mutirao("--help").stdout
    for heading in main.headings:
        assert f"{heading}:\n" in text
    assert "\nCommands:" not in text
    assert "..." not in text.split("Options:")[1]


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, mutirao.cli; print([m for m in ('torch', 'numpy', 'sklearn', 'flwr', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["run", "nosuchrecipe"], ["run", "quickstart", "--set", "ruonds=3"]])
def test_a_typing_error_is_answered_without_torch(tmp_path: Path, words: list[str]) -> None:
    code = (
        f"import sys; sys.argv[1:] = {words!r}\n"
        "from mutirao.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print([m for m in ('torch', 'scipy', 'sklearn', 'matplotlib', 'flwr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"
    assert not (tmp_path / "runs").exists()


def test_list_names_recipes_parts_and_settings(tmp_path: Path) -> None:
    everything = json.loads(mutirao("list", "--json").stdout)
    assert {"quickstart", "cifar10"} <= everything["recipes"].keys()
    assert {"fedavg", "krum"} <= everything["aggregate"].keys()
    assert "0.3" in mutirao("list", "quickstart").stdout
    assert "cifar10" in mutirao("data", "list").stdout


def test_out_and_resume(tmp_path: Path) -> None:
    first = mutirao("run", "quickstart", *QUICK, "--out", "a", "--resume")  # nothing there yet: fresh
    assert first.exit_code == 0, first.stderr
    refused = mutirao("run", "quickstart", *QUICK, "--out", "a")
    assert refused.exit_code == 2
    assert "already holds a run" in refused.stderr
    finished = mutirao("run", "quickstart", "--out", "a", "--resume")
    assert finished.exit_code == 0
    assert "already finished" in finished.stdout
    changed = mutirao("run", "quickstart", "--out", "a", "--resume", "--set", "lr=0.5")
    assert changed.exit_code == 2
    assert "lr cannot change" in changed.stderr


@pytest.mark.slow
def test_killed_by_the_system_and_resumed_from_the_command_line(tmp_path: Path) -> None:
    settings = ["--set", "rounds=20", "--set", "clients=10", "--set", "per_round=8", "--set", "epochs=3"]
    straight = mutirao("run", "quickstart", *settings, "--out", "straight", "--json")
    draw, kills = random.Random(1), 0
    for _ in range(20):
        running = subprocess.Popen(
            [sys.executable, "-m", "mutirao.cli", "run", "quickstart", *settings, "--out", "killed", "--resume"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        began = time.monotonic()
        while not (tmp_path / "killed" / "history.csv").exists() and running.poll() is None:
            assert time.monotonic() - began < 120
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5) if kills == 0 else draw.uniform(1.0, 4.0))
        running.send_signal(signal.SIGKILL)
        if running.wait() == 0:
            break
        kills += 1
        if kills == 2:
            break
    last = mutirao("run", "quickstart", *settings, "--out", "killed", "--resume", "--json")
    assert last.exit_code == 0, last.stderr
    assert kills >= 1
    assert json.loads(last.stdout)["digest"] == json.loads(straight.stdout)["digest"]
    assert mutirao("verify", "killed").exit_code == 0


@pytest.mark.slow
def test_the_table_at_the_end_has_the_worst_client_and_leaves_the_rest_to_the_report(tmp_path: Path) -> None:
    sets = [word for s in ("rounds=2", "clients=8", "per_round=4", "clients_every=1") for word in ("--set", s)]
    done = mutirao("run", "quickstart", *sets, "--out", str(tmp_path / "run"))
    assert "accuracy_worst" in done.output
    assert "accuracy_p10" not in done.output
    assert "accuracy_clients" not in done.output
    assert "accuracy_p10" in json.loads((tmp_path / "run/summary.json").read_text())["final"]
