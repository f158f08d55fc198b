"""Item vectors come back as they were saved, and are carried over to the items they are for."""

from pathlib import Path

import numpy as np
import pytest

from mutirao.errors import ConfigError, Damaged
from mutirao.io import save_arrays
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.embeddings import Embeddings, load_embeddings, save_embeddings, transfer
from mutirao.systems.recsys.readers import read_catalogue


def catalogue(*ids: str, counts: tuple[int, ...] = ()) -> Catalogue:
    titles = tuple(f"Film {i} (1999)" for i in ids)
    return Catalogue(ids, titles, np.full(len(ids), 1999, np.int32), np.array(counts or [0] * len(ids), np.int64))


SOURCE = Embeddings(catalogue("x", "y", "z", counts=(5, 9, 7)), np.eye(3, dtype=np.float32) * 10, {"how": "test"})
PAIRS = [("a", "x"), ("b", "y"), ("c", "z")]


def test_saved_is_loaded(tmp_path: Path) -> None:
    save_embeddings(SOURCE, tmp_path / "e.safetensors")
    found = load_embeddings(tmp_path / "e.safetensors")
    assert found.catalogue.ids == SOURCE.catalogue.ids
    assert found.catalogue.titles == SOURCE.catalogue.titles
    np.testing.assert_array_equal(found.catalogue.years, SOURCE.catalogue.years)
    np.testing.assert_array_equal(found.catalogue.counts, SOURCE.catalogue.counts)
    np.testing.assert_array_equal(found.vectors, SOURCE.vectors)
    assert found.card == {"how": "test"}
    assert read_catalogue(tmp_path / "e.safetensors").ids == ("x", "y", "z")


def test_what_is_no_file_of_vectors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_embeddings(tmp_path / "nothing.safetensors")
    (tmp_path / "odd.safetensors").write_bytes(b"odd")
    with pytest.raises(Damaged, match="corrupt"):
        load_embeddings(tmp_path / "odd.safetensors")
    save_arrays(tmp_path / "model.safetensors", {"w": np.zeros(3)}, {})
    with pytest.raises(Damaged, match="holds no item embeddings"):
        load_embeddings(tmp_path / "model.safetensors")
    save_embeddings(Embeddings(SOURCE.catalogue, np.full((3, 2), np.nan, np.float32)), tmp_path / "nan.safetensors")
    with pytest.raises(Damaged, match="NaN"):
        load_embeddings(tmp_path / "nan.safetensors")
    arrays = {"vectors": np.zeros((2, 2), np.float32), "years": np.zeros(3), "counts": np.zeros(3)}
    save_arrays(tmp_path / "short.safetensors", arrays, {"kind": "embeddings", "ids": ["a"] * 3, "titles": [""] * 3})
    with pytest.raises(Damaged, match="does not fit together"):
        load_embeddings(tmp_path / "short.safetensors")


def test_matched_items_take_their_vector_and_others_a_small_random_one() -> None:
    target = catalogue("a", "b", "c", *(f"n{i}" for i in range(500)))
    items = transfer(target, SOURCE, PAIRS, dimension=3, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(items[:3], SOURCE.vectors)
    assert items[3:].std() == pytest.approx(0.1, rel=0.1)
    assert items.dtype == np.float32


@pytest.mark.parametrize(("share", "carried"), [(0.0, []), (1 / 3, ["b"]), (2 / 3, ["b", "c"]), (1.0, ["a", "b", "c"])])
def test_a_share_is_the_most_popular(share: float, carried: list[str]) -> None:
    target = catalogue("a", "b", "c")
    items = transfer(target, SOURCE, PAIRS, dimension=3, rng=np.random.default_rng(0), share=share)
    assert [i for i, row in zip(target.ids, items, strict=True) if row.max() == 10] == carried


def test_popularity_is_the_targets_if_the_source_counted_none() -> None:
    source = Embeddings(catalogue("x", "y", "z"), SOURCE.vectors)
    target = catalogue("a", "b", "c", counts=(1, 2, 3))
    items = transfer(target, source, PAIRS, dimension=3, rng=np.random.default_rng(0), share=1 / 3)
    assert items.max(1).tolist().index(10) == 2


def test_a_random_share_is_drawn() -> None:
    target, first = catalogue("a", "b", "c"), set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        items = transfer(target, SOURCE, PAIRS, dimension=3, rng=rng, share=1 / 3, by="random")
        first.add(int(items.max(1).argmax()))
    assert first == {0, 1, 2}


def test_an_unmatched_item_has_the_mean_bias_if_there_are_biases() -> None:
    source = Embeddings(SOURCE.catalogue, SOURCE.vectors, {"source": {"biases": True}})
    items = transfer(catalogue("a", "n"), source, PAIRS[:1], dimension=3, rng=np.random.default_rng(0))
    assert items[1, 0] == items[0, 0] == 10


@pytest.mark.parametrize(
    ("pairs", "dimension", "share", "says"),
    [
        (PAIRS, 4, 1.0, "dimension 3, the model 4"),
        (PAIRS, 3, 1.5, "share is 1.5"),
        ([("nobody", "x")], 3, 1.0, "item 'nobody', which the target"),
        ([("a", "nobody")], 3, 1.0, "item 'nobody', which the source"),
    ],
)
def test_what_does_not_fit_is_refused(pairs: list, dimension: int, share: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        transfer(
            catalogue("a", "b", "c"), SOURCE, pairs, dimension=dimension, rng=np.random.default_rng(0), share=share
        )


def test_an_item_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="item 'a' twice"):
        catalogue("a", "b", "a")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("movies.dat", "", "is an empty catalogue"),
        ("movies.dat", "1::A\n1::B\n", "line 2: item '1' is in line 1 already"),
        ("movies.dat", "A film\n", "line 1: expected ID::TITLE"),
        ("u.item", "1\n", "line 1: expected ID|TITLE"),
        ("movie_titles.txt", "1,1999\n", "line 1: expected ID,YEAR,TITLE"),
        ("movie_titles.txt", "1,soon,A\n", "line 1: expected ID,YEAR,TITLE"),
        ("movies.csv", "name,year\nA,1999\n", "line 1: the columns are name, year; expected id,title,year"),
        ("movies.csv", "id,title,year\n1,A,later\n", "line 2: 'later' is not a year"),
        ("movies.csv", "id,title,year\n1,A\n", "line 2: 2 cells"),
        ("movies.csv", "id,title,year\n", "is an empty catalogue"),
        ("movies.dat", "1::A\0B\n", "is not a text file"),
    ],
)
def test_a_bad_catalogue_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_catalogue(tmp_path)
    assert says in str(caught.value)


def test_a_folder_without_catalogue_says_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no catalogue; expected movies\.dat"):
        read_catalogue(tmp_path)


def test_a_catalogue_beside_ratings_is_counted(tmp_path: Path) -> None:
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,A (1999),x\n2,B (2000-2004),x\n3,C,x\n")
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,5,1\n2,1,4,1\n1,3,4,1\n")
    found = read_catalogue(tmp_path)
    assert found.ids == ("1", "2", "3")
    assert found.counts.tolist() == [2, 0, 1]
    assert found.years.tolist() == [1999, 2000, 0]
    assert read_catalogue(tmp_path / "movies.csv").counts.tolist() == [0, 0, 0]


def test_real_catalogues(real_data: Path) -> None:
    assert [len(read_catalogue(real_data / name)) for name in ("ml-1m", "ml-100k", "netflix")] == [3883, 1682, 17770]
    assert (read_catalogue(real_data / "ml-1m").counts > 0).sum() == 3706
