"""Tables that only grow: a part at a time, whatever is done to them."""

from pathlib import Path

import pytest

from mutirao.errors import Damaged
from mutirao.runs import csv_tables
from mutirao.runs.csv_tables import CsvTable, read_csv_parts


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time."""
    monkeypatch.setattr(csv_tables, "PART", 2)


def test_a_new_column_comes_to_all_rows_that_are_there(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv")
    for i in range(5):
        table.append([{"round": i, "who": f"a, {i}"}])
    table.append([{"round": 5, "loss": 0.5}])
    assert (tmp_path / "t.csv").read_text().splitlines()[:2] == ["round,who,loss", '0,"a, 0",']
    assert [row.get("who", "") for row in table.each()] == [*(f"a, {i}" for i in range(5)), ""]
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]
    assert [len(rows) for _, rows in read_csv_parts(table.path)] == [2, 2, 2]


def test_rows_behind_those_that_count_are_dropped(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv")
    table.append([{"round": i} for i in range(5)])
    with table.path.open("a") as file:
        file.write("5\n6")
    again = CsvTable(table.path)
    assert again.count() == 6
    assert again.first(3) == [{"round": str(i)} for i in range(3)]
    with pytest.raises(Damaged, match="has 6 complete rows, expected 7"):
        again.check(7)
    again.go_on_after(5)
    assert again.columns == ["round"]
    assert table.path.read_text() == "round\n0\n1\n2\n3\n4\n"
    again.append([{"round": 5}])
    assert again.count() == 6  # it has changed, so it is counted again


def test_no_file_and_a_header_alone_have_no_rows(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv")
    assert (table.read(), table.count()) == ([], 0)
    table.path.write_text("a,b\n")
    assert (table.read(), table.count()) == ([], 0)
    table.go_on_after(0)
    assert table.columns == ["a", "b"]
