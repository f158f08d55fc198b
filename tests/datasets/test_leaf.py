"""LEAF's json: users with their samples, pictures where they are pixels; what is not as it says is one clear line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.datasets import check_data_set
from mutirao.datasets.labelled import load_labelled
from mutirao.datasets.leaf import read_leaf
from mutirao.errors import ConfigError
from sets import table, write_leaf, writer


def test_pictures_come_with_their_writers(tmp_path: Path) -> None:
    found = load_labelled(str(write_leaf(tmp_path)), 0)
    assert found.shape == (1, 28, 28)
    assert found.x_train.dtype == np.uint8
    assert found.users is not None
    assert found.test_users is not None
    mine = found.x_train[found.users == "f0003_3"]
    assert np.array_equal(mine.reshape(10, 784), np.rint(np.array(writer(3, 10)[0]) * 255))
    assert set(found.test_users) == set(found.users)
    assert found.names == ("0", "1", "2", "3", "4")
    assert "60 pictures of 28 x 28 by 6 users, 10 to 10 each, labels 0 to 4" in check_data_set("leaf", tmp_path)[0]


def test_rows_of_numbers_stay_numbers(tmp_path: Path) -> None:
    for side in ("train", "test"):
        (tmp_path / side).mkdir()
        rows = {"a": ([[0.5, -2.0]], [1]), "b": ([[1.0, 1.0], [0, 1]], [0, 1])}
        (tmp_path / side / "x.json").write_text(json.dumps(table(rows)))
    found = load_labelled(str(tmp_path), 0)
    assert found.x_train.dtype == np.float32
    assert found.x_train.tolist() == [[0.5, -2.0], [1.0, 1.0], [0.0, 1.0]]


def test_one_users_pixels_that_are_no_bytes_make_all_rows(tmp_path: Path) -> None:
    rows = {"a": writer(1, 3), "b": ((np.array(writer(2, 3)[0]) + 0.001).tolist(), [0, 1, 2])}
    for side in ("train", "test"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "x.json").write_text(json.dumps(table(rows)))
    train, _ = read_leaf(tmp_path)
    assert train.x.shape == (6, 784)
    assert np.allclose(train.x[:3], writer(1, 3)[0], atol=1e-6)


GOOD = table({"a": ([[1, 2], [3, 4]], [0, 1])})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[NaN]], "y": [0]}}}', "NaN is no number"),
        ("7", "holds a int"),
        ({}, "has no list 'users'"),
        ({**GOOD, "users": [7]}, "has no list 'users'"),
        ({**GOOD, "user_data": []}, "has no list 'users'"),
        ({**GOOD, "num_samples": [2, 3]}, "'num_samples'"),
        ({**GOOD, "num_samples": [3]}, "has 2 samples, not 3"),
        ({**GOOD, "users": ["b"]}, "no lists 'x' and 'y'"),
        ({**GOOD, "users": ["a", "a"], "num_samples": [2, 2]}, "is there twice"),
        (table({"a": (["to be or not", "to be"], [0, 1])}), "has text for samples; of LEAF's sets femnist"),
        (table({"a": ([["1", "2"], [3, 4]], [0, 1])}), "has text for samples"),
        (table({"a": ([[1], [3, 4]], [0, 1])}), "no lists of finite numbers"),
        (table({"a": ([[[1]], [[2]]], [0, 1])}), "no lists of finite numbers"),
        (table({"a": ([[10**400], [2]], [0, 1])}), "no lists of finite numbers"),
        (table({"a": ([[1e300], [2]], [0, 1])}), "too large"),
        (table({"a": ([[True], [False]], [0, 1])}), "no lists of finite numbers"),
        (table({"a": ([{}, {}], [0, 1])}), "no lists of finite numbers"),
        (table({"a": ([[1], [2]], [0, -1])}), "no classes from 0"),
        (table({"a": ([[1], [2]], [0, 0.5])}), "no classes from 0"),
        (table({"a": ([[1], [2]], [0, 10**9])}), "no classes from 0"),
        (table({"a": ([[1], [2]], [0, True])}), "no classes from 0"),
        (table({"a": ([], [])}), "holds no samples"),
        (table({"a": ([[1], [2]], [0, 1]), "b": ([[1, 2]], [0])}), "differ in length"),
    ],
)
def test_what_is_not_as_leaf_writes_it_is_refused_in_one_line(tmp_path: Path, content: Any, says: str) -> None:
    for side in ("train", "test"):
        (tmp_path / side).mkdir()
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / side / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=says) as refused:
        read_leaf(tmp_path)
    assert "\n" not in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**30) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["users", "num_samples", "user_data", "x", "y", "a"]), inner, max_size=5)
    ),
    max_leaves=15,
)


@given(
    JSON
    | st.fixed_dictionaries(
        {
            "users": st.just(["a"]),
            "num_samples": st.just([1]),
            "user_data": st.fixed_dictionaries(
                {
                    "a": st.fixed_dictionaries(
                        {"x": st.lists(JSON, max_size=2), "y": st.lists(st.integers(0, 3), max_size=2)}
                    )
                }
            ),
        }
    )
)
def test_any_json_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    folder = tmp_path_factory.mktemp("leaf")
    for side in ("train", "test"):
        (folder / side).mkdir()
        (folder / side / "x.json").write_text(json.dumps(content))
    said = ""
    try:
        train, _ = read_leaf(folder)
        assert np.isfinite(train.x).all()
        assert len(train.x) == len(train.y) == len(train.users) > 0
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


def test_a_side_without_files_is_named(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    for file in (tmp_path / "test").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"test holds no \*.json"):
        load_labelled(str(tmp_path), 0)
