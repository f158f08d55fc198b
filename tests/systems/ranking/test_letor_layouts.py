"""Sets are found in folders as their publishers ship them, or the one thing that is wrong is named."""

import gzip
import re

import pytest

from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor_layouts import all_folds, locate_parts
from mutirao.systems.ranking.ranking_sources import read_splits

PARTS = ("train", "vali", "test")


def put(file, query, packed=False, documents=3):
    """A file of one query, which distinguishes files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = b"".join(b"%d qid:%d %d:1\n" % (k % 3, query, k) for k in range(1, documents + 1))
    file.write_bytes(gzip.compress(content) if packed else content)


def make_folds(folder, fold="Fold{}", parts=("train.txt", "vali.txt", "test.txt"), numbers=(1, 2, 3, 4, 5), **more):
    for n in numbers:
        for k, name in enumerate(parts):
            put(folder / fold.format(n) / name, 10 * n + k, **more)
    return folder


def queries(path, fold=None):
    return [int(part.query_ids[0]) for part in read_splits(path, fold, cache=False)]


@pytest.mark.parametrize(
    ("below", "fold", "parts"),
    [
        ("Data", "Fold{}", ("trainingset.txt", "validationset.txt", "testset.txt")),  # LETOR 2, OHSUMED and TREC
        ("QueryLevelNorm", "Fold{}", ("train.txt", "vali.txt", "test.txt")),  # LETOR 3, OHSUMED
        ("Feature-min", "Fold{}", ("trainingset.txt", "validationset.txt", "testset.txt")),
        ("OHSUMED/QueryLevelNorm", "FOLD{}", ("TRAIN.TXT", "VALI.TXT", "TEST.TXT")),
        (".", "F{}", ("Train.txt", "Valid.txt", "Test.txt")),
        (".", "fold_{}", ("train.dat", "dev.dat", "test.dat")),
        (".", "fold0{}", ("train.txt", "val.txt", "test.txt")),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_folds_of_every_release_are_found(tmp_path, below, fold, parts, packed):
    names = [name + ".gz" if packed else name for name in parts]
    home = make_folds(tmp_path / "OHS" / below, fold, names, packed=packed)
    for place in (tmp_path / "OHS", home):
        assert queries(place) == [10, 11, 12]
        assert queries(place, 4) == [40, 41, 42]
    assert all_folds(home) == [1, 2, 3, 4, 5]


def test_a_folds_own_folder_means_that_fold_and_no_other(tmp_path):
    make_folds(tmp_path)
    assert queries(tmp_path / "Fold2") == queries(tmp_path / "Fold2", 2) == [20, 21, 22]
    assert queries(tmp_path / "Fold2" / ".") == [20, 21, 22]
    with pytest.raises(ConfigError, match="Fold2 is fold 2, but fold=1 is requested"):
        locate_parts(tmp_path / "Fold2", 1)
    (tmp_path / "Fold2").rename(tmp_path / "mine")
    assert queries(tmp_path / "mine") == queries(tmp_path / "mine", 1) == [20, 21, 22]
    with pytest.raises(ConfigError, match="mine is a single fold, but fold=2"):
        locate_parts(tmp_path / "mine", 2)


def test_a_folder_with_one_fold_has_no_other(tmp_path):
    make_folds(tmp_path, numbers=(3,))
    assert queries(tmp_path) == [30, 31, 32]
    with pytest.raises(ConfigError, match="has no Fold1; there are Fold3"):
        locate_parts(tmp_path, 1)


def test_of_several_versions_the_one_to_learn_from_is_taken(tmp_path):
    make_folds(tmp_path / "QueryLevelNorm")
    make_folds(tmp_path / "Feature_min", numbers=(7,))
    assert queries(tmp_path) == [10, 11, 12]
    for name in ("2003_td_dataset", "2004_td_dataset"):
        make_folds(tmp_path / "Gov" / "QueryLevelNorm" / name)
    assert queries(tmp_path / "Gov/QueryLevelNorm/2003_td_dataset", 2) == [20, 21, 22]
    several = "contains several sets: QueryLevelNorm/2003_td_dataset, QueryLevelNorm/2004_td_dataset; name one"
    with pytest.raises(ConfigError, match=several):
        locate_parts(tmp_path / "Gov")


def test_five_slices_make_the_folds_that_letor_makes_of_them(tmp_path):
    for n in range(1, 6):
        put(tmp_path / f"S{n}.txt", n, documents=2 + n)
    train, vali, test = read_splits(tmp_path, 3, cache=False)
    assert [p.query_ids.tolist() for p in (train, vali, test)] == [[3, 4, 5], [1], [2]]
    assert train.queries.tolist() == [0] * 5 + [1] * 6 + [2] * 7
    assert {p.features for p in (train, vali, test)} == {7}
    put(tmp_path / "S4.txt", 3)
    with pytest.raises(ConfigError, match=r"query 3 stands in two of .*S3\.txt"):
        read_splits(tmp_path, 3, cache=False)


def test_yahoos_sets_lie_side_by_side_and_are_named(tmp_path):
    for k in (1, 2):
        for n, part in enumerate(("train", "valid", "test")):
            put(tmp_path / f"set{k}.{part}.txt", 10 * k + n)
    assert queries(tmp_path / "set2") == [20, 21, 22]
    with pytest.raises(ConfigError, match=r"has the sets set1, set2; name one, such as .*/set1"):
        locate_parts(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        locate_parts(tmp_path / "set3")
    with pytest.raises(ConfigError, match="set2 is a single fold, but fold=3"):
        locate_parts(tmp_path / "set2", 3)


def test_without_a_validation_part_every_fifth_query_is_held_out(tmp_path):
    lines = [f"{k % 2} qid:{q} 1:{k}\n" for q in range(1, 13) for k in range(3)]
    (tmp_path / "train.txt").write_text("".join(lines))
    put(tmp_path / "test.txt", 99)
    train, vali, test = read_splits(tmp_path, cache=False)
    assert vali.query_ids.tolist() == [5, 10]
    assert train.query_ids.tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 11, 12]
    assert test.query_ids.tolist() == [99]
    put(tmp_path / "train.txt", 1)
    with pytest.raises(ConfigError, match="no validation part and too few queries"):
        read_splits(tmp_path, cache=False)


def test_what_is_missing_or_there_twice_is_named(tmp_path):
    make_folds(tmp_path)
    with pytest.raises(ConfigError, match="has no Fold6; there are Fold1, Fold2, Fold3, Fold4, Fold5"):
        locate_parts(tmp_path, 6)
    (tmp_path / "Fold1" / "vali.txt").unlink()
    with pytest.raises(ConfigError, match=r"Fold1/vali\.txt is missing"):
        locate_parts(tmp_path, 1)
    put(tmp_path / "Fold3" / "trainingset.txt", 1)
    with pytest.raises(ConfigError, match=r"Fold3 has train\.txt and trainingset\.txt; expected one"):
        locate_parts(tmp_path, 3)
    put(tmp_path / "Fold2" / "train.txt.gz", 20, packed=True)
    assert locate_parts(tmp_path, 2)["train"][0].name == "train.txt"  # the same, packed
    make_folds(tmp_path, "fold{}", numbers=(2,))
    with pytest.raises(ConfigError, match="has Fold2 and fold2; expected one of them"):
        locate_parts(tmp_path, 2)
    with pytest.raises(ConfigError, match="there is no folder"):
        locate_parts(tmp_path / "Fold9", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="does not contain ranking data"):
        locate_parts(tmp_path / "empty", 1)


def test_an_archive_is_to_be_unpacked(tmp_path):
    file = tmp_path / "MQ2008.zip"
    file.write_bytes(b"PK\x03\x04....")
    with pytest.raises(ConfigError, match=re.escape(f"{file} is an archive (zip); expected its content")):
        read_splits(file, cache=False)
