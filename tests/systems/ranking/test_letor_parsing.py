"""Many lines at once give what the definition of a line gives, bit for bit, whatever the text is."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from letor_files import READERS, either

from mutirao.systems.ranking.letor_parsing import InvalidLine, parse_line


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
    return READERS[reader](text).values


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
    for word, value in zip(words, got, strict=True):
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
def test_any_number_is_rounded_right_by_both_readers(words):
    right = np.array([exact_float32(w) for w in words], np.float64).astype(np.float32)
    for reader in READERS:
        if np.isfinite(right).all():
            assert np.array_equal(values_of(words, reader), right)
        else:
            with pytest.raises(InvalidLine, match=r"below 3\.4e38"):
                values_of(words, reader)


def test_float32_values_written_by_others_come_back(tmp_path):
    draw = np.random.default_rng(0)
    values = draw.integers(0, 2**32, 4000, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    for form in ("{:.9g}", "{:.17g}", "{:.12e}", "{!r}"):
        words = [form.format(float(v)) for v in values]
        for reader in READERS:
            assert np.array_equal(values_of(words, reader), values), (form, reader)


def by_definition(text: bytes):
    """What a block must give, line by line."""
    rows = []
    for number, line in enumerate(text.split(b"\n")):
        if line.partition(b"#")[0].strip(b" \t\r"):
            try:
                rows.append(parse_line(line))
            except ValueError as error:
                return number, str(error)
    return rows


def assert_readers_agree_with_the_definition(text: bytes):
    right = by_definition(text)
    for name, reader in READERS.items():
        if isinstance(right, tuple):
            with pytest.raises(InvalidLine) as wrong:
                reader(text)
            assert wrong.value.args == right, name
            continue
        got = reader(text)
        assert got.grades.tolist() == [r.grade for r in right]
        assert got.queries == [r.query for r in right]
        assert got.counts.tolist() == [len(r.indices) for r in right]
        assert got.indices.tolist() == [i for r in right for i in r.indices]
        assert got.values.tobytes() == np.array([v for r in right for v in r.values], np.float32).tobytes(), name
        assert [text.split(b"\n")[k].strip(b" \t\r")[:1] != b"" for k in got.lines] == [True] * len(right)


@given(st.binary(max_size=300))
def test_random_bytes_are_read_or_refused(text):
    assert_readers_agree_with_the_definition(text)


letters = st.text(" \t\r\n0123456789:.+-eE#qidnax\x00\x0b\x85é", max_size=120)


@given(letters)
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
def test_mutated_lines_are_read_or_refused(rows, changes, ended):
    text = bytearray(b"\n".join(rows) + (b"\n" if ended else b""))
    for where, what, byte in changes:
        at = min(int(where * len(text)), len(text) - 1)
        if at < 0:
            break
        text[at : at + (what != "put")] = b"" if what == "drop" else bytes([byte])
    assert_readers_agree_with_the_definition(bytes(text))
