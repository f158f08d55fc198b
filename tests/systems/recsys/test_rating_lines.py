"""Lines of ratings: the fast reader gives what the definition gives, or leaves them to it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.systems.recsys.readers import MOVIELENS_1M, NETFLIX, fast_block, read_block, read_line

IDS = st.one_of(st.integers(0, 10**12).map(str), st.sampled_from(["007", "ana", "tt01", "1.5", "-3"]))
STARS = st.one_of(st.integers(0, 9).map(str), st.sampled_from(["3.5", "0.5", "4.25", "-1", ".5", "10"]))
TIMES = st.one_of(st.integers(0, 2 * 10**9).map(str), st.sampled_from(["0", "978300760.5"]))


@given(st.lists(st.tuples(IDS, IDS, STARS, TIMES), min_size=1), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_the_fast_reader_never_disagrees_with_the_definition(rows: list, end: str, ended: bool) -> None:
    text = end.join("::".join(row) for row in rows) + (end if ended else "")
    found = read_block(text.encode(), MOVIELENS_1M, Path("x"), 1)
    lines = [read_line("::".join(row), MOVIELENS_1M) for row in rows]
    assert [str(u) for u in found.users.tolist()] == [str(line[0]) for line in lines]
    assert [str(i) for i in found.items.tolist()] == [str(line[1]) for line in lines]
    assert found.values.tolist() == [line[2] for line in lines]
    assert found.times.tolist() == [line[3] for line in lines]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 5), st.dates()), min_size=1))
def test_plain_digits_and_dates_are_read_fast(rows: list) -> None:
    text = "".join(f"{u},{r},{day.isoformat()}\n" for u, r, day in rows).encode()
    found = fast_block(text, NETFLIX)
    assert found is not None
    lines = [read_line(line, NETFLIX) for line in text.decode().splitlines()]
    assert found.times.tolist() == [line[3] for line in lines]
    assert found.users.tolist() == [line[0] for line in lines]


@pytest.mark.parametrize(
    "line", ["1,5,2005-09-31", "1,5,2005-00-01", "1,5,2005_09_01", "1,5,2005-09-0x", "1, 5,2005-09-01"]
)
def test_the_fast_reader_leaves_odd_lines_alone(line: str) -> None:
    assert fast_block(f"{line}\n".encode(), NETFLIX) is None
