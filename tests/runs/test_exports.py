"""Tables of runs, read back by the real readers."""

import csv
from pathlib import Path

import pyarrow.parquet
import pytest

from mutirao.errors import ConfigError
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.reader import export_tables


def make(folder: Path, rows: list[dict[str, object]], name: str = "history.csv") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    CsvTable(folder / name).append(rows)


def test_a_history_becomes_typed_columns(tmp_path: Path) -> None:
    make(tmp_path, [{"round": 1, "loss": 2}, {"round": 2, "loss": 0.5, "accuracy": 0.25}])
    assert export_tables(tmp_path, tmp_path / "h.parquet") == 2
    table = pyarrow.parquet.read_table(tmp_path / "h.parquet")
    assert table.to_pydict() == {"round": [1, 2], "loss": [2.0, 0.5], "accuracy": [None, 0.25]}
    assert [str(f.type) for f in table.schema] == ["int64", "double", "double"]


def test_many_runs_become_one_table_and_names_stay_text(tmp_path: Path) -> None:
    make(tmp_path / "a", [{"round": 1, "client": "007"}], "clients.csv")
    make(tmp_path / "deep" / "b", [{"round": 1, "client": "8", "risk": 0.5}], "clients.csv")
    assert export_tables(tmp_path, tmp_path / "c.parquet", "clients") == 2
    table = pyarrow.parquet.read_table(tmp_path / "c.parquet").to_pydict()
    assert table == {"run": ["a", "deep/b"], "round": [1, 1], "client": ["007", "8"], "risk": [None, 0.5]}
    export_tables(tmp_path, tmp_path / "c.csv", "clients")
    with (tmp_path / "c.csv").open() as file:
        assert list(csv.reader(file))[1] == ["a", "1", "007", ""]


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.parquet or \.csv"):
        export_tables(tmp_path, tmp_path / "h.xlsx")
    with pytest.raises(ConfigError, match="holds no run"):
        export_tables(tmp_path, tmp_path / "h.csv")
