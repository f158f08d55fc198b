"""Golden outputs are compared, a change is seen, and folders made by earlier code are still good for everything."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from tests.golden.cases import CASES
from tests.golden.comparing import FILES, as_text, compare, differences, machine

from mutirao.cli import main
from mutirao.deploy.flower.client import States

ROOT = Path(__file__).parents[2]
FOLDERS = Path(__file__).parent / "folders"
RESUMED = json.loads((FOLDERS / "resumed.json").read_text())


def golden(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: it must see what Mutirão does from the first import on."""
    command = [sys.executable, "-m", "tests.golden", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def mutirao(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_every_case_is_stored() -> None:
    assert {file.stem for file in FILES.iterdir()} == {*CASES, "names"}


def test_a_few_outputs_and_the_names_that_are_data_are_as_they_were() -> None:
    done = golden("quick")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_all_outputs_are_as_they_were() -> None:
    done = golden()
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_change_is_named_and_ends_with_1(tmp_path: Path) -> None:
    shutil.copytree(FILES, tmp_path / "files")
    file = tmp_path / "files" / "quickstart.json"
    stored = json.loads(file.read_text())
    stored["history"][1]["accuracy"] += 0.5
    stored["audit"]["round"].append("no such key")
    stored["machine"] = machine()
    file.write_text(json.dumps(stored))
    done = golden("quickstart", MUTIRAO_GOLDEN=str(tmp_path / "files"))
    assert done.returncode == 1
    assert "quickstart.json: audit.round: lost ['no such key'], new []" in done.stdout
    assert "quickstart.json: history[1].accuracy: was" in done.stdout


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"digest": "b", "rounds": [{"loss": 0.5}]}, ["digest: was 'a', is 'b'"]),
        ({"digest": "a", "rounds": [{"loss": 0.51}]}, ["rounds[0].loss: was 0.5, is 0.51"]),
        ({"digest": "a", "rounds": []}, ["rounds: was [{'loss': 0.5}], is []"]),
    ],
)
def test_differences_say_where(now: dict[str, object], said: list[str]) -> None:
    was = {"digest": "a", "rounds": [{"loss": 0.5}]}
    assert list(differences(was, now, 0.0)) == said
    elsewhere = list(differences(was, now, 0.05))  # on another kind of machine
    assert elsewhere == [line for line in said if line.startswith("rounds: ")]


def test_a_case_that_is_not_stored_is_said() -> None:
    assert compare("none.json", {}) == ["none.json: nothing is stored; run with --write"]


@pytest.mark.parametrize("name", ["scaffold", "groups", "federation/run"])
def test_a_run_folder_of_earlier_code_is_verified_and_reported(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FOLDERS / name, folder)
    done = mutirao("verify", folder)
    assert done.exit_code == 0, done.output
    done = mutirao("report", folder)
    assert done.exit_code == 0, done.output
    assert "</html>" in (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["scaffold", "groups"])
@pytest.mark.usefixtures("without_pictures")
def test_a_run_of_earlier_code_goes_on(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FOLDERS / name, folder)
    done = mutirao("run", folder / "config.toml", "--set", "rounds=3", "--out", folder, "--resume")
    assert done.exit_code == 0, done.output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 3
    if machine() == RESUMED["machine"]:
        assert summary["digest"] == RESUMED[name]


def test_the_trails_of_sites_of_earlier_code_agree_with_the_run() -> None:
    federation = FOLDERS / "federation"
    trails = [word for name in ("c0", "c1") for word in ("--site", federation / name / "audit.jsonl")]
    done = mutirao("verify", federation / "run", *trails)
    assert done.exit_code == 0, done.output
    assert done.output.count("by the site, agree") == 2


def test_the_policy_of_an_earlier_site_is_read_and_its_state_found(tmp_path: Path) -> None:
    folder = tmp_path / "c0"
    shutil.copytree(FOLDERS / "federation" / "c0", folder)
    done = mutirao("site", "check", folder / "policy.toml")
    assert "may be asked" in done.output, done.output
    (run,) = (folder / "states").iterdir()
    number, state = States(folder / "states", run.name).before("train", 3)
    assert number == 2
    assert set(state) == set(json.loads((FILES / "deployed.json").read_text())["site"]["state"])


@given(
    st.dictionaries(st.text(), st.one_of(st.text(), st.lists(st.text()), st.dictionaries(st.text(), st.floats(-1, 1))))
)
def test_golden_files_are_json(found: dict[str, object]) -> None:
    assert json.loads(as_text(found)) == found
