"""What we replace inside Flower is what we took it for, in every version that the pin lets in."""

import inspect
import logging
import tomllib
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from mutirao.deploy import flower_patches, layout
from mutirao.deploy.flower_patches import CHECKED, PATCHED, PatchedFunction
from mutirao.deploy.server import flwr_command, superlink
from mutirao.deploy.site import clientapp, supernode

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PINS = [r.specifier for texts in EXTRAS.values() for r in map(Requirement, texts) if r.name == "flwr" and r.specifier]
PIN = PINS[0]


@pytest.mark.parametrize("number", CHECKED)
def test_every_internal_was_read_in_that_version_and_the_pin_lets_it_in(number: str) -> None:
    assert [one.where for one in PATCHED if number not in one.checked] == []
    assert PIN.contains(number)


@pytest.mark.parametrize("internal", PATCHED, ids=lambda one: one.where.partition(":")[2])
def test_the_installed_flower_is_as_recorded(internal: PatchedFunction) -> None:
    assert version("flwr") in CHECKED
    assert flower_patches.signature_and_digest(internal) == (internal.takes, internal.checked[version("flwr")])


def test_the_pin_lets_in_no_version_that_nobody_looked_at() -> None:
    newest = max(map(Version, CHECKED))
    assert not PIN.contains(f"{newest.major}.{newest.minor + 1}.0")
    oldest = min(map(Version, CHECKED))
    assert not PIN.contains(f"{oldest.major}.{oldest.minor - 1}.0")


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be put in Flower's places, by where."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(
        flower_patches, "patch", lambda one, make: made.update({one.where: make(lambda *_, **__: None)})
    )
    return made


def test_ours_take_what_flowers_own_take(replaced: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (superlink, supernode):
        monkeypatch.setattr(module, "log", logging.getLogger("aside"))  # its own handler is for its own process
    clientapp.prepare()
    monkeypatch.setattr("flwr.supernode.runtime.run_clientapp.run_clientapp", lambda **_: None)
    clientapp.answer_one_message(["--insecure", "--token", "x"], 1)
    monkeypatch.setattr("flwr.superlink.cli.flower_superlink", lambda: None)
    monkeypatch.setattr(superlink, "read_secret", lambda path: "secret")
    monkeypatch.setattr(superlink, "load_server", lambda path: types.SimpleNamespace(secret=path))
    superlink.main()
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", lambda: None)
    monkeypatch.setattr(supernode, "restart", lambda: None)
    supernode.main()
    flwr_command.send_secret(layout.Server(Path("x"), "server"), "secret")
    assert replaced.keys() == {one.where for one in PATCHED}
    for one in PATCHED:
        words, _, keywords = one.takes.partition("*, ")
        given = [word for word in words.split(", ") if word]
        inspect.signature(replaced[one.where]).bind(*given, **{k: None for k in keywords.split(", ") if k})


def test_another_version_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PatchedFunction("flwr.superlink.main:create_the_app", "a door stands before it", "config", {})
    with pytest.raises(SystemExit, match=r"error: flwr \S+ has no flwr.superlink.main:create_the_app, .* checked with"):
        flower_patches.patch(gone, lambda own: own)
    moved = PatchedFunction("flwr.superlink.nowhere:create_app", "a door stands before it", "config", {})
    with pytest.raises(SystemExit, match=r"has no flwr.superlink.nowhere:create_app"):
        flower_patches.patch(moved, lambda own: own)
    changed = PatchedFunction(
        "flwr.superlink.main:create_app", "a door stands before it", "config", {"1.40.0": "0" * 16}
    )
    assert flower_patches.unverified_changes(*PATCHED) == ""
    told = flower_patches.unverified_changes(changed, gone)
    assert told.endswith("in create_app, create_the_app")
    assert "\n" not in told
