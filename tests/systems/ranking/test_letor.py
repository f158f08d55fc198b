"""Ranking files are read as published, or refused with file and line."""

import doctest
import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from letor_files import EXAMPLE, READERS, either, put, same

from mutirao.errors import ConfigError
from mutirao.systems.ranking import letor, letor_parsing
from mutirao.systems.ranking.letor import read_letor, write_letor
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import read_splits


@pytest.fixture
def _by(reader, monkeypatch):
    """Files are read by that reader."""
    monkeypatch.setattr(letor, "parse_block", READERS[reader])


@pytest.mark.parametrize("module", [letor, letor_parsing])
def test_the_examples_in_the_docstrings_hold(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they write files
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


@either
@pytest.mark.usefixtures("_by")
def test_every_form_of_a_line_is_read(tmp_path, reader):
    data = read_letor(put(tmp_path, EXAMPLE), cache=False)
    assert data.x.tolist() == [[0.5, -3, 100], [0.25, 0, 7], [0, np.float32(0.4), 0], [0, 0, 1]]
    assert data.grades.tolist() == [2, 0, 1, 3]
    assert data.queries.tolist() == [0, 0, 1, 0]  # the query comes back, and is the same one
    assert data.query_ids.tolist() == [10, 7]
    assert (data.x.dtype, data.grades.dtype, data.queries.dtype, data.query_ids.dtype) == ("f4", "i8", "i8", "i8")
    assert (len(data), data.features) == (4, 3)


@either
@pytest.mark.usefixtures("_by")
def test_gzip_windows_line_ends_a_byte_order_mark_and_no_last_line_break_change_nothing(tmp_path, reader):
    plain = read_letor(put(tmp_path, EXAMPLE), cache=False)
    forms = {
        "windows.txt": EXAMPLE.replace(b"\n", b"\r\n"),
        "marked.txt": b"\xef\xbb\xbf" + EXAMPLE,
        "open.txt": EXAMPLE.rstrip(),
        "packed.txt.gz": gzip.compress(EXAMPLE),
        "unnamed.txt": gzip.compress(EXAMPLE[:50]) + gzip.compress(EXAMPLE[50:]),
    }
    for name, content in forms.items():
        assert same(read_letor(put(tmp_path, content, name), cache=False), plain), name


@either
@pytest.mark.usefixtures("_by")
def test_queries_may_have_any_names(tmp_path, reader):
    names = ["GX-12:a", "são", "01", "1", "1.0", "qid:1"]
    content = "".join(f"0 qid:{n} 1:1\n" for n in names).encode()
    data = read_letor(put(tmp_path, content), cache=False)
    assert data.query_ids.tolist() == names
    assert data.queries.tolist() == list(range(6))


WRONG = [
    (b"-2 qid:1 1:1", "grade '-2' is negative; expected a whole number from 0 to 255, or -1"),
    (b"-1.5 qid:1 1:1", "grade '-1.5' is negative"),
    (b"1.5 qid:1 1:1", "grade '1.5' cannot be used"),
    (b"1000001 qid:1 1:1", "grade '1000001' cannot be used"),
    (b"x qid:1 1:1", "starts with 'x', which is not a grade"),
    (b"nan qid:1 1:1", "starts with 'nan', which is not a grade"),
    (b"1 1:1 2:1", "no 'qid:' stands after the grade"),
    (b"1", "no 'qid:' stands after the grade"),
    (b"1 qid: 1:1", "'qid:' has no name after it"),
    (b"1 qid:\xff 1:1", "is not printable text in UTF-8"),
    (b"1 qid:a\x00 1:1", "is not printable text in UTF-8"),
    (b"1 qid:" + b"7" * 257 + b" 1:1", "has 257 bytes; expected at most 256"),
    (b"1 qid:1 0:1", "feature '0' is not a whole number from 1 to 10,000"),
    (b"1 qid:1 -2:1", "feature '-2' is not a whole number"),
    (b"1 qid:1 10001:1", "feature '10001' is not a whole number"),
    (b"1 qid:1 99999999999999999999:1", "feature '99999999999999999999' is not a whole number"),
    (b"1 qid:1 2.5:1", "feature '2.5' is not a whole number"),
    (b"1 qid:1 :1", "feature '' is not a whole number"),
    (b"1 qid:1 1:1 3:1 1:2", "feature 1 stands in the line twice"),
    (b"1 qid:1 1:1 1:1", "feature 1 stands in the line twice"),
    (b"1 qid:1 1:nan", "feature 1 is 'nan'; expected a finite number"),
    (b"1 qid:1 1:NaN", "feature 1 is 'NaN'; expected a finite number"),
    (b"1 qid:1 4:-inf", "feature 4 is '-inf'; expected a finite number"),
    (b"1 qid:1 1:1e39", "expected a number below 3.4e38"),
    (b"1 qid:1 1:1e999", "expected a number below 3.4e38"),
    (b"1 qid:1 1:", "feature 1 has '' for a value"),
    (b"1 qid:1 1:-", "feature 1 has '-' for a value"),
    (b"1 qid:1 1:.", "feature 1 has '.' for a value"),
    (b"1 qid:1 1:1e", "feature 1 has '1e' for a value"),
    (b"1 qid:1 1:null", "feature 1 has 'null' for a value"),
    (b"1 qid:1 1:NULL2", "feature 1 has 'NULL2' for a value"),
    (b"-1 qid:1 1:7e307", "expected a number below 3.4e38"),
    (b"1 qid:1 1:7e307 2:NULL", "expected a number below 3.4e38"),
    (b"1 qid:1 1:1_0", "feature 1 has '1_0' for a value"),
    (b"1 qid:1 1:0x10", "feature 1 has '0x10' for a value"),
    (b"1 qid:1 1:1.2.3", "feature 1 has '1.2.3' for a value"),
    (b"1 qid:1 1:2:3", "feature 1 has '2:3' for a value"),
    (b"1 qid:1 17", "'17' is not of the form INDEX:VALUE"),
    (b"1 qid:1 1:1\x0b2:1", "feature 1 has "),
]


@either
@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize(("line", "what"), WRONG, ids=[repr(line)[:40] for line, _ in WRONG])
def test_a_wrong_line_is_refused_with_file_and_line(tmp_path, reader, line, what):
    file = put(tmp_path, b"0 qid:1 1:1\n\n# fine\n" + line + b"\n0 qid:1 1:1\n")
    with pytest.raises(ConfigError, match=f"{re.escape(str(file))}, line 4: .*{re.escape(what)}") as caught:
        read_letor(file, cache=False)
    assert "\n" not in str(caught.value)


@either
@pytest.mark.usefixtures("_by")
def test_a_file_cut_short_is_refused_with_its_last_line(tmp_path, reader):
    whole = b"".join(b"1 qid:3 1:0.5 2:0.25 3:12\n" for _ in range(20))
    for cut in range(2, 25):  # the line end may be missing, and the last digit: that cannot be seen
        file = put(tmp_path, whole[:-cut])
        if cut == 2:
            assert len(read_letor(file, cache=False)) == 20
        elif cut == 25:
            continue
        else:
            with pytest.raises(ConfigError, match="line 20: "):
                read_letor(file, cache=False)
    assert len(read_letor(put(tmp_path, whole[:-1]), cache=False)) == 20


def test_a_cut_or_damaged_gzip_file_is_refused(tmp_path):
    packed = gzip.compress(EXAMPLE * 50)
    with pytest.raises(ConfigError, match=r"some\.txt\.gz is truncated"):
        read_letor(put(tmp_path, packed[:-12], "some.txt.gz"), cache=False)
    broken = bytearray(packed)
    broken[len(packed) // 2] ^= 255
    with pytest.raises(ConfigError, match=r"some\.txt\.gz"):
        read_letor(put(tmp_path, bytes(broken), "some.txt.gz"), cache=False)


def test_what_holds_no_documents_is_refused(tmp_path):
    for content in (b"", b"\n\n", b"# only this\n", b"\xef\xbb\xbf"):
        with pytest.raises(ConfigError, match="contains no documents"):
            read_letor(put(tmp_path, content), cache=False)
    with pytest.raises(ConfigError, match="has no features in any of its 2 lines"):
        read_letor(put(tmp_path, b"1 qid:1\n0 qid:1\n"), cache=False)
    with pytest.raises(ConfigError, match="is a folder"):
        read_letor(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read .*nothing: No such file"):
        read_letor(tmp_path / "nothing")


@either
@pytest.mark.usefixtures("_by")
def test_a_sparse_file_is_refused_before_it_fills_the_memory(tmp_path, reader):
    file = put(tmp_path, b"0 qid:1 1:1\n" * 20_000 + b"0 qid:1 9999:1\n")
    with pytest.raises(ConfigError, match=r"line 20001: feature 9,999 makes a table of 20,001 documents.* GiB"):
        read_letor(file, cache=False)


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(letor, "MOST_LINE", 1 << 20)
    monkeypatch.setattr(letor, "BLOCK", 1 << 16)
    file = put(tmp_path, b"0 qid:1 1:1\n" + b"1" * (2 << 20))
    with pytest.raises(ConfigError, match="line 2: it is longer than 1 MiB"):
        read_letor(file, cache=False)


@either
@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_blocks_do_not_matter(tmp_path, monkeypatch, reader, block):
    whole = read_letor(put(tmp_path, EXAMPLE * 3), cache=False)
    monkeypatch.setattr(letor, "BLOCK", block)
    assert same(read_letor(put(tmp_path, EXAMPLE * 3), cache=False), whole)
    wrong = put(tmp_path, EXAMPLE * 3 + b"0 qid:1 1:1 1:1\n" + EXAMPLE)
    with pytest.raises(ConfigError, match="line 22: feature 1 stands"):
        read_letor(wrong, cache=False)


def test_plain_lines_are_read_at_once_and_all_others_by_line(monkeypatch):
    monkeypatch.setattr(letor_parsing, "parse_line", None)
    rows = [b"2 qid:1 1:0.5 3:-2 \r\n", b"0 qid:1 2:1e-05 1:3# note\n", b"1 qid:b 1:16777217\n", b"0 qid:b\n"]
    assert len(letor_parsing.parse_block(b"".join(rows)).grades) == 4
    assert letor_parsing.parse_plain_lines(EXAMPLE) is None


@given(st.binary(max_size=200), st.integers(1, 64))
def test_a_file_of_anything_gives_data_or_a_config_error(tmp_path_factory, content, block):
    file = put(tmp_path_factory.getbasetemp(), content, "anything.txt")
    outcomes = []
    for reader in READERS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(letor, "BLOCK", block)
            patch.setattr(letor, "parse_block", reader)
            try:
                data = read_letor(file, cache=False)
                outcomes.append((data.x.tobytes(), data.query_ids.tolist()))
            except ConfigError as error:
                outcomes.append(str(error))
    assert all(o == outcomes[0] for o in outcomes)


@pytest.mark.parametrize("name", ["made.txt", "made.txt.gz"])
def test_what_is_written_reads_back_the_same(tmp_path, name):
    draw = np.random.default_rng(0)
    x = (draw.standard_normal((60, 9)) * 10.0 ** draw.integers(-30, 30, (60, 9))).astype(np.float32)
    x[3] = 0
    x[4, :3] = [0.1, -0.0, 2.5]
    data = RankingData(
        x, draw.integers(0, 5, 60), np.repeat(np.arange(6), 10), np.array(["a", "b", "3", "ç", "e", "f"])
    )
    write_letor(tmp_path / name, data)
    assert same(read_letor(tmp_path / name, cache=False), data)
    assert [f.name for f in tmp_path.iterdir()] == [name]
    content = (tmp_path / name).read_bytes()
    text = gzip.decompress(content) if name.endswith("gz") else content
    assert b" qid:a 1:0.1 2:-0 3:2.5 " in text


def test_writing_where_nothing_can_be_written_is_refused(tmp_path):
    data = RankingData(np.zeros((1, 1), np.float32), np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([1]))
    with pytest.raises(ConfigError, match="cannot write"):
        write_letor(tmp_path / "no" / "folder.txt", data)


def test_a_part_of_the_data_keeps_only_its_queries(tmp_path):
    data = read_letor(put(tmp_path, EXAMPLE), cache=False)
    part = data.take([3, 2])
    assert (part.queries.tolist(), part.query_ids.tolist(), part.grades.tolist()) == ([0, 1], [10, 7], [3, 1])


def plainly(file: Path):
    """The slow and simple way: split, and let Python read numbers."""
    rows, grades, names = [], [], []
    for line in file.read_text().splitlines():
        words = line.partition("#")[0].split()
        grades.append(int(words[0]))
        names.append(words[1][4:])
        rows.append([float(w.partition(":")[2]) for w in words[2:]])
    return np.array(rows).astype(np.float32), np.array(grades), names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "features", "documents", "queries"), [("MQ2008", 46, 15_211, 784), ("MSLR-sample", 136, 19_704, 181)]
)
def test_published_folds_are_read_as_they_are(real_data, monkeypatch, folder, features, documents, queries):
    if not (real_data / folder).is_dir():
        pytest.skip(f"no {folder} among the real data")
    sets = read_splits(real_data / folder, 1, cache=False)
    assert {d.features for d in sets} == {features}
    assert sum(map(len, sets)) == documents
    assert sum(len(d.query_ids) for d in sets) == queries
    x, grades, names = plainly(real_data / folder / "Fold1" / "vali.txt")
    assert x.tobytes() == sets[1].x.tobytes()
    assert np.array_equal(grades, sets[1].grades)
    assert sets[1].query_ids[sets[1].queries].tolist() == [int(n) for n in names]
    for reader in READERS.values():
        monkeypatch.setattr(letor, "parse_block", reader)
        assert same(read_letor(real_data / folder / "Fold1" / "vali.txt", cache=False), sets[1])
