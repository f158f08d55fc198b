"""Any labelled set by name or path: pictures in folders, tables of files, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mutirao.datasets import check_data_set
from mutirao.datasets.labelled import Labelled, load_for_evaluation, load_labelled, with_validation_set
from mutirao.errors import ConfigError
from sets import listed, write_classes, write_table


def test_a_folder_of_classes_is_brought_to_one_size_with_a_fifth_held_out(tmp_path: Path) -> None:
    found = load_labelled(str(write_classes(tmp_path)), 0)
    assert found.shape == (3, 32, 32)
    assert found.names == ("bird", "cat")
    assert (len(found.y_train), np.bincount(found.y_test).tolist()) == (16, [2, 2])
    assert found.users is None
    bright = found.x_train.mean((1, 2, 3))
    assert bright[found.y_train == 0].max() < bright[found.y_train == 1].min()
    again = load_labelled(str(tmp_path), 1)
    assert not np.array_equal(found.x_test, again.x_test)
    assert "16 training samples, 4 test samples" in check_data_set("pictures", tmp_path)[0]


def test_twins_are_not_on_both_sides(tmp_path: Path) -> None:
    write_classes(tmp_path, count=5)
    for file in sorted(tmp_path.rglob("*.png")):
        for copy in range(3):
            (file.parent / f"{file.stem}-{copy}.png").write_bytes(file.read_bytes())
    for seed in range(5):
        found = load_labelled(str(tmp_path), seed)
        assert not {x.tobytes() for x in found.x_train} & {x.tobytes() for x in found.x_test}


def test_training_and_test_folders_and_those_of_clients_are_taken_as_they_are(tmp_path: Path) -> None:
    write_classes(tmp_path / "a" / "Training", count=6)
    write_classes(tmp_path / "a" / "Test", count=3, seed=1)
    found = load_labelled(str(tmp_path / "a"), 0)
    assert (len(found.y_train), len(found.y_test)) == (12, 6)
    for k in (1, 2):
        write_classes(tmp_path / "b" / f"client_{k}", count=k, seed=10 + k)
    write_classes(tmp_path / "b" / "global_test", count=2, seed=20)
    found = load_labelled(str(tmp_path / "b"), 0)
    assert found.users is not None
    assert found.users.tolist() == ["client_1"] * 2 + ["client_2"] * 4
    assert "by 2 users" in check_data_set("pictures", tmp_path / "b")[-1]


def test_a_table_names_files_labels_and_clients(tmp_path: Path) -> None:
    rows = listed(write_classes(tmp_path / "p"))
    plain = load_labelled(str(write_table(tmp_path / "plain.csv", rows)), 0)
    assert (len(plain.y_train), len(plain.y_test), plain.users) == (16, 4, None)
    owned = [{**row, "client": ("ana", "bia", "global_test")[i % 3]} for i, row in enumerate(rows)]
    found = load_labelled(str(write_table(tmp_path / "owned.csv", owned)), 0)
    assert found.users is not None
    assert (set(found.users), len(found.y_test)) == ({"ana", "bia"}, 6)


def test_a_group_is_on_one_side_only(tmp_path: Path) -> None:
    rows = listed(write_classes(tmp_path / "p", count=20))
    grouped = [{**row, "group": f"g{i % 8}"} for i, row in enumerate(rows)]
    file = str(write_table(tmp_path / "t.csv", grouped))
    of = {
        Image.open(tmp_path / row["file"]).convert("RGB").resize((32, 32), 2).tobytes(): row["group"] for row in grouped
    }
    for seed in range(5):
        found = load_labelled(file, seed)
        sides = [{of[x.transpose(1, 2, 0).tobytes()] for x in side} for side in (found.x_train, found.x_test)]
        assert not sides[0] & sides[1]
        assert len(found.y_test) >= 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must have columns 'file' and 'label'"),
        ("file,class\na.png,x\n", "must have columns 'file' and 'label'"),
        ("file,label\na.png,\n", "row 1: a file and a label are needed"),
        ("file,label\nnowhere.png,x\n", "holds no usable picture"),
        ("file,label,client\np/bird/0.png,x,ana\np/bird/1.png,x,\n", "1.png has no client, but others have"),
        (b"file,label\n\xff,x\n", "line 2: byte 0xff is not UTF-8"),
    ],
)
def test_a_table_that_is_wrong_is_refused_in_one_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    write_classes(tmp_path / "p", count=2)
    (tmp_path / "t.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=says):
        load_labelled(str(tmp_path / "t.csv"), 0)


def test_what_never_ends_or_is_not_there_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = listed(write_classes(tmp_path / "p"))
    os.mkfifo(tmp_path / "p" / "pipe.png")
    odd = [{"file": name, "label": "cat"} for name in ("/dev/zero", "p/pipe.png", "p", "p/gone.png", "x" * 300)]
    found = load_labelled(str(write_table(tmp_path / "t.csv", rows + odd)), 0)
    assert len(found.y_train) + len(found.y_test) == 20
    for what in (
        "/dev/zero: it is not a regular file",
        "pipe.png: it is no",
        "/p: it is no",
        "gone.png: there is no such",
    ):
        assert what in caplog.text


@pytest.mark.parametrize("data", ["nowhere", "", "fashion_mnist", "a\0b"])
def test_what_is_neither_name_nor_path_is_refused_with_all_names(data: str) -> None:
    with pytest.raises(ConfigError, match=r"no folder or file .* fashion-mnist"):
        load_labelled(data, 0)


def test_a_single_class_is_no_set(tmp_path: Path) -> None:
    write_classes(tmp_path, classes=("only",))
    with pytest.raises(ConfigError, match="a single class"):
        load_labelled(str(tmp_path), 0)


def test_cifar10_and_fashion_mnist_are_found_by_name(real_data: Path) -> None:
    assert load_labelled("cifar10", 0).shape == (3, 32, 32)
    assert len(load_labelled("fashion-mnist", 0).y_train) == 60_000


def test_validation_data_are_a_fifth_of_each_class_of_what_is_trained_on_and_nothing_of_the_test(
    tmp_path: Path,
) -> None:
    whole = load_labelled("digits", 3)
    found = load_for_evaluation("digits", 3, "vali")
    assert load_for_evaluation("digits", 3, "test").digest == whole.digest
    rows = [{x.tobytes() for x in part} for part in (whole.x_test, found.x_test, found.x_train)]
    assert not rows[0] & rows[1]
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[2]
    assert len(found.y_train) + len(found.y_test) == len(whole.y_train)
    assert np.bincount(found.y_test).tolist() == [round(0.2 * n) for n in np.bincount(whole.y_train)]
    assert found.digest == load_for_evaluation("digits", 3, "vali").digest


def test_whose_the_samples_are_goes_with_them_and_too_few_are_refused() -> None:
    y = np.repeat([0, 1], 10)
    users = np.array([f"u{i}" for i in range(20)])
    x = np.arange(20.0)[:, None]
    found = with_validation_set(Labelled(x, y, x[:1] + 50, y[:1], ("a", "b"), users), np.random.default_rng(0))
    assert found.users is not None
    assert found.test_users is not None
    assert [f"u{int(v)}" for v in found.x_train[:, 0]] == found.users.tolist()
    assert [f"u{int(v)}" for v in found.x_test[:, 0]] == found.test_users.tolist()
    few = Labelled(x[:2], y[[0, -1]], x[:1], y[:1], ("a", "b"))
    with pytest.raises(ConfigError, match="too few"):
        with_validation_set(few, np.random.default_rng(0))
