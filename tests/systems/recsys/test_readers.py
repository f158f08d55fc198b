"""Ratings as published, read fast or line by line with the same result; what is wrong is named by file and line."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from mutirao.errors import ConfigError
from mutirao.systems.recsys import readers
from mutirao.systems.recsys import readers as lines
from mutirao.systems.recsys.ratings import Ratings
from mutirao.systems.recsys.readers import check_ratings, read_catalogue, read_ratings

DAY = 86_400


def table(ratings: Ratings) -> list[tuple[str, str, float, int]]:
    """All ratings as rows of text and numbers, in their order."""
    owners = ratings.owners().tolist()
    return [
        (ratings.users[u], ratings.catalogue.ids[i], float(v), int(t))
        for u, i, v, t in zip(owners, ratings.items, ratings.values, ratings.times, strict=True)
    ]


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(text.encode("latin-1"))
    return folder


EXPECTED = [("1", "10", 3.0, 50), ("1", "7", 5.0, 100), ("2", "7", 4.0, 60)]


def test_movielens_1m(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        ratings__dat="1::7::5::100\n2::7::4::60\n1::10::3::50\n",
        movies__dat="7::Amélie (2001)::Drama\n10::X::Y\n",
    )
    ratings = read_ratings(folder)
    assert table(ratings) == EXPECTED
    assert ratings.catalogue.titles == ("Amélie (2001)", "X")
    assert ratings.catalogue.years.tolist() == [2001, 0]
    assert ratings.catalogue.counts.tolist() == [2, 1]


def test_movielens_100k(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        u__data="1\t7\t5\t100\n2\t7\t4\t60\n1\t10\t3\t50\n",
        u__item="7|A (1995)|01-Jan-1995||u|0|1\n10|B|||0\n",
    )
    assert table(read_ratings(folder)) == EXPECTED
    assert read_ratings(folder).catalogue.years.tolist() == [1995, 0]


def test_movielens_25m(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        ratings__csv="userId,movieId,rating,timestamp\n1,7,5.0,100\n2,7,3.5,60\n1,10,3.0,50\n",
        movies__csv='movieId,title,genres\n7,"Matrix, The (1999)",Action\n10,Heat (1995),Crime\n',
    )
    ratings = read_ratings(folder)
    assert [row[2] for row in table(ratings)] == [3.0, 5.0, 3.5]
    assert ratings.catalogue.titles == ("Matrix, The (1999)", "Heat (1995)")


@pytest.mark.parametrize("name", ["training_set/mv_0000007.txt", "mv_0000007.txt", "combined_data_1.txt"])
def test_netflix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(
        "7:\n1,5,2005-09-06\n2,4,1999-12-31\n" + ("10:\n1,3,2000-02-29\n" if "comb" in name else "")
    )
    (tmp_path / "movie_titles.txt").write_bytes("7,NULL,Pokémon, The Movie\n10,1999,B\n".encode("latin-1"))
    ratings = read_ratings(tmp_path)
    assert ("1", "7", 5.0, 13032 * DAY) in table(ratings)
    assert ("2", "7", 4.0, 10956 * DAY) in table(ratings)
    assert ratings.catalogue.titles[0] == "Pokémon, The Movie"
    if "comb" in name:
        assert ("1", "10", 3.0, 11016 * DAY) in table(ratings)


def test_a_file_without_header_is_read_by_the_order_given(tmp_path: Path) -> None:
    file = write(tmp_path, r__txt="7,1,5.0\n7,2,4.0\n10,1,3.0\n") / "r.txt"
    assert [row[:3] for row in table(read_ratings(file, "item,user,rating"))] == [
        ("1", "7", 5.0),
        ("1", "10", 3.0),
        ("2", "7", 4.0),
    ]


def test_a_file_with_other_names_is_read_by_the_names_given(tmp_path: Path) -> None:
    file = write(tmp_path, r__csv="book,stars,reader,when\n7,5,ana,1\n7,4,bia,2\n") / "r.csv"
    ratings = read_ratings(file, "user=reader,item=book,time=when")
    assert table(ratings) == [("ana", "7", 5.0, 1), ("bia", "7", 4.0, 2)]


def test_without_a_rating_column_everything_counts_one(tmp_path: Path) -> None:
    file = write(tmp_path, r__csv="user,item\nana,x\nbia,x\nana,y\n") / "r.csv"
    assert [row[2] for row in table(read_ratings(file))] == [1.0, 1.0, 1.0]


def test_parquet(tmp_path: Path) -> None:
    columns = {"reader": ["ana", "bia"], "item": [7, 7], "rating": [4.5, 3.0]}
    columns["time"] = np.array(["1970-01-02", "1970-01-01"], "datetime64[us]")
    parquet.write_table(pa.table(columns), tmp_path / "r.parquet")
    ratings = read_ratings(tmp_path / "r.parquet", "user=reader")
    assert table(ratings) == [("ana", "7", 4.5, DAY), ("bia", "7", 3.0, 0)]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"user": ["a", None], "item": [1, 2], "rating": [1.0, 2.0]}, "row 2: column 'user' holds no id"),
        ({"user": [1, 2], "item": [1.5, 2.5], "rating": [1.0, 2.0]}, "row 1: column 'item' holds no id"),
        ({"user": [1, 2], "item": [1, 2], "rating": [1.0, float("nan")]}, "row 2: rating is nan"),
        ({"user": [1, 2], "item": [1, 2], "rating": ["good", "bad"]}, "column 'rating' holds no numbers"),
        ({"user": [1, 2], "film": [1, 2]}, "which columns hold users and items"),
    ],
)
def test_a_bad_parquet_is_refused(tmp_path: Path, columns: dict, says: str) -> None:
    parquet.write_table(pa.table(columns), tmp_path / "r.parquet")
    with pytest.raises(ConfigError, match=says):
        read_ratings(tmp_path / "r.parquet")


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        read_ratings(tmp_path / "r.parquet")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1::7::five::100", "'five' is not a rating"),
        ("1::7::nan::100", "'nan' is not a rating"),
        ("1::7::1e400::100", "is not a rating"),
        ("1::7::::100", "'' is not a rating"),
        ("1::7::5", "3 cells instead of 4"),
        ("1::7::5::100::9", "5 cells instead of 4"),
        ("::7::5::100", "'' is not a valid user id"),
        ("1::\x01::5::100", "is not a valid item id"),
        ("1::7::5::yesterday", "'yesterday' is neither seconds nor a date"),
        ("1::7::5::2001-02-30", "neither seconds nor a date"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    folder = write(tmp_path, ratings__dat=f"1::7::5::100\n\n{line}\n2::7::4::60\n")
    with pytest.raises(ConfigError, match=r"ratings\.dat, line 3: .*expected 'USER::ITEM::RATING::TIME'") as caught:
        read_ratings(folder)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_line_is_counted_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK", 40)
    folder = write(tmp_path, ratings__dat="".join(f"{u}::7::5::100\n" for u in range(1, 30)) + "x::7::bad::1\n")
    with pytest.raises(ConfigError, match="line 30"):
        read_ratings(folder)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "holds no ratings; expected ratings.dat"),
        ({"ratings__dat": ""}, "holds no ratings"),
        ({"ratings__csv": "userId,movieId,rating,timestamp\n"}, "holds no ratings"),
        ({"ratings__csv": "a,b,c\n1,2,3\n"}, "does not say which columns hold users and items"),
        ({"mv_0000001__txt": "1,5,2005-09-06\n"}, "line 1: there is no heading ITEM:"),
        ({"mv_0000001__txt": "1:\n1,5,2005-13-06\n"}, "line 2: '2005-13-06' is neither"),
    ],
)
def test_what_holds_no_ratings_says_so(tmp_path: Path, files: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_ratings(write(tmp_path, **files))


@pytest.mark.parametrize("columns", ["user=nobody,item=film", "who=user", "user="])
def test_wrong_columns_are_refused(tmp_path: Path, columns: str) -> None:
    file = write(tmp_path, r__csv="user,film,rating\n1,2,3\n") / "r.csv"
    with pytest.raises(ConfigError, match="column"):
        read_ratings(file, columns)


def test_a_missing_folder_says_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_ratings(tmp_path / "nothing")


def test_real_sets_are_as_published(real_data: Path) -> None:
    ratings = read_ratings(real_data / "ml-1m")
    assert (len(ratings), len(ratings.users), len(ratings.catalogue)) == (1_000_209, 6_040, 3_706)
    assert ratings.counts().min() == 20
    small = read_ratings(real_data / "ml-100k")
    assert (len(small), len(small.users), len(small.catalogue)) == (100_000, 943, 1_682)
    by_hand = [line.split("\t") for line in (real_data / "ml-100k" / "u.data").read_text().splitlines()]
    assert sorted(table(small)) == sorted((u, i, float(r), int(t)) for u, i, r, t in by_hand)
    assert any("100,000 ratings of 1,682 items by 943 users" in line for line in check_ratings(real_data / "ml-100k"))


def test_check_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="name the folder"):
        check_ratings(None)


def test_numpy_and_slow_path_agree_on_a_real_file(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast: Callable[[], Ratings] = lambda: read_ratings(real_data / "ml-100k")  # noqa: E731
    quick = fast()
    monkeypatch.setattr(lines, "fast_block", lambda text, layout: None)
    slow = fast()
    assert table(quick) == table(slow)


LATIN = "user,item,rating\n" + "".join(f"{name}{k},{k},4\n" for k in range(15) for name in ("é", "è"))


@pytest.mark.parametrize("columns", ["", "user,item,rating"])
def test_users_whose_names_are_not_utf_8_are_refused_with_their_line_not_merged(tmp_path: Path, columns: str) -> None:
    file, text = tmp_path / "own.csv", LATIN.partition("\n")[2] if columns else LATIN
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"own.csv, line {1 if columns else 2}: byte 0xe9 is not UTF-8 text"):
        read_ratings(file, columns)
    file.write_bytes(text.encode())
    assert len(read_ratings(file, columns).users) == 30
    file.write_bytes("\ufeff".encode() + text.encode())
    assert len(read_ratings(file, columns).users) == 30


def test_a_header_that_is_not_utf_8_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_bytes("user,item,rating,année\nana,1,4,9\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"own\.csv, line 1: byte 0xe9 is not UTF-8"):
        read_ratings(tmp_path / "own.csv")


@pytest.mark.parametrize("name", ["own.csv", "ratings.dat", "u.data"])
def test_a_bare_carriage_return_or_a_zero_byte_in_a_line_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    separator = {"own.csv": ",", "ratings.dat": "::", "u.data": "\t"}[name]
    lines = [["1", "2", "3", "4"], ["5", "6", "3", "4\r5"]]
    head = "user,item,rating,time\n" if name == "own.csv" else ""
    file = tmp_path / name
    for odd in ("\r", "\0"):
        text = head + "".join(separator.join(cells) + "\n" for cells in lines).replace("\r", odd)
        file.write_bytes(text.encode())
        with pytest.raises(ConfigError, match=f"{name}, line {3 if head else 2}: a (carriage return|zero byte)"):
            read_ratings(file)


def test_a_catalogue_of_ones_own_in_latin_1_is_refused_and_a_publishers_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_bytes("id,title\n1,Léon\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"own\.csv, line 2: byte 0xe9"):
        read_catalogue(tmp_path / "own.csv")
    (tmp_path / "movies.dat").write_bytes("1::Léon (1994)::Drama\n".encode("latin-1"))
    assert read_catalogue(tmp_path / "movies.dat").titles == ("Léon (1994)",)
    (tmp_path / "own.csv").write_bytes(b"id,title\n1,Le\ron\n")
    with pytest.raises(ConfigError, match=r"own\.csv, line 3: 1 cells"):
        read_catalogue(tmp_path / "own.csv")
