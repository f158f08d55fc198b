"""What was read of a file is kept, mapped, and made again when it does not fit any more."""

import json
import logging
import os
import zlib

import numpy as np
import pytest
from letor_files import EXAMPLE, put, same

from mutirao.errors import ConfigError
from mutirao.systems.ranking import letor
from mutirao.systems.ranking.letor import read_letor


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def reads(monkeypatch):
    """How often a file was really read."""
    seen = []
    real = letor.read_raw_letor

    def count(file):
        seen.append(file)
        return real(file)

    monkeypatch.setattr(letor, "read_raw_letor", count)
    return seen


def kept_in(file):
    (folder,) = [f for f in file.with_name(f"{file.name}.mutirao").iterdir() if not f.name.startswith(".")]
    return folder


def test_a_file_is_read_once_and_mapped_after_that(tmp_path, home, reads):
    file = put(tmp_path, EXAMPLE)
    first, second = read_letor(file), read_letor(file)
    assert reads == [file]
    assert same(first, second)
    assert same(first, read_letor(file, cache=False))
    assert not home.exists()
    base = second.x
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(base).__name__ == "mmap"
    second.x[0, 0] = 9  # copy-on-write: what is kept stays as it is
    assert read_letor(file).x[0, 0] == 0.5
    assert sorted(f.name for f in kept_in(file).iterdir()) == [
        "facts.json",
        "grades.npy",
        "queries.npy",
        "query_ids.npy",
        "x.npy",
    ]
    assert np.array_equal(np.load(kept_in(file) / "x.npy"), first.x)  # a file any program can read


def test_text_as_names_and_blocks_that_grow_wider_are_kept_too(tmp_path, home, monkeypatch):
    monkeypatch.setattr(letor, "BLOCK", 16)
    rows = b"".join(b"1 qid:q%d %d:%d\n" % (k, 1 + k // 3, k) for k in range(40))
    file = put(tmp_path, rows)
    assert same(read_letor(file), read_letor(file, cache=False))
    assert read_letor(file).x.shape == (40, 14)
    assert read_letor(file).query_ids[:2].tolist() == ["q0", "q1"]
    assert not list(kept_in(file).glob("narrow*"))


def test_a_changed_file_is_read_again_and_the_old_cache_goes(tmp_path, home, reads):
    file = put(tmp_path, EXAMPLE)
    read_letor(file)
    old = kept_in(file)
    put(tmp_path, EXAMPLE.replace(b"0.5", b"0.7"))
    os.utime(file, ns=(1, 1))
    assert read_letor(file).x[0, 0] == np.float32(0.7)
    assert len(reads) == 2
    assert not old.exists()
    assert kept_in(file).name.endswith("-1")


def spoil_content(folder):
    file = folder / "x.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


SPOILS = {
    "a bit": spoil_content,
    "cut": lambda f: (f / "x.npy").write_bytes((f / "x.npy").read_bytes()[:-4]),
    "empty": lambda f: (f / "grades.npy").write_bytes(b""),
    "gone": lambda f: (f / "queries.npy").unlink(),
    "no facts": lambda f: (f / "facts.json").unlink(),
    "odd facts": lambda f: (f / "facts.json").write_text("[1, 2"),
    "other facts": lambda f: (f / "facts.json").write_text(json.dumps({"x": 3})),
    "a pickle": lambda f: np.save(f / "query_ids.npy", np.array([{}], object), allow_pickle=True),
    "a file": lambda f: [*(p.unlink() for p in f.iterdir()), f.rmdir(), f.write_text("no folder")],
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_damaged_cache_is_made_again(tmp_path, home, reads, spoil):
    file = put(tmp_path, EXAMPLE)
    right = read_letor(file, cache=False)
    read_letor(file)
    spoil(kept_in(file))
    assert same(read_letor(file), right)
    assert same(read_letor(file), right)
    assert len(reads) == 3
    assert not home.exists()


def test_the_cache_goes_to_the_users_folder_if_nothing_can_be_written_beside(tmp_path, home, reads):
    file = put(tmp_path, EXAMPLE)
    file.with_name("some.txt.mutirao").write_text("in the way")  # works for root too, whom permissions do not stop
    assert same(read_letor(file), read_letor(file))
    assert len(reads) == 1
    assert len(list(home.glob("mutirao/letor/*/v*/x.npy"))) == 1


def test_without_any_place_for_a_cache_the_file_is_read_each_time(tmp_path, home, reads, caplog):
    file = put(tmp_path, EXAMPLE)
    file.with_name("some.txt.mutirao").write_text("in the way")
    home.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert len(read_letor(file)) == 4
    assert len(read_letor(file)) == 4
    assert "read without a cache" in caplog.text


def test_a_refused_file_leaves_nothing_behind(tmp_path, home):
    file = put(tmp_path, EXAMPLE + b"wrong\n")
    with pytest.raises(ConfigError, match="line 8"):
        read_letor(file)
    assert [f.name for f in tmp_path.iterdir()] == ["some.txt"]


def test_who_comes_second_takes_what_the_first_has_kept(tmp_path, home, monkeypatch):
    file = put(tmp_path, EXAMPLE)
    real, busy = letor.read_raw_letor, []

    def meanwhile(path):
        if not busy:
            busy.append(1)
            read_letor(path)  # another process is faster
        return real(path)

    monkeypatch.setattr(letor, "read_raw_letor", meanwhile)
    assert same(read_letor(file), read_letor(file, cache=False))
    assert [f.name for f in file.with_name("some.txt.mutirao").iterdir()] == [kept_in(file).name]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, home, monkeypatch):
    file = put(tmp_path, EXAMPLE)
    real = letor.read_raw_letor

    def meanwhile(path):
        found = real(path)
        os.utime(path, ns=(5, 5))
        return found

    monkeypatch.setattr(letor, "read_raw_letor", meanwhile)
    with pytest.raises(ConfigError, match="was changed while it was read"):
        read_letor(file)


def test_the_sum_in_the_cache_is_crc32(tmp_path, home):
    file = put(tmp_path, EXAMPLE)
    data = read_letor(file)
    facts = json.loads((kept_in(file) / "facts.json").read_text())
    assert facts["x"] == {"shape": [4, 3], "dtype": "<f4", "crc32": zlib.crc32(data.x.tobytes())}
