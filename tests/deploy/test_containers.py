"""The files of deploy/ fit together and to what they name; deploy/build.py builds and runs them, outside the tests."""

import importlib.util
import json
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.deploy.layout import PORT, load_node
from mutirao.deploy.policy.rules import load_policy
from mutirao.deploy.provisioning import CONTAINER_DATA, CONTAINER_FOLDER, create_server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its words."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [
        (kind, rest)
        for line in re.sub(r"\\\n", " ", text).splitlines()
        for kind, _, rest in [line.partition(" ")]
        if kind
    ]


def words_of(kind: str) -> list[str]:
    return [rest for found, rest in steps() if found == kind]


def test_the_dockerfile_copies_what_is_there_and_installs_what_is_declared() -> None:
    for rest in words_of("COPY"):
        *sources, _ = rest.split()
        assert all(
            source.startswith("--from=") or (ROOT / source).exists() or source == INSTALLED for source in sources
        )
    extras = re.findall(r"'\.\[([a-z,]+)\]'", " ".join(words_of("RUN")))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["project"]["optional-dependencies"]
    assert set(extras[0].split(",")) == {"deploy", "privacy", "slides", "dash"} <= declared.keys()
    kernels = [module["name"].rpartition(".")[2] for module in project["tool"]["setuptools"]["ext-modules"]]
    assert f"from mutirao.training.engine import {', '.join(kernels)}" in " ".join(words_of("RUN"))


INSTALLED = "/opt/mutirao"


def test_the_compiler_stays_behind_and_nothing_runs_as_root() -> None:
    kinds = [kind for kind, _ in steps()]
    last = len(kinds) - 1 - kinds[::-1].index("FROM")
    final = steps()[last:]
    assert words_of("FROM") == ["${BASE} AS build", "${BASE}"]
    assert not any("gcc" in rest or "apt-get" in rest or "pip" in rest for kind, rest in final if kind == "RUN")
    assert [kind for kind, _ in final][-6:] == ["USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"]
    assert dict(final)["EXPOSE"] == str(PORT)
    health = json.loads(dict(final)["HEALTHCHECK"].partition("CMD ")[2])
    assert (*health, json.loads(dict(final)["ENTRYPOINT"])) == (
        "mutirao",
        "site",
        "status",
        CONTAINER_FOLDER,
        ["mutirao"],
    )
    assert CliRunner().invoke(main, json.loads(dict(final)["CMD"])).exit_code == 0


def test_torch_is_for_the_cpu_unless_another_build_is_named() -> None:
    assert "TORCH_BUILD=+cpu" in words_of("ARG")
    assert "TORCH_INDEX=" in words_of("ARG")
    first = next(rest for rest in words_of("RUN") if "TORCH_BUILD" in rest)
    assert "\"$(grep '^torch==' constraints.txt)${TORCH_BUILD}\"" in first
    assert [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    flower = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["deploy"]
    assert not any("simulation" in wanted for wanted in flower)  # Ray has no work at a site


@pytest.mark.parametrize("path", [".git", ".venv", ".data", "runs", "tests", "deploy/demo.py", "src/mutirao/a.so"])
def test_what_is_no_part_of_the_image_is_not_sent_to_the_builder(path: str) -> None:
    assert ignored(path)


@pytest.mark.parametrize("path", ["src/mutirao/core/rounds.py", "constraints.txt", "deploy/wheels/torch.whl"])
def test_what_the_image_is_made_of_is_sent_to_the_builder(path: str) -> None:
    assert not ignored(path)


def ignored(path: str) -> bool:
    """Whether .dockerignore leaves a path out: the last line that fits it or a folder above it decides."""
    above = [path, *map(str, Path(path).parents)][:-1]
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!")
        if (
            line
            and not line.startswith("#")
            and any(fnmatch(f"/{p}", f"/{pattern}".replace("/**/", "/*")) for p in above)
        ):
            out = not line.startswith("!")
    return out


def demo_services() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.demo.yaml").read_text())["services"])


def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEPLOY / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_in_the_demonstration_each_party_sees_its_own_folder_and_data_alone() -> None:
    content = yaml.safe_load((DEPLOY / "compose.demo.yaml").read_text())
    smears, *parties = content["services"]
    assert parties == ["server", *demo().HOSPITALS]
    for name in parties:
        service = content["services"][name]
        assert service["volumes"] == [
            "./demo.py:/demo.py:ro",
            "post:/post",
            f"{name}:{CONTAINER_FOLDER}",
            f"{name}-data:{CONTAINER_DATA}:ro",
        ]
        assert service["depends_on"] == {smears: {"condition": "service_completed_successfully"}}
        assert service["command"] == [name]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    first = content["services"][smears]
    assert first["volumes"][2:] == [f"{name}-data:{CONTAINER_DATA}/{name}" for name in parties]
    assert first["network_mode"] == "none"  # root in its container, and nobody to speak to
    used = {text.partition(":")[0] for service in content["services"].values() for text in service["volumes"]}
    assert used - {"./demo.py"} == set(content["volumes"])


def test_the_demonstration_deals_smears_founds_a_hospital_and_admits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own steps up to the processes; the words it says to `mutirao` go to the command line, in this process."""
    script, said = demo(), list[list[str]]()

    def run(command: list[str], check: bool) -> None:
        said.append(command[1:])
        if command[1:3] == ["site", "init"]:
            done = CliRunner().invoke(main, command[1:])
            assert done.exit_code == 0, done.output

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    for name, value in {"DATA": tmp_path / "data", "POST": tmp_path / "post", "SLIDES": 2, "SIDE": 1024}.items():
        monkeypatch.setattr(script, name, value)
    script.POST.mkdir()
    (script.POST / "done").touch()  # of the time before
    script.smears()
    assert sorted(place.name for place in script.DATA.glob("*/*")) == [
        "client_1",
        "client_2",
        "client_3",
        "global_test",
    ]
    assert list(script.POST.iterdir()) == []

    monkeypatch.setattr(script, "HOME", tmp_path / "server")
    create_server(script.HOME, ["server"])
    script.send(script.HOME / "ca.crt")
    for name in script.HOSPITALS:
        (script.POST / f"{name}.pub").touch()
    script.serve()
    assert [words[1] for words in said] == [
        "up",
        "admit",
        "admit",
        "admit",
        "run",
        str(script.HOME / "runs/demo"),
        "down",
    ]
    assert (script.POST / "done").exists()

    monkeypatch.setattr(script, "HOME", tmp_path / "recife")
    monkeypatch.setattr(script, "DATA", tmp_path / "data" / "recife")
    script.join("recife")
    site = load_node(script.HOME)
    assert (site.client, site.superlink) == ("client_1", f"server:{PORT}")
    assert (script.POST / "recife.pub").read_text() == site.public_key.read_text()
    policy = load_policy(site.policy_file)
    assert policy.settings["data"] == str(script.DATA)
    assert {"train", "agree"} <= set(policy.asked.requests)
    assert {"val_loss", "val_acc"} <= set(policy.reply.metrics)
