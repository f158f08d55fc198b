"""What the audit of dependencies finds, and what it cannot."""

import importlib.util
import subprocess
import sys
from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "audit.py"
spec = importlib.util.spec_from_file_location("audit", SCRIPT)
assert spec
assert spec.loader
audit: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)


class Package(Distribution):
    """An installed package that says only what a test wants it to."""

    def __init__(self, version: str = "1.0", **about: str) -> None:
        self.about = Message()
        self.about["Version"] = version
        for key, value in about.items():
            self.about[key.replace("_", "-")] = value

    @property
    def metadata(self) -> Any:
        return self.about

    def read_text(self, filename: str) -> None:
        return None

    def locate_file(self, path: Any) -> Any:
        return path


@pytest.mark.parametrize(
    ("licence", "fit"),
    [
        ("MIT", True),
        ("Apache-2.0 OR BSD-3-Clause", True),
        ("BSD-3-Clause AND GPL-3.0-only", False),
        ("AGPL-3.0-or-later", False),
        ("", False),
        ("Proprietary", False),
    ],
)
def test_a_licence_that_asks_for_more_than_its_text_is_told(licence: str, fit: bool) -> None:
    found = list(audit.licences({"parcel": Package(License_Expression=licence)}))
    assert (found == []) is fit


def test_a_published_hole_of_an_old_version_is_told_without_any_network() -> None:
    assert list(audit.old_holes({"torch": Package("2.5.1+cpu")})) == [
        "torch 2.5.1+cpu: CVE-2025-32434, mended in 2.6.0",
    ]
    assert not list(audit.old_holes({"torch": Package("2.13.0+cpu")}))


def test_what_pip_audit_found_is_told() -> None:
    hole = {"id": "PYSEC-1", "fix_versions": ["1.1"]}
    said = list(audit.holes([{"name": "parcel", "version": "1.0", "vulns": [hole]}, {"name": "x", "skip_reason": "?"}]))
    assert said == ["parcel 1.0: PYSEC-1, mended in 1.1"]


def test_every_package_that_we_need_is_found_and_its_licence_is_known() -> None:
    packages = audit.shipped()
    assert {"torch", "numpy", "flwr", "cryptography", "opacus"} <= packages.keys()
    assert list(audit.licences(packages)) == []


def test_a_machine_that_can_ask_nobody_does_not_pass_for_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "ask_pip_audit", list)
    audit.main()
    assert "no service answered" in capsys.readouterr().err


def test_a_failing_audit_ends_with_1(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import audit; audit.ask_pip_audit = lambda: [dict("
    code += "name='x', version='1', vulns=[dict(id='CVE-1', fix_versions=[])])]; sys.exit(audit.main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "x 1: CVE-1, mended in none yet" in done.stderr
