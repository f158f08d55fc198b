import doctest
import gzip
import json
import logging
import os
import re
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.errors import ConfigError
from mutirao.ranking import letor, parsing
from mutirao.ranking.letor import RankingData, folds, load, write
from mutirao.ranking.parsing import read_block, read_line, scan_numba, scan_numpy

needs_numba = pytest.param("numba", marks=pytest.mark.skipif(not parsing.has_numba(), reason="numba is not installed"))
READERS = {"numpy": scan_numpy} | ({"numba": scan_numba} if parsing.has_numba() else {})
either = pytest.mark.parametrize("reader", ["numpy", needs_numba])

EXAMPLE = b"""2 qid:10 1:0.5 2:-3 3:1e2 # doc one
0 qid:10 1:.25 3:7.
# a comment alone

1\tqid:7  2:+4E-1 1:0#close

  3 qid:10 3:1   \r
"""


def put(folder, content, name="some.txt"):
    file = folder / name
    file.write_bytes(content)
    return file


def same(one: RankingData, two: RankingData) -> bool:
    """Bit by bit: signs of zeros count."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in ((getattr(one, f), getattr(two, f)) for f in ("x", "grades", "queries", "query_ids"))
    )


@pytest.mark.parametrize("module", [letor, parsing])
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


@either
def test_every_form_of_a_line_is_read(tmp_path, reader):
    data = load(put(tmp_path, EXAMPLE), cache=False, reader=reader)
    assert data.x.tolist() == [[0.5, -3, 100], [0.25, 0, 7], [0, np.float32(0.4), 0], [0, 0, 1]]
    assert data.grades.tolist() == [2, 0, 1, 3]
    assert data.queries.tolist() == [0, 0, 1, 0]  # the query comes back, and is the same one
    assert data.query_ids.tolist() == [10, 7]
    assert (data.x.dtype, data.grades.dtype, data.queries.dtype, data.query_ids.dtype) == ("f4", "i8", "i8", "i8")
    assert (len(data), data.features) == (4, 3)


@either
def test_gzip_windows_line_ends_a_byte_order_mark_and_no_last_line_break_change_nothing(tmp_path, reader):
    plain = load(put(tmp_path, EXAMPLE), cache=False, reader=reader)
    forms = {
        "windows.txt": EXAMPLE.replace(b"\n", b"\r\n"),
        "marked.txt": b"\xef\xbb\xbf" + EXAMPLE,
        "open.txt": EXAMPLE.rstrip(),
        "packed.txt.gz": gzip.compress(EXAMPLE),
        "unnamed.txt": gzip.compress(EXAMPLE[:50]) + gzip.compress(EXAMPLE[50:]),
    }
    for name, content in forms.items():
        assert same(load(put(tmp_path, content, name), cache=False, reader=reader), plain), name


@either
def test_queries_may_have_any_names(tmp_path, reader):
    names = ["GX-12:a", "são", "01", "1", "1.0", "qid:1"]
    content = "".join(f"0 qid:{n} 1:1\n" for n in names).encode()
    data = load(put(tmp_path, content), cache=False, reader=reader)
    assert data.query_ids.tolist() == names
    assert data.queries.tolist() == list(range(6))


WRONG = [
    (b"-1 qid:1 1:1", "grade '-1' is negative; right would be a whole number from 0 to 255"),
    (b"1.5 qid:1 1:1", "grade '1.5' cannot be used"),
    (b"256 qid:1 1:1", "grade '256' cannot be used"),
    (b"x qid:1 1:1", "starts with 'x', which is not a grade"),
    (b"nan qid:1 1:1", "starts with 'nan', which is not a grade"),
    (b"1 1:1 2:1", "no 'qid:' stands after the grade"),
    (b"1", "no 'qid:' stands after the grade"),
    (b"1 qid: 1:1", "'qid:' has no name after it"),
    (b"1 qid:\xff 1:1", "is not printable text in UTF-8"),
    (b"1 qid:a\x00 1:1", "is not printable text in UTF-8"),
    (b"1 qid:" + b"7" * 257 + b" 1:1", "has 257 bytes; right would be at most 256"),
    (b"1 qid:1 0:1", "feature '0' is not a whole number from 1 to 10,000"),
    (b"1 qid:1 -2:1", "feature '-2' is not a whole number"),
    (b"1 qid:1 10001:1", "feature '10001' is not a whole number"),
    (b"1 qid:1 99999999999999999999:1", "feature '99999999999999999999' is not a whole number"),
    (b"1 qid:1 2.5:1", "feature '2.5' is not a whole number"),
    (b"1 qid:1 :1", "feature '' is not a whole number"),
    (b"1 qid:1 1:1 3:1 1:2", "feature 1 stands in the line twice"),
    (b"1 qid:1 1:1 1:1", "feature 1 stands in the line twice"),
    (b"1 qid:1 1:nan", "feature 1 is 'nan'; right would be a finite number"),
    (b"1 qid:1 1:NaN", "feature 1 is 'NaN'; right would be a finite number"),
    (b"1 qid:1 4:-inf", "feature 4 is '-inf'; right would be a finite number"),
    (b"1 qid:1 1:1e39", "right would be a number below 3.4e38"),
    (b"1 qid:1 1:1e999", "right would be a number below 3.4e38"),
    (b"1 qid:1 1:", "feature 1 has '' for a value"),
    (b"1 qid:1 1:-", "feature 1 has '-' for a value"),
    (b"1 qid:1 1:.", "feature 1 has '.' for a value"),
    (b"1 qid:1 1:1e", "feature 1 has '1e' for a value"),
    (b"1 qid:1 1:1_0", "feature 1 has '1_0' for a value"),
    (b"1 qid:1 1:0x10", "feature 1 has '0x10' for a value"),
    (b"1 qid:1 1:1.2.3", "feature 1 has '1.2.3' for a value"),
    (b"1 qid:1 1:2:3", "feature 1 has '2:3' for a value"),
    (b"1 qid:1 17", "'17' is not of the form INDEX:VALUE"),
    (b"1 qid:1 1:1\x0b2:1", "feature 1 has "),
]


@either
@pytest.mark.parametrize(("line", "what"), WRONG, ids=[repr(line)[:40] for line, _ in WRONG])
def test_a_wrong_line_is_refused_with_file_and_line(tmp_path, reader, line, what):
    file = put(tmp_path, b"0 qid:1 1:1\n\n# fine\n" + line + b"\n0 qid:1 1:1\n")
    with pytest.raises(ConfigError, match=f"{re.escape(str(file))}, line 4: .*{re.escape(what)}") as caught:
        load(file, cache=False, reader=reader)
    assert "\n" not in str(caught.value)


@either
def test_a_file_cut_short_is_refused_with_its_last_line(tmp_path, reader):
    whole = b"".join(b"1 qid:3 1:0.5 2:0.25 3:12\n" for _ in range(20))
    for cut in range(2, 25):  # the line end may be missing, and the last digit: that cannot be seen
        file = put(tmp_path, whole[:-cut])
        if cut == 2:
            assert len(load(file, cache=False, reader=reader)) == 20
        elif cut == 25:
            continue
        else:
            with pytest.raises(ConfigError, match="line 20: "):
                load(file, cache=False, reader=reader)
    assert len(load(put(tmp_path, whole[:-1]), cache=False, reader=reader)) == 20


def test_a_cut_or_damaged_gzip_file_is_refused(tmp_path):
    packed = gzip.compress(EXAMPLE * 50)
    with pytest.raises(ConfigError, match=r"some\.txt\.gz is truncated"):
        load(put(tmp_path, packed[:-12], "some.txt.gz"), cache=False)
    broken = bytearray(packed)
    broken[len(packed) // 2] ^= 255
    with pytest.raises(ConfigError, match=r"some\.txt\.gz"):
        load(put(tmp_path, bytes(broken), "some.txt.gz"), cache=False)


def test_what_holds_no_documents_is_refused(tmp_path):
    for content in (b"", b"\n\n", b"# only this\n", b"\xef\xbb\xbf"):
        with pytest.raises(ConfigError, match="holds no documents"):
            load(put(tmp_path, content), cache=False)
    with pytest.raises(ConfigError, match="has no features in any of its 2 lines"):
        load(put(tmp_path, b"1 qid:1\n0 qid:1\n"), cache=False)
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read .*nothing: No such file"):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="reader: 'fast' is not one of"):
        load(put(tmp_path, EXAMPLE), reader="fast")


@either
def test_a_sparse_file_is_refused_before_it_fills_the_memory(tmp_path, reader):
    file = put(tmp_path, b"0 qid:1 1:1\n" * 20_000 + b"0 qid:1 9999:1\n")
    with pytest.raises(ConfigError, match=r"line 20001: feature 9,999 makes a table of 20,001 documents.* GiB"):
        load(file, cache=False, reader=reader)


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(letor, "MOST_LINE", 1 << 20)
    monkeypatch.setattr(letor, "BLOCK", 1 << 16)
    file = put(tmp_path, b"0 qid:1 1:1\n" + b"1" * (2 << 20))
    with pytest.raises(ConfigError, match="line 2: it is longer than 1 MiB"):
        load(file, cache=False)


@either
@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_and_threads_do_not_matter(tmp_path, monkeypatch, reader, block, threads):
    whole = load(put(tmp_path, EXAMPLE * 3), cache=False, reader=reader)
    monkeypatch.setattr(letor, "BLOCK", block)
    assert same(load(put(tmp_path, EXAMPLE * 3), cache=False, reader=reader, threads=threads), whole)
    wrong = put(tmp_path, EXAMPLE * 3 + b"0 qid:1 1:1 1:1\n" + EXAMPLE)
    with pytest.raises(ConfigError, match="line 22: feature 1 stands"):
        load(wrong, cache=False, reader=reader, threads=threads)


def test_auto_takes_numpy_where_numba_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(letor, "SMALL", 0)
    monkeypatch.setattr(letor, "has_numba", lambda: False)
    monkeypatch.setattr(letor, "scan_numba", None)
    assert len(load(put(tmp_path, EXAMPLE), cache=False)) == 4
    with pytest.raises(ConfigError, match="numba is not installed"):
        load(put(tmp_path, EXAMPLE), reader="numba")


# ---- numbers


def exact_float32(word: str) -> float:
    """The nearest float32 by rational arithmetic, ties to even."""
    value = Fraction(word)
    size = abs(value)
    if not size:
        return 0.0
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power -= size < Fraction(2) ** power
    unit = Fraction(2) ** (max(power, -126) - 23)
    rounded = round(size / unit) * unit
    if rounded >= Fraction(2) ** 128:
        return float("inf")
    return float(rounded) * (1 if value > 0 else -1)


def values_of(words, reader):
    text = b"0 qid:1 " + b" ".join(f"{i}:{w}".encode() for i, w in enumerate(words, 1)) + b"\n"
    return read_block(text, READERS[reader], len(words))


def midpoint_words():
    """Decimal numbers at, just above and just below the middle of two neighbouring float32."""
    draw = np.random.default_rng(5)
    for bits in draw.integers(0x00000001, 0x7F000000, 60, np.uint32):
        low = float(bits.view(np.float32))
        high = float((bits + np.uint32(1)).view(np.float32))
        middle = (Fraction(low) + Fraction(high)) / 2
        if not 1e-30 < middle < 1e30:
            continue
        places = 60
        digits = int(middle * 10**places)
        for nudge in (-1, 0, 1):
            whole, part = divmod(digits + nudge, 10**places)
            yield f"{whole}.{part:0{places}d}"
    yield from ("16777217", "16777219", "8388608.5", "8388609.5", "33554434", "33554431", "0.10000000149011612")
    yield from (
        "16777217.00000000000000000000000000000001",
        "16777216.9999999999999999999999",
        "1.00000017881393432617187499",
    )


@either
def test_numbers_are_rounded_once_to_the_nearest_float32(reader):
    words = [
        *midpoint_words(),
        *("0", "-0", "0.0", "-0.000", "1", "-1", "0.1", "1e-45", "7e-46", "8e-46", "1.1754943e-38", "1.17549435e-38"),
        *("3.4028234e38", "3.4028235677973365e+38", "340282346638528859811704183484516925440", "1E+2", "5.e-1", "+.5"),
        *(
            "123456789012345678901234567890",
            "0.000000000000000000000000000001234",
            "9007199254740993",
            "1e-400",
            "0e999",
        ),
        "0." + "0" * 300 + "1e300",
        "1" + "0" * 200 + "e-200",
    ]
    got = values_of(words, reader)
    assert got.problem is None
    for word, value in zip(words, got.x[0], strict=True):
        assert float(value) == exact_float32(word), word
        assert np.signbit(value) == word.startswith("-"), word


digits = st.text("0123456789", min_size=0, max_size=22)
numbers = st.builds(
    lambda sign, a, dot, b, e: f"{sign}{a or '0'}{'.' if dot else ''}{b if dot else ''}{e}",
    st.sampled_from(["", "-", "+"]),
    digits,
    st.booleans(),
    digits,
    st.one_of(st.just(""), st.builds("{}{}".format, st.sampled_from(["e", "E-", "e+", "e-0"]), st.integers(0, 60))),
)


@given(st.lists(numbers, min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_number_is_rounded_right_by_both_readers(words):
    right = np.array([exact_float32(w) for w in words], np.float64).astype(np.float32)
    for reader in READERS:
        got = values_of(words, reader)
        if np.isfinite(right).all():
            assert got.problem is None
            assert np.array_equal(got.x[0], right)
        else:
            assert "below 3.4e38" in got.problem[1]


def test_float32_values_written_by_others_come_back(tmp_path):
    draw = np.random.default_rng(0)
    values = draw.integers(0, 2**32, 4000, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    for form in ("{:.9g}", "{:.17g}", "{:.12e}", "{!r}"):
        words = [form.format(float(v)) for v in values]
        for reader in READERS:
            assert np.array_equal(values_of(words, reader).x[0], values), (form, reader)


# ---- anything at all


def by_definition(text: bytes):
    """What a block must give, line by line."""
    rows = []
    for number, line in enumerate(text.split(b"\n")):
        if line.partition(b"#")[0].strip(b" \t\r"):
            try:
                rows.append(read_line(line))
            except ValueError as error:
                return number, str(error)
    return rows


def assert_readers_agree_with_the_definition(text: bytes):
    right = by_definition(text)
    for name, reader in READERS.items():
        got = read_block(text, reader)
        if isinstance(right, tuple):
            assert got.problem == right, name
            continue
        assert got.problem is None
        assert got.grades.tolist() == [r.grade for r in right]
        assert [q for q, n in zip(got.queries, got.runs, strict=True) for _ in range(n)] == [r.query for r in right]
        assert got.widest == max((max(r.indices, default=0) for r in right), default=0)
        assert got.counts.tolist() == [len(r.indices) for r in right]
        x = np.zeros((len(right), got.x.shape[1]), np.float32)
        for k, r in enumerate(right):
            x[k, np.array(r.indices, int) - 1] = r.values
        assert x.tobytes() == got.x.tobytes(), name


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_read_or_refused(text):
    assert_readers_agree_with_the_definition(text)


letters = st.text(" \t\r\n0123456789:.+-eE#qidnax\x00\x0b\x85é", max_size=120)


@given(letters)
@settings(max_examples=300, deadline=None)
def test_text_of_the_right_letters_is_read_or_refused(text):
    assert_readers_agree_with_the_definition(text.encode())


lines = st.builds(
    lambda grade, query, features, tail: (
        f"{grade} qid:{query} {' '.join(f'{i}:{v}' for i, v in features)}{tail}".encode()
    ),
    st.integers(0, 4),
    st.one_of(st.integers(0, 3), st.sampled_from(["a", "ä", "x:y"])),
    st.lists(st.tuples(st.integers(1, 12), numbers), max_size=6, unique_by=lambda f: f[0]),
    st.sampled_from(["", " ", "\r", " # note", "#docid = G:1"]),
)
edits = st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["drop", "put", "swap"]), st.integers(0, 255)), max_size=4)


@given(st.lists(lines, min_size=1, max_size=8), edits, st.booleans())
@settings(max_examples=300, deadline=None)
def test_mutated_lines_are_read_or_refused(rows, changes, ended):
    text = bytearray(b"\n".join(rows) + (b"\n" if ended else b""))
    for where, what, byte in changes:
        at = min(int(where * len(text)), len(text) - 1)
        if at < 0:
            break
        text[at : at + (what != "put")] = b"" if what == "drop" else bytes([byte])
    assert_readers_agree_with_the_definition(bytes(text))


@given(st.binary(max_size=200), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_a_file_of_anything_gives_data_or_a_config_error(tmp_path_factory, content, block):
    file = put(tmp_path_factory.getbasetemp(), content, "anything.txt")
    kept, letor.BLOCK = letor.BLOCK, block
    try:
        outcomes = []
        for reader in READERS:
            try:
                data = load(file, cache=False, reader=reader, threads=1)
                outcomes.append((data.x.tobytes(), data.query_ids.tolist()))
            except ConfigError as error:
                outcomes.append(str(error))
    finally:
        letor.BLOCK = kept
    assert all(o == outcomes[0] for o in outcomes)


# ---- the cache


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def reads(monkeypatch):
    """How often a file was really read."""
    seen = []
    real = letor._read

    def counted(file, *rest):
        seen.append(file)
        return real(file, *rest)

    monkeypatch.setattr(letor, "_read", counted)
    return seen


def kept_in(file):
    (folder,) = [f for f in file.with_name(f"{file.name}.mutirao").iterdir() if not f.name.startswith(".")]
    return folder


def test_a_file_is_read_once_and_mapped_after_that(tmp_path, home, reads):
    file = put(tmp_path, EXAMPLE)
    first, second = load(file), load(file)
    assert reads == [file]
    assert same(first, second)
    assert same(first, load(file, cache=False))
    assert not home.exists()
    base = second.x
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(base).__name__ == "mmap"
    second.x[0, 0] = 9  # copy-on-write: what is kept stays as it is
    assert load(file).x[0, 0] == 0.5
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
    assert same(load(file), load(file, cache=False))
    assert load(file).x.shape == (40, 14)
    assert load(file).query_ids[:2].tolist() == ["q0", "q1"]
    assert not list(kept_in(file).glob("narrow*"))


def test_a_changed_file_is_read_again_and_the_old_cache_goes(tmp_path, home, reads):
    file = put(tmp_path, EXAMPLE)
    load(file)
    old = kept_in(file)
    put(tmp_path, EXAMPLE.replace(b"0.5", b"0.7"))
    os.utime(file, ns=(1, 1))
    assert load(file).x[0, 0] == np.float32(0.7)
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
    right = load(file, cache=False)
    load(file)
    spoil(kept_in(file))
    assert same(load(file), right)
    assert same(load(file), right)
    assert len(reads) == 3
    assert not home.exists()


def test_the_cache_goes_to_the_users_folder_if_nothing_can_be_written_beside(tmp_path, home, reads):
    file = put(tmp_path, EXAMPLE)
    file.with_name("some.txt.mutirao").write_text("in the way")  # works for root too, whom permissions do not stop
    assert same(load(file), load(file))
    assert len(reads) == 1
    assert len(list(home.glob("mutirao/letor/*/v*/x.npy"))) == 1


def test_without_any_place_for_a_cache_the_file_is_read_each_time(tmp_path, home, reads, caplog):
    file = put(tmp_path, EXAMPLE)
    file.with_name("some.txt.mutirao").write_text("in the way")
    home.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert len(load(file)) == 4
    assert len(load(file)) == 4
    assert "read without a cache" in caplog.text


def test_a_refused_file_leaves_nothing_behind(tmp_path, home):
    file = put(tmp_path, EXAMPLE + b"wrong\n")
    with pytest.raises(ConfigError, match="line 8"):
        load(file)
    assert [f.name for f in tmp_path.iterdir()] == ["some.txt"]


def test_who_comes_second_takes_what_the_first_has_kept(tmp_path, home, monkeypatch):
    file = put(tmp_path, EXAMPLE)
    real, busy = letor._read, []

    def meanwhile(path, *rest):
        if not busy:
            busy.append(1)
            load(path)  # another process is faster
        return real(path, *rest)

    monkeypatch.setattr(letor, "_read", meanwhile)
    assert same(load(file), load(file, cache=False))
    assert [f.name for f in file.with_name("some.txt.mutirao").iterdir()] == [kept_in(file).name]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, home, monkeypatch):
    file = put(tmp_path, EXAMPLE)
    real = letor._read

    def meanwhile(path, *rest):
        found = real(path, *rest)
        os.utime(path, ns=(5, 5))
        return found

    monkeypatch.setattr(letor, "_read", meanwhile)
    with pytest.raises(ConfigError, match="was changed while it was read"):
        load(file)


# ---- folds, and files written


def make_folds(folder, numbers=(1, 2), ending=".txt"):
    for n in numbers:
        for k, part in enumerate(("train", "vali", "test")):
            content = b"".join(b"%d qid:%d %d:%d\n" % (k, 10 * n + k, j, n) for j in range(1, 4 + (part == "test")))
            (folder / f"Fold{n}").mkdir(parents=True, exist_ok=True)
            content = gzip.compress(content) if ending.endswith("gz") else content
            put(folder / f"Fold{n}", content, part + ending)
    return folder


@pytest.mark.parametrize("ending", [".txt", ".txt.gz"])
def test_folds_are_found_by_number_or_by_their_own_folder(tmp_path, ending):
    make_folds(tmp_path, ending=ending)
    train, vali, test = folds(tmp_path, 2, cache=False)
    assert [d.grades[0] for d in (train, vali, test)] == [0, 1, 2]
    assert [d.query_ids[0] for d in (train, vali, test)] == [20, 21, 22]
    assert {d.features for d in (train, vali, test)} == {4}  # as wide as the widest
    assert folds(tmp_path, cache=False)[0].query_ids[0] == 10
    for fold in (2, None):
        assert folds(tmp_path / "Fold2", fold, cache=False)[0].query_ids[0] == 20


def test_a_missing_fold_or_file_is_named(tmp_path):
    make_folds(tmp_path)
    with pytest.raises(ConfigError, match="has no Fold3; there are Fold1, Fold2"):
        folds(tmp_path, 3)
    with pytest.raises(ConfigError, match="Fold2 is fold 2, but fold=1 is asked for"):
        folds(tmp_path / "Fold2", 1)
    (tmp_path / "Fold1" / "vali.txt").unlink()
    with pytest.raises(ConfigError, match=r"Fold1/vali\.txt is missing"):
        folds(tmp_path, 1)
    with pytest.raises(ConfigError, match="is a file; right would be a folder with Fold1"):
        folds(tmp_path / "Fold1" / "test.txt", 1)
    with pytest.raises(ConfigError, match="there is no folder"):
        folds(tmp_path / "Fold9", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="does not hold ranking data"):
        folds(tmp_path / "empty", 1)
    (tmp_path / "Fold2").rename(tmp_path / "mine")
    assert folds(tmp_path / "mine", 1, cache=False)[0].query_ids[0] == 20
    with pytest.raises(ConfigError, match="mine is a single fold, but fold=2"):
        folds(tmp_path / "mine", 2)


def test_check_says_what_is_there_and_keeps_nothing(tmp_path):
    from mutirao.data import check

    make_folds(tmp_path)
    found = check("letor", tmp_path)
    assert len(found) == 6
    assert found[2].endswith("Fold1/test.txt: 4 documents of 1 queries, 4 features, grades 2: 100.0%")
    assert check("mslr", tmp_path / "Fold1" / "test.txt") == [found[2]]
    assert "136 features" in check("mslr")[0]
    assert not list(tmp_path.rglob("*.mutirao"))
    with pytest.raises(ConfigError, match="need a path"):
        check("mq2008")


@pytest.mark.parametrize("name", ["made.txt", "made.txt.gz"])
def test_what_is_written_reads_back_the_same(tmp_path, name):
    draw = np.random.default_rng(0)
    x = (draw.standard_normal((60, 9)) * 10.0 ** draw.integers(-30, 30, (60, 9))).astype(np.float32)
    x[3] = 0
    x[4, :3] = [0.1, -0.0, 2.5]
    data = RankingData(
        x, draw.integers(0, 5, 60), np.repeat(np.arange(6), 10), np.array(["a", "b", "3", "ç", "e", "f"])
    )
    write(tmp_path / name, data)
    assert same(load(tmp_path / name, cache=False), data)
    assert [f.name for f in tmp_path.iterdir()] == [name]
    content = (tmp_path / name).read_bytes()
    text = gzip.decompress(content) if name.endswith("gz") else content
    assert b" qid:a 1:0.1 2:-0 3:2.5 " in text


def test_writing_where_nothing_can_be_written_is_refused(tmp_path):
    data = RankingData(np.zeros((1, 1), np.float32), np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([1]))
    with pytest.raises(ConfigError, match="cannot write"):
        write(tmp_path / "no" / "folder.txt", data)


def test_a_part_of_the_data_keeps_only_its_queries(tmp_path):
    data = load(put(tmp_path, EXAMPLE), cache=False)
    part = data.take([3, 2])
    assert (part.queries.tolist(), part.query_ids.tolist(), part.grades.tolist()) == ([0, 1], [10, 7], [3, 1])


# ---- the real thing


def plainly(file: Path):
    """The slow and simple way: split, and let Python read numbers."""
    rows, grades, names = [], [], []
    for line in file.read_text().splitlines():
        words = line.partition("#")[0].split()
        grades.append(int(words[0]))
        names.append(words[1][4:])
        rows.append([float(w.partition(":")[2]) for w in words[2:]])
    return np.array(rows).astype(np.float32), np.array(grades), names


@pytest.mark.parametrize(
    ("folder", "features", "documents", "queries"), [("MQ2008", 46, 15_211, 784), ("MSLR-sample", 136, 19_704, 181)]
)
def test_published_folds_are_read_as_they_are(real_data, folder, features, documents, queries):
    if not (real_data / folder).is_dir():
        pytest.skip(f"no {folder} among the real data")
    sets = folds(real_data / folder, 1, cache=False)
    assert {d.features for d in sets} == {features}
    assert sum(map(len, sets)) == documents
    assert sum(len(d.query_ids) for d in sets) == queries
    x, grades, names = plainly(real_data / folder / "Fold1" / "vali.txt")
    assert x.tobytes() == sets[1].x.tobytes()
    assert np.array_equal(grades, sets[1].grades)
    assert sets[1].query_ids[sets[1].queries].tolist() == [int(n) for n in names]
    for reader in READERS:
        assert same(load(real_data / folder / "Fold1" / "vali.txt", cache=False, reader=reader), sets[1])


def test_the_sum_in_the_cache_is_crc32(tmp_path, home):
    file = put(tmp_path, EXAMPLE)
    data = load(file)
    facts = json.loads((kept_in(file) / "facts.json").read_text())
    assert facts["x"] == {"shape": [4, 3], "dtype": "<f4", "crc32": zlib.crc32(data.x.tobytes())}
