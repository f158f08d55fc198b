"""JSON nested without end, wherever a stranger may have written it, is damaged JSON and no traceback."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from iris import iris
from mutirao.config import resolve
from mutirao.core.agreement import COUNTS, bytes_to_extra, json_from_extra
from mutirao.dashboard.run_summary import event
from mutirao.deploy.policy.privacy_ledger import Ledger
from mutirao.deploy.processes import RECORD, running
from mutirao.errors import Damaged
from mutirao.io import load_arrays
from mutirao.report import execute
from mutirao.runs.audit_trail import parse
from mutirao.runs.run_folder import Folder
from mutirao.runs.verify import verify

DEEP = "[" * 100_000


def test_the_parser_itself_does_not_bear_it() -> None:
    with pytest.raises(RecursionError):
        json.loads(DEEP)


def from_a_file(read: Callable[[Path], object], name: str) -> Callable[[Path], object]:
    def use(folder: Path) -> object:
        (folder / name).write_text(DEEP, encoding="utf-8")
        return read(folder)

    return use


READERS: dict[str, tuple[Callable[[Path], object], object]] = {
    "a line of an audit trail": (lambda folder: parse(DEEP.encode()), None),
    "a line of a trail on the live page": (lambda folder: event(DEEP.encode()), {}),
    "what a hospital has of each class": (
        lambda folder: json_from_extra(COUNTS, bytes_to_extra(COUNTS, DEEP.encode())),
        {},
    ),
    "the record of a process": (from_a_file(running, RECORD), None),
}


@pytest.mark.parametrize(("use", "expected"), READERS.values(), ids=READERS)
def test_what_is_nested_too_deeply_is_read_as_nothing(
    use: Callable[[Path], object], expected: object, tmp_path: Path
) -> None:
    assert use(tmp_path) == expected


def test_a_ledger_that_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text(DEEP, encoding="utf-8")
    with pytest.raises(Damaged, match="cannot be read"):
        Ledger(tmp_path / "ledger.json")


def test_a_file_of_arrays_with_such_a_header_is_damaged(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"mutirao": DEEP}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(Damaged):
        load_arrays(tmp_path / "x.safetensors")


def test_a_run_folder_with_such_a_summary_or_trail_is_told_damaged(tmp_path: Path) -> None:
    execute("iris:iris", resolve(iris.config, {"rounds": 1}), tmp_path / "run", pictures=False)
    (tmp_path / "run" / "summary.json").write_text(DEEP, encoding="utf-8")
    assert "summary.json: not valid JSON" in verify(tmp_path / "run")[1]
    with Folder.open(tmp_path / "run") as folder:
        assert folder.summary() is None
    with (tmp_path / "run" / "audit.jsonl").open("a", encoding="utf-8") as trail:
        trail.write(DEEP + "\n")
    assert verify(tmp_path / "run")[1]
