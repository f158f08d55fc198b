"""What goes out with a release agrees with itself, workflows are sound, and other Pythons can install it."""

import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import mutirao

ROOT = Path(__file__).parents[1]
TOOLS = Path(sys.executable).parent
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_version_is_written_once_and_the_changelog_and_citation_know_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "mutirao.__version__"
    released = re.findall(r"^## \[(\d[^\]]*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    citation = read(ROOT / "CITATION.cff")
    assert released[0] == (mutirao.__version__, citation["date-released"])
    assert citation["version"] == mutirao.__version__
    days = [date.fromisoformat(day) for _, day in released]
    assert days == sorted(days, reverse=True)


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["cff-version"], citation["type"], citation["license"]) == ("1.2.0", "software", "Apache-2.0")
    assert all(author.keys() & {"name", "family-names"} for author in citation["authors"])


@pytest.mark.parametrize("form", [f for f in FORMS if f.stem != "config"], ids=lambda path: path.stem)
def test_a_form_for_issues_is_one_that_github_takes(form: Path) -> None:
    content = read(form)
    assert {"name", "description", "body"} <= content.keys()
    names = [field["id"] for field in content["body"]]
    assert len(set(names)) == len(names)
    for field in content["body"]:
        assert field["type"] in {"input", "textarea", "dropdown", "checkboxes", "markdown"}
        assert field["attributes"]["label"]
        assert field["type"] != "dropdown" or field["attributes"]["options"]
    assert any(field.get("validations", {}).get("required") for field in content["body"])


def test_workflows_pass_their_linter() -> None:
    done = subprocess.run(
        [TOOLS / "zizmor", "--offline", "--no-progress", "--strict-collection", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No findings" in done.stdout + done.stderr
    assert len(WORKFLOWS) == 3


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_but_where_it_publishes(workflow: Path) -> None:
    content = read(workflow)
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"] <= 60
        writes = {key for key, value in job.get("permissions", {}).items() if value == "write"}
        assert writes <= ({"id-token", "pages"} if name == "publish" else set())


def resolve(*words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """What uv would install, from wheels alone; `-` stands for what is typed."""
    command = [TOOLS / "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--only-binary", ":all:"]
    return subprocess.run([*command, *words], cwd=ROOT, input=typed, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.12", "3.13", "3.14"])
def test_every_extra_can_be_installed_from_wheels(python: str) -> None:
    if resolve("-", typed="packaging").returncode:
        pytest.skip("no package index can be reached: whether the dependencies resolve was not looked at")
    done = resolve("--all-extras", "--python-version", python, "pyproject.toml")
    assert done.returncode == 0, done.stderr
    found = set(re.findall(r"^([a-z0-9][a-z0-9._-]*)==", done.stdout, re.M))
    assert {"torch", "flwr", "lightgbm", "numba", "onnxruntime", "openslide-bin", "opacus"} <= found
