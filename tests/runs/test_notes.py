"""Notes kept with a run: whole or not there, never over somebody else's, never outside the folder."""

import os
from pathlib import Path

import pytest

from mutirao.runs.execute import execute
from mutirao.runs.notes import MOST, NAME, Changed, read_notes, write_notes
from mutirao.runs.verify import verify


def test_who_writes_second_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    assert read_notes(tmp_path).mark == ""
    mine = write_notes(tmp_path, "first\r\nline — ç", "")
    assert read_notes(tmp_path) == mine
    assert (tmp_path / NAME).read_text(encoding="utf-8") == "first\nline — ç"
    theirs = write_notes(tmp_path, "theirs", mine.mark)
    with pytest.raises(Changed) as told:
        write_notes(tmp_path, "mine again", mine.mark)
    assert told.value.now == theirs == read_notes(tmp_path)
    assert write_notes(tmp_path, " \n", theirs.mark).mark == ""
    assert [*tmp_path.iterdir()] == []


def test_notes_are_bounded_and_plain_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 20,000 bytes"):
        write_notes(tmp_path, "ç" * MOST, "")
    (tmp_path / NAME).write_bytes(b"x" * 10_000_000)
    assert "longer than" in read_notes(tmp_path).problem
    with pytest.raises(ValueError, match="longer than"):
        write_notes(tmp_path, "short", "")
    for make in (lambda p: p.symlink_to("/etc/hostname"), os.mkfifo, Path.mkdir):
        place = tmp_path / make.__qualname__.replace("<", "").replace(">", "")
        place.mkdir()
        make(place / NAME)
        found = read_notes(place)
        assert found.text == ""
        assert found.problem
        with pytest.raises(ValueError, match=NAME):
            write_notes(place, "over it", "")
    (tmp_path / NAME).write_bytes(b"\xff\xfe ok")
    assert read_notes(tmp_path).text.endswith(" ok")


def test_a_run_with_notes_verifies(tmp_path: Path) -> None:
    execute("iris:iris", {"rounds": 1}, tmp_path / "run")
    before = verify(tmp_path / "run")
    write_notes(tmp_path / "run", "kept", "")
    assert verify(tmp_path / "run") == before
    assert before[1] == []
