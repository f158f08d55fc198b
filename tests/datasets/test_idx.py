"""Files of the idx form: what their header says is what is read, and a header that lies costs one clear line."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from mutirao.datasets import check_data_set
from mutirao.datasets.idx import TYPES, read_idx, read_pair, read_split
from mutirao.datasets.labelled import load_labelled
from mutirao.errors import ConfigError
from sets import idx_of, write_four


@given(
    st.sampled_from(sorted(TYPES.values())).flatmap(
        lambda kind: nps.arrays(kind, nps.array_shapes(min_dims=1, max_dims=4, max_side=5))
    ),
    st.booleans(),
)
def test_what_is_written_is_read_whatever_its_type(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, packed: bool
) -> None:
    file = tmp_path_factory.mktemp("idx") / ("a.gz" if packed else "a")
    file.write_bytes(gzip.compress(idx_of(array)) if packed else idx_of(array))
    found = read_idx(file)
    assert found.shape == array.shape
    assert np.array_equal(found, array, equal_nan=array.dtype.kind == "f")


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, headed: bool
) -> None:
    file = tmp_path_factory.mktemp("idx") / "train-images-idx3-ubyte"
    file.write_bytes((b"\0\0" if headed else b"") + content)
    said = str(file)
    try:
        assert idx_of(read_idx(file)) == file.read_bytes()
    except ConfigError as error:
        said = str(error)
    assert str(file) in said
    assert "\n" not in said


WHOLE = idx_of(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not begin with two zero bytes"),
        (b"\x1f\x8b\x08\x00 not unpacked", "does not begin with two zero bytes"),
        (b"\0\0\x07\x01\0\0\0\x01x", "the type 0x07 is not one"),
        (b"\0\0\x08\0", "0 dimensions"),
        (b"\0\0\x08\xff" + b"\0" * 2000, "255 dimensions"),
        (WHOLE[:9], "ends within its header"),
        (WHOLE[:-1], "declares 24 bytes, and there are only 23"),
        (WHOLE + b"x", "declares 24 bytes, and there are more"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "too many"),
        (b"\0\0\x08\x03\0\0\xff\xff\0\0\xff\xff\0\0\0\x01abc", "and there are only 3|too many"),
    ],
)
def test_a_header_that_lies_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_idx(tmp_path / "a")


def test_gzip_that_is_broken_or_unpacks_to_far_more_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(WHOLE)
    (tmp_path / "cut.gz").write_bytes(whole[:-9])
    (tmp_path / "not.gz").write_bytes(b"plain text")
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(WHOLE + bytes(1 << 22)))
    for name, says in (("cut", "cannot read"), ("not", "cannot read"), ("bomb", "there are more"), ("none", "No such")):
        with pytest.raises(ConfigError, match=says):
            read_idx(tmp_path / f"{name}.gz")


def test_images_and_labels_must_fit_each_other(tmp_path: Path) -> None:
    def pair(x: np.ndarray, y: np.ndarray) -> None:
        (tmp_path / "x").write_bytes(idx_of(x))
        (tmp_path / "y").write_bytes(idx_of(y))
        read_pair(tmp_path / "x", tmp_path / "y")

    x, y = np.zeros((3, 4, 4), np.uint8), np.zeros(3, np.uint8)
    pair(x, y)
    for odd, says in (
        ((x[:2], y), "2 images but y 3 labels"),
        ((x.astype(np.float32), y), "images are bytes"),
        ((x[0], y), "images are bytes"),
        ((x, x), "labels are whole numbers"),
        ((x, y.astype(np.float64)), "labels are whole numbers"),
        ((x, np.array([0, -1, 0], np.int32)), "a label -1"),
        ((x, np.array([0, 70000, 0], np.int32)), "a label 70000"),
        ((x[:0], y[:0]), "images are bytes"),
    ):
        with pytest.raises(ConfigError, match=says):
            pair(*odd)


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_of_four_files_is_a_set(tmp_path: Path, packed: bool) -> None:
    x = write_four(tmp_path, packed=packed)
    found = load_labelled(str(tmp_path), 0)
    assert found.shape == (1, 28, 28)
    assert np.array_equal(found.x_train[:, 0], x)
    assert (len(found.y_test), found.names) == (10, tuple("0123456789"))
    assert "40 train images of 28 x 28, labels 0 to 9" in check_data_set("idx", tmp_path)[0]
    ending = ".gz" if packed else ""
    (tmp_path / f"t10k-labels-idx1-ubyte{ending}").unlink()
    with pytest.raises(ConfigError, match="has no file t10k-labels"):
        load_labelled(str(tmp_path), 0)
    (tmp_path / f"t10k-images-idx3-ubyte{ending}").unlink()
    with pytest.raises(ConfigError, match="has no test files"):
        load_labelled(str(tmp_path), 0)
    assert read_split(tmp_path, "test") is None


def test_a_single_pair_has_a_fifth_held_out_by_the_seed(tmp_path: Path) -> None:
    write_four(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    one, again, other = (load_labelled(str(file), seed) for seed in (0, 0, 1))
    assert (len(one.y_train), len(one.y_test)) == (32, 8)
    assert np.array_equal(one.x_test, again.x_test)
    assert not np.array_equal(one.x_test, other.x_test)
    assert not {x.tobytes() for x in one.x_train} & {x.tobytes() for x in one.x_test}
    (tmp_path / "other.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="neither a table"):
        load_labelled(str(tmp_path / "other.bin"), 0)


def test_a_set_by_name_is_looked_for_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"data: mnist is not here: mutirao data get mnist fetches it"):
        load_labelled("mnist", 0)
    write_four(tmp_path / "fashion-mnist")
    write_four(tmp_path / "mnist")
    assert load_labelled("fashion-mnist", 0).names[0] == "T-shirt"
    assert len(load_labelled("fashion-mnist", 0).y_train) == 40  # and not Debian's 60,000
    assert load_labelled("mnist", 0).names[0] == "0"
