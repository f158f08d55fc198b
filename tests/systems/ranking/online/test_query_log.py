"""A log in AOL4FOLTR's form: user, time and clicks of each query; what is wrong with one is said in a line."""

import csv
from pathlib import Path

import pytest

from clicking import write_log
from mutirao.datasets import check_data_set
from mutirao.errors import ConfigError
from mutirao.systems.ranking.online.query_log import read_log


def test_a_log_is_read_as_it_is_written(tmp_path: Path) -> None:
    log = read_log(write_log(tmp_path / "aol"))
    assert (len(log.users), log.data.features, int(log.data.grades.sum())) == (40, 5, 40)
    assert log.most_active(2) == ["300", "301"]
    assert log.queries_of("301").tolist() == list(range(1, 40, 4))
    assert log.times[1] - log.times[0] == 3600
    earlier, later = log.split()
    assert (len(earlier.users), len(later.users)) == (32, 8)
    assert earlier.times.max() < later.times.min()
    assert later.data.query_ids[0] == 1000 + 7 * 32
    assert len(later.data) == 8 * 6
    (line,) = check_data_set("aol4foltr", tmp_path / "aol")
    assert "40 queries of 4 users" in line
    assert "40 clicks" in line


def test_users_who_are_in_the_table_alone_are_left_out(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "aol")
    kept = [line for line in (folder / "letor.txt").read_text().splitlines() if "qid:1000 " not in line]
    (folder / "letor.txt").write_text("\n".join(kept) + "\n")
    assert len(read_log(folder).users) == 39


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("user_id,", "user,", "has no column 'user_id'"),
        ("2006-03-01 05:00:00", "yesterday", "line 7: 'yesterday' is not a time such as 2006-03-01 07:17:12"),
        ("1007,301,", "1007,,", "line 3: it has no qid, user_id, timestamp"),
        ("1007,301,", "1000,301,", "line 3: query 1000 stands there twice"),
        ("1007,301,", "9999,301,", "names no user for query 1007 of letor.txt"),
        ('"a ""query""', '"a ""query"" "x', "cannot read"),
    ],
)
def test_a_wrong_table_is_refused_by_name(tmp_path: Path, old: str, new: str, text: str) -> None:
    folder = write_log(tmp_path / "aol")
    table = folder / "metadata.csv"
    table.write_text(table.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=text):
        read_log(folder)


def test_grades_that_are_no_clicks_and_a_folder_that_is_no_log_are_refused(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "aol")
    letor = folder / "letor.txt"
    letor.write_text(letor.read_text().replace("1 qid", "2 qid", 1))
    with pytest.raises(ConfigError, match="expected grade 1 for documents clicked"):
        read_log(folder)
    with pytest.raises(ConfigError, match=r"does not contain a log; expected a folder with metadata\.csv"):
        read_log(tmp_path)


def test_what_other_tables_may_hold_is_as_before(tmp_path: Path) -> None:
    usual = csv.field_size_limit()
    write_log(tmp_path)
    read_log(tmp_path)
    assert csv.field_size_limit() == usual
