"""CIFAR-100 in its two versions, on small files of its form: fine and coarse labels, and what is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from mutirao.datasets import check_data_set
from mutirao.datasets.cifar import read_cifar100
from mutirao.datasets.labelled import is_arrays, load_labelled
from mutirao.errors import ConfigError

FINE, COARSE = [f"thing_{k}" for k in range(100)], [f"kind_{k}" for k in range(20)]
DRAW = np.random.default_rng(0)
X = {"train": DRAW.integers(0, 256, (200, 3072), np.uint8), "test": DRAW.integers(0, 256, (100, 3072), np.uint8)}
Y = {"train": np.arange(200) % 100, "test": np.arange(100)}


def write_binary(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for side, x in X.items():
        rows = np.concatenate([(Y[side] // 5)[:, None], Y[side][:, None], x], axis=1).astype(np.uint8)
        (folder / f"{side}.bin").write_bytes(rows.tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(FINE) + "\n\n")
    (folder / "coarse_label_names.txt").write_text("\n".join(COARSE) + "\n\n")
    return folder


def write_pickles(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for side, x in X.items():
        table = {b"data": x, b"fine_labels": Y[side].tolist(), b"coarse_labels": (Y[side] // 5).tolist()}
        (folder / side).write_bytes(pickle.dumps(table, protocol=2))
    names = {b"fine_label_names": [n.encode() for n in FINE], b"coarse_label_names": [n.encode() for n in COARSE]}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))
    return folder


@pytest.mark.parametrize("write", [write_binary, write_pickles])
def test_both_versions_give_the_same(tmp_path: Path, write: object) -> None:
    assert callable(write)
    folder = write(tmp_path / "cifar-100")
    found = read_cifar100(folder)
    np.testing.assert_array_equal(found.x_train.reshape(200, -1), X["train"])
    np.testing.assert_array_equal(found.x_test.reshape(100, -1), X["test"])
    np.testing.assert_array_equal(found.y_train, Y["train"])
    assert found.names == tuple(FINE)
    coarse = read_cifar100(folder, coarse=True)
    np.testing.assert_array_equal(coarse.y_test, Y["test"] // 5)
    assert coarse.names == tuple(COARSE)
    assert check_data_set("cifar100", folder)[1] == "200 training images of 3 x 32 x 32, 100 classes, 2 a class"


def test_it_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="mutirao data get cifar100 fetches it"):
        load_labelled("cifar100", 0)
    write_binary(tmp_path / "cifar-100-binary")
    assert len(load_labelled("cifar100", 0).names) == 100
    assert len(load_labelled("cifar100-coarse", 0).names) == 20
    assert len(load_labelled(str(tmp_path / "cifar-100-binary"), 0).names) == 100
    assert is_arrays("cifar100")
    assert is_arrays(str(tmp_path / "cifar-100-binary"))


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "a")
    whole = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"train\.bin has 614,799 bytes, not whole records of 3,074"):
        read_cifar100(folder)
    (folder / "train.bin").write_bytes(b"\x14" + whole[1:])
    with pytest.raises(ConfigError, match="has a coarse label 20; those of CIFAR-100 are 0 to 19"):
        read_cifar100(folder)
    (folder / "train.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no images"):
        read_cifar100(folder)
    (folder / "train.bin").write_bytes(whole)
    (folder / "fine_label_names.txt").write_text("one two")
    with pytest.raises(ConfigError, match="lists 2 fine classes; CIFAR-100 has 100"):
        read_cifar100(folder)
    (folder / "train.bin").unlink()
    with pytest.raises(ConfigError, match="does not hold CIFAR-100"):
        check_data_set("cifar100", folder)
    with pytest.raises(ConfigError, match="cifar100 needs a path"):
        check_data_set("cifar100")


def test_a_pickle_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    folder = write_pickles(tmp_path / "a")
    (folder / "test").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ConfigError, match="is refused: it asks for"):
        read_cifar100(folder)
