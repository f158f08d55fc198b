"""Tables as people have them are read as they are, and what is wrong with one is said in a line."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from mutirao.datasets import check_data_set
from mutirao.errors import ConfigError
from mutirao.systems.tabular.readers import read_kinds, read_table_file
from mutirao.systems.tabular.table import IDENTIFIER, as_column

ROWS = [("ana", 1.5, "José"), ("bia", 2.25, "Jos?"), ("céu", -3.0, "João; o velho")]


def write(path: Path, delimiter: str = ",", encoding: str = "utf-8", comma: bool = False, end: str = "\n") -> Path:
    def cell(value: Any) -> str:
        text = str(value).replace(".", ",") if comma and isinstance(value, float) else str(value)
        return f'"{text}"' if any(d in text for d in ",;\t|") and not (comma and isinstance(value, float)) else text

    lines = [delimiter.join(map(cell, row)) for row in [("who", "dose", "name"), *ROWS]]
    path.write_bytes(end.join([*lines, ""]).encode(encoding))
    return path


@pytest.mark.parametrize("delimiter", list(",;\t|"))
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
@pytest.mark.parametrize("packed", [False, True])
def test_any_delimiter_and_encoding(tmp_path: Path, delimiter: str, encoding: str, packed: bool) -> None:
    path = write(tmp_path / "t.csv", delimiter, encoding, end="\r\n")
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    table = read_table_file(path)
    assert list(table.columns) == ["who", "dose", "name"]
    assert table.columns["dose"].values.tolist() == [1.5, 2.25, -3.0]
    assert table.columns["name"].values.tolist() == ["José", "Jos?", "João; o velho"]  # two names stay two


def test_a_decimal_comma_is_one_where_the_delimiter_is_a_semicolon(tmp_path: Path) -> None:
    table = read_table_file(write(tmp_path / "t.csv", ";", comma=True))
    assert table.columns["dose"].kind == "number"
    assert table.columns["dose"].values.tolist() == [1.5, 2.25, -3.0]


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)), min_size=1, max_size=30))
def test_numbers_come_back_to_the_bit_and_gaps_stay_gaps(values: list[float | None]) -> None:
    gaps = ["", "NA", "nan", "NULL", "?", " "]
    cells = [gaps[i % len(gaps)] if v is None else repr(v) for i, v in enumerate(values)]
    column = as_column("x", cells)
    if all(v is None for v in values):
        assert column.kind == "empty"
    else:
        assert column.kind == "number"
        right = np.array([np.nan if v is None else v for v in values])
        assert np.array_equal(column.numbers, right, equal_nan=True)
    assert column.missing.tolist() == [v is None for v in values]


@given(st.lists(st.datetimes(), min_size=1, max_size=10))
def test_dates_are_days_since_1970_as_numpy_counts_them(moments: list[Any]) -> None:
    column = as_column("when", [m.isoformat(timespec="microseconds") for m in moments])
    days = np.array(moments, "datetime64[us]").astype(np.float64) / 86400e6
    assert column.kind == "date"
    assert column.numbers == pytest.approx(days, abs=1e-6)


def test_kinds_are_seen_or_forced() -> None:
    assert as_column("x", ["TRUE", "false", ""]).values.tolist() == ["true", "false", ""]
    assert as_column("x", ["2024-02-29", "NA"]).kind == "date"
    assert as_column("x", ["2024-02-30"]).kind == "category"  # there is no such day
    assert as_column("x", ["1_000"]).kind == "category"  # a number for Python alone
    assert as_column("x", ["1", "2"], "category").values.tolist() == ["1", "2"]
    assert read_kinds(" ward=category , a=b=number") == {"ward": "category", "a=b": "number"}


def test_parquet_has_the_kinds_of_its_types(tmp_path: Path) -> None:
    columns = {
        "n": pa.array([1.5, None, 2.0]),
        "i": pa.array([1, 2, 3]),
        "s": pa.array(["a", None, "b"]),
        "b": pa.array([True, False, True]),
        "d": pa.array([86_400_000, None, 172_800_000], pa.timestamp("ms")),
        "c": pa.array(["x", "y", "x"]).dictionary_encode(),
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    table = read_table_file(tmp_path / "t.parquet", {"i": "category"})
    assert {n: c.kind for n, c in table.columns.items()} == {
        "n": "number",
        "i": "category",
        "s": "category",
        "b": "category",
        "d": "date",
        "c": "category",
    }
    assert table.columns["n"].values.tolist()[::2] == [1.5, 2.0]
    assert table.columns["i"].values.tolist() == ["1", "2", "3"]
    assert table.columns["b"].values.tolist() == ["true", "false", "true"]
    assert table.columns["d"].values.tolist()[::2] == [1.0, 2.0]
    assert [table.columns[k].missing.tolist()[1] for k in "nsd"] == [True] * 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty; expected a header and rows"),
        (b"a,b\n1,2\n3\n", "line 3: 1 cells, but the header has 2 columns"),
        (b"a,b,a\n1,2,3\n", "more than one column called 'a'"),
        (b"a,b\n1,\x81\n", "line 2: byte 0x81 is neither UTF-8 nor Windows-1252"),
        (b"a,b\n1,\0\n", "line 2: a zero byte; it is not a text file"),
        (b"\xff\xfea\xd8", "begins as utf-16 text, but byte"),
        (b"\x1f\x8b123", "is not a complete gzip file"),
        (b"PAR1nothing", "is not a Parquet file that can be read"),
        (b"a,b\n1,inf\n", "column 'b' contains an infinite number"),
        (b"a" * 300 + b",b\n1,2\n", "is no valid name of a column"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=says) as refused:
        read_table_file(tmp_path / "t.csv")
    assert "\n" not in str(refused.value)


def test_wrong_settings_of_columns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv")
    for kinds, says in (("dose=float", "is not NAME=KIND"), ("dose", "is not NAME=KIND")):
        with pytest.raises(ConfigError, match=says):
            read_kinds(kinds)
    with pytest.raises(ConfigError, match="'ana' is no number, but the setting columns= requires"):
        read_table_file(path, {"who": "number"})
    with pytest.raises(ConfigError, match="has no column 'dos'; did you mean 'dose'"):
        read_table_file(path, {"dos": "number"})
    with pytest.raises(ConfigError, match=r"cannot read .*nobody\.csv"):
        read_table_file(tmp_path / "nobody.csv")
    with pytest.raises(ConfigError, match="is a folder"):
        read_table_file(tmp_path)


def test_a_check_says_what_was_found_column_by_column(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("patient_id,age,ward,seen\n1,30,A,2020-01-01\n2,,B,2021-05-06\n3,50,A,\n")
    assert check_data_set("tabular", path) == [
        f"{path}: 3 rows, 4 columns",
        "patient_id: number, 1 to 3 (an identifier by its name, so no feature)",
        "age: number, 30 to 50, 1 missing",
        "ward: category, 2 values: 'A' 2, 'B' 1",
        "seen: date, 2020-01-01 to 2021-05-06, 1 missing",
    ]
    with pytest.raises(ConfigError, match="give the path of a table"):
        check_data_set("tabular")


def test_identifiers_are_known_by_their_names() -> None:
    ids = ["id", "ID", "patient_id", "patientId", "patient id", "uuid", "Unnamed: 0", "", "index"]
    assert all(IDENTIFIER.fullmatch(name) for name in ids)
    assert not any(IDENTIFIER.fullmatch(name) for name in ("age", "paid", "grid", "hybrid", "identity", "acid"))
