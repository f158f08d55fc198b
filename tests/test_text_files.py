"""One reader of text from elsewhere: nothing is replaced, so no two names become one."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.errors import ConfigError
from mutirao.io import decode_text, read_csv, read_rows, read_text, write_rows

HERE = Path("table.csv")
cells = st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=2, max_size=4))


@given(cells)
def test_what_we_write_reads_back_as_one_row_a_line_whatever_the_cells_hold(rows: list[list[str]]) -> None:
    text = write_rows(rows)
    assert "\r" not in text
    assert text.count("\n") == len(rows)
    read = [found for _, found in read_rows(text, HERE)]
    assert read == [[" ".join(cell.split()) for cell in row] for row in rows]


@given(st.binary(max_size=60))
def test_bytes_are_read_as_they_are_or_refused_with_their_line(content: bytes) -> None:
    try:
        expected = content.decode("utf-8")
        assert "\0" not in expected
    except (UnicodeDecodeError, AssertionError) as error:
        at = error.start if isinstance(error, UnicodeDecodeError) else content.index(b"\0")
        lines = {content[: k + 1].count(b"\n") + 5 for k in (at, content.find(b"\0") if b"\0" in content else at)}
        with pytest.raises(ConfigError) as caught:
            decode_text(content, HERE, first=5)
        assert any(f"table.csv, line {line}: " in str(caught.value) for line in lines)
        assert "\n" not in str(caught.value)
    else:
        assert decode_text(content, HERE) == expected


def test_latin_1_is_read_where_the_publisher_ships_it_and_a_mark_of_utf_8_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "movies.dat"
    file.write_bytes("1::Misérables, Les (1995)::Drama\n".encode("latin-1"))
    assert read_text(file, latin1=True).startswith("1::Misérables")
    with pytest.raises(ConfigError, match="line 1: byte 0xe9 is not UTF-8 text; right would be a file saved as UTF-8"):
        read_text(file)
    file.write_bytes("\ufeffclient,from\nana,1\n".encode())
    assert read_csv(file) == [{"client": "ana", "from": "1"}]
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_text(tmp_path / "nowhere")


def test_a_bare_carriage_return_ends_a_line_and_never_in_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "old_mac.csv").write_bytes(b"client,from\rana,1\rbia,2\r")
    assert [row["client"] for row in read_csv(tmp_path / "old_mac.csv")] == ["ana", "bia"]
    with pytest.raises(csv.Error):  # what the library does with such text by itself
        list(csv.reader(io.StringIO("a\rb,c\n")))
    with pytest.raises(ConfigError, match=r"table\.csv, line 1: field larger than field limit"):
        list(read_rows("a" * 200_000, HERE))
