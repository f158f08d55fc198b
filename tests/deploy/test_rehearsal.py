"""The whole federation on this machine, as a user rehearses it; and the same from the compose file, without Docker."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy import processes
from mutirao.deploy.layout import Node, Server, free_port, load_place
from mutirao.deploy.processes import processes_of, running, wait_until
from mutirao.deploy.provisioning import CONTAINER_FOLDER, compose_text
from mutirao.runs.verify import verify_all

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MUTIRAO = str(Path(sys.executable).parent / "mutirao")
HOSPITALS = ("recife", "natal", "fortaleza")


COMMAND = [MUTIRAO, "site", "rehearse", "--sites", "2", "--rounds", "1", "--set", "hidden=8", "--json"]


@dataclass
class Rehearsed:
    """The folder of a rehearsed federation, and what the command reported."""

    folder: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    """One federation of real processes with TLS and keys, made once for all tests that look at it."""
    place = tmp_path_factory.mktemp("rehearsed")
    coloured = os.environ | {"FORCE_COLOR": "1"}  # as in Jupyter
    done = subprocess.run(COMMAND, cwd=place, env=coloured, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return Rehearsed(place / "rehearsal", json.loads(done.stdout))


def test_a_rehearsal_from_an_empty_folder(rehearsed: Rehearsed) -> None:
    folder, report = rehearsed.folder, rehearsed.report
    assert report["ok"] is True
    assert set(report["findings"].values()) == {True}
    assert json.loads((folder / "rehearsal.json").read_text())["digest"] == report["digest"]


def test_the_rehearsed_run_is_the_local_one(rehearsed: Rehearsed, tmp_path: Path) -> None:
    summary = json.loads((rehearsed.folder / "run" / "summary.json").read_text())
    assert (summary["rounds"], summary["digest"], summary["clients"]) == (1, rehearsed.report["digest"], 2)
    assert (rehearsed.folder / "run" / "report.html").exists()
    config = str(rehearsed.folder / "run" / "config.toml")
    done = CliRunner().invoke(main, ["run", config, "--out", str(tmp_path / "local"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "local" / "summary.json").read_text())["digest"] == summary["digest"]


def test_the_trails_of_the_rehearsed_sites_agree_with_the_run(rehearsed: Rehearsed) -> None:
    trails = [rehearsed.folder / name / "audit.jsonl" for name in rehearsed.report["sites"]]
    good, problems = verify_all(rehearsed.folder / "run", trails)
    assert (problems, sum("by the site, agree" in line for line in good)) == ([], 2)


def test_a_stranger_is_not_admitted_to_the_rehearsal(rehearsed: Rehearsed) -> None:
    log = (rehearsed.folder / "server" / "logs" / "superlink.log").read_text()
    assert log.count("Activated node_id") == 2  # the stranger is not among them
    assert re.search(r'"POST /v1/fleet/activate-node HTTP/1.1" 4\d\d', log)


def test_a_rehearsal_leaves_no_process_and_no_port_behind(rehearsed: Rehearsed) -> None:
    folder = rehearsed.folder
    places = [folder / name for name in ("server", "stranger", *rehearsed.report["sites"])]
    assert [processes_of(place) for place in places] == [[]] * 4
    assert processes.port_problem(load_place(folder / "server")) == ""  # type: ignore[arg-type]


def test_a_folder_that_holds_a_rehearsal_is_not_used_again(rehearsed: Rehearsed) -> None:
    again = subprocess.run(COMMAND, cwd=rehearsed.folder.parent, capture_output=True, text=True, timeout=200)
    assert (again.returncode, "holds a rehearsal already" in again.stderr) == (2, True)


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def test_the_compose_file_is_what_the_library_writes() -> None:
    server = Server(Path("/srv"), "server", ("server",))
    sites = [Node(Path("/srv"), name, f"server:{server.port}") for name in HOSPITALS]
    assert (DEPLOY / "compose.yaml").read_text() == compose_text([server, *sites])


def test_each_service_has_one_volume_and_only_the_server_a_port() -> None:
    content = compose()
    assert list(content["services"]) == list(content["volumes"]) == ["server", *HOSPITALS]
    for name, service in content["services"].items():
        assert service["volumes"] == [f"{name}:{CONTAINER_FOLDER}", f"${{DATA_{name.upper()}:-./data}}:/data:ro"]
        assert (service["image"], service["pull_policy"]) == ("mutirao", "never")
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert ("ports" in service) == (name == "server")


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    """A folder in place of each volume."""
    return tmp_path / "volumes"


def as_in_container(words: list[str], service: str, volumes: Path, port: int) -> list[str]:
    """A command of a container, for this machine: its own folder for the volume, loopback for the network."""
    own = str(volumes / service)
    changed = [word.replace(CONTAINER_FOLDER, own).replace("server:9092", f"localhost:{port}") for word in words]
    return [MUTIRAO, *(str(port) if word == "9092" else word for word in changed)]


@pytest.mark.slow
def test_the_commands_of_the_compose_file_bring_a_site_to_its_server(volumes: Path) -> None:
    text, port, started = (DEPLOY / "compose.yaml").read_text(), free_port(), list[subprocess.Popen[bytes]]()
    hints = re.findall(r"#   docker compose run --rm -T (\S+) (site init .*)", text)
    assert [service for service, _ in hints] == ["server", *HOSPITALS]
    first = dict(hints[:2])
    for service, line in first.items():
        words, _, given = line.partition(" < ")
        content = (volumes / "server" / given).read_bytes() if given else b""
        command = as_in_container(shlex.split(words), service, volumes, port)
        done = subprocess.run(command, input=content, capture_output=True, timeout=200)
        assert done.returncode == 0, done.stderr
    site = load_place(volumes / "recife")
    assert isinstance(site, Node)
    try:
        for service in first:
            command = as_in_container(compose()["services"][service]["command"], service, volumes, port)
            with (volumes / f"{service}.log").open("wb") as out:
                started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True))
            if service == "server":
                assert wait_until(lambda: processes.is_answering(load_place(volumes / "server")), 60)  # type: ignore[arg-type]
                admit = [MUTIRAO, "site", "admit", str(volumes / "server"), "-", "--name", "recife"]
                with site.public_key.open("rb") as key:
                    done = subprocess.run(admit, stdin=key, capture_output=True, timeout=200)
                assert done.returncode == 0, done.stderr
        said = volumes / "recife.log"
        assert wait_until(lambda: "SuperNode ID:" in said.read_text(), 60), said.read_text()
        for service, process in zip(first, started, strict=True):
            there = running(volumes / service)
            assert there is not None
            assert there.pid == process.pid  # it became the process, so that whoever started it can watch and end it
            *health, folder = compose()["services"][service]["healthcheck"]["test"]
            assert (health, folder) == (["CMD", "mutirao", "site", "status"], CONTAINER_FOLDER)
            done = subprocess.run([MUTIRAO, *health[2:], str(volumes / service)], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            process.wait(120)
        for service in first:
            processes.stop(volumes / service)
    assert [processes_of(volumes / service) for service in first] == [[], []]
    shutil.rmtree(volumes)
    assert os.environ.get(processes.FOLDER_VARIABLE) is None
