"""A reader's file: nothing acknowledged is lost, nothing half written counts; and what is made of the labels."""

import csv
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from mutirao.cli import main
from mutirao.datasets.tile_folders import TileScale, read_tile_scale
from mutirao.errors import ConfigError
from mutirao.systems.cytology.slides import tile_labels as module
from mutirao.systems.cytology.slides.synthetic_slides import Cells
from mutirao.systems.cytology.slides.tile_labels import (
    Labels,
    file_of,
    label_classes,
    open_labels,
    read_labels,
    readers_in,
    tiles_in,
)

CLASSES = ("normal", "abnormal")


@pytest.fixture
def tiles(tmp_path: Path) -> Path:
    folder = tmp_path / "tiles"
    rows = ["file,slide,laboratory,x,y"]
    for i in range(6):
        path = folder / "all" / f'a  "{i}", b.png'  # blanks, quotes and commas, as people name files
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), 40 * i, np.uint8)).save(path)
        rows.append(f'"all/a  ""{i}"", b.png",s{i % 2},lab_{i % 2},{i},0')
    (folder / "origins.csv").write_text("\n".join(rows) + "\n")
    (folder / ".hidden.png").write_bytes(b"")
    return folder


def test_labels_are_on_disk_when_put_returns_and_the_last_one_holds(tiles: Path) -> None:
    found = tiles_in(tiles)
    names = [t.name for t in found.tiles]
    assert names == [f'all/a  "{i}", b.png' for i in range(6)]
    assert [t.slide for t in found.tiles] == ["s0", "s1"] * 3
    with open_labels(tiles, "ana", found, CLASSES) as labels:
        labels.put([(names[0], "normal"), (names[1], "abnormal")])
        assert read_labels(tiles) == {"ana": {names[0]: "normal", names[1]: "abnormal"}}
        labels.put([(names[0], "abnormal")])
        labels.put([(names[1], "")])
        assert labels.steps() == [(names[0], ""), (names[1], ""), (names[0], "normal"), (names[1], "abnormal")]
        assert labels.now == {names[0]: "abnormal"}
    with open_labels(tiles, "ana", found, CLASSES) as again:
        assert again.now == {names[0]: "abnormal"}
        assert len(again.steps()) == 4


def test_half_a_line_is_dropped_and_the_next_label_is_whole(tiles: Path) -> None:
    found = tiles_in(tiles)
    names = [t.name for t in found.tiles]
    with open_labels(tiles, "ana", found, CLASSES) as labels:
        labels.put([(names[0], "normal")])
    path = file_of(tiles, "ana")
    whole = path.read_bytes()
    for torn in (b'"all/a  ""1"", b.png",abn', b'"all/a  ""1"", b.png",abnormal,2026-11-17T10:00:00+00:00', b"\0\0\0"):
        path.write_bytes(whole + torn)
        assert read_labels(tiles)["ana"] == {names[0]: "normal"}  # who only reads does not mend
        assert path.read_bytes() == whole + torn
        with open_labels(tiles, "ana", found, CLASSES) as labels:
            assert labels.now == {names[0]: "normal"}
            labels.put([(names[2], "abnormal")])
        assert read_labels(tiles)["ana"] == {names[0]: "normal", names[2]: "abnormal"}
    path.write_bytes(b"tile,cl")  # killed in the middle of the very first line
    with open_labels(tiles, "ana", found, CLASSES) as labels:
        labels.put([(names[0], "normal")])
    assert read_labels(tiles)["ana"] == {names[0]: "normal"}


def test_a_disk_that_is_full_takes_nothing_in_part(tiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tiles_in(tiles)
    names = [t.name for t in found.tiles]
    with open_labels(tiles, "ana", found, CLASSES) as labels:
        labels.put([(names[0], "normal")])

        def half(path: Path, content: bytes) -> None:
            with path.open("ab") as file:
                file.write(content[:7])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(module, "append_whole", half)
            with pytest.raises(OSError, match="No space left"):
                labels.put([(names[1], "normal")])
        assert labels.now == {names[0]: "normal"}
        labels.put([(names[2], "abnormal")])
    assert read_labels(tiles)["ana"] == {names[0]: "normal", names[2]: "abnormal"}


def test_what_is_not_there_is_refused_and_none_of_the_batch_is_written(tiles: Path) -> None:
    found = tiles_in(tiles)
    with open_labels(tiles, "ana", found, CLASSES) as labels:
        before = labels.path.read_bytes()
        for bad in (("../x.png", "normal"), (found.tiles[1].name, "odd"), ("", "normal")):
            with pytest.raises(ConfigError):
                labels.put([(found.tiles[0].name, "normal"), bad])
        assert labels.path.read_bytes() == before
        with (
            pytest.raises(ConfigError, match="is in use by another process"),
            open_labels(tiles, "ana", found, CLASSES),
        ):
            pass
        with open_labels(tiles, "rui", found, CLASSES):  # another one's is another file
            assert readers_in(tiles) == ["ana", "rui"]


@pytest.mark.parametrize("reader", ["", "../ana", "a b", "x" * 41, ".a", "_a"])
def test_a_reader_is_a_name(tiles: Path, reader: str) -> None:
    with pytest.raises(ConfigError, match="--reader"):
        file_of(tiles, reader)


@pytest.mark.parametrize(
    ("text", "said"),
    [("a,b\n", "its columns are not"), ("tile,class,time\nx,y\n", "line 2: 2 cells"), ("\xff\n", "columns")],
)
def test_a_file_that_holds_no_labels_is_one_line(tiles: Path, text: str, said: str) -> None:
    file_of(tiles, "ana").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_labels(tiles)


def test_all_readers_use_the_same_classes(tiles: Path) -> None:
    with pytest.raises(ConfigError, match="name two to nine classes"):
        label_classes(tiles, ())
    assert label_classes(tiles, CLASSES) == CLASSES
    assert label_classes(tiles, ()) == CLASSES
    with pytest.raises(ConfigError, match="use the classes normal, abnormal"):
        label_classes(tiles, ("abnormal", "normal"))
    assert label_classes(tiles, (*CLASSES, "unusable")) == (*CLASSES, "unusable")
    with pytest.raises(ConfigError, match="cannot be the name of a class"):
        label_classes(tiles, ("a/b", "c"))
    file_of(tiles, "eva").write_text('tile,class,time\n"x",odd,t\n')
    with pytest.raises(ConfigError, match="'odd', which is none of"):
        Labels(file_of(tiles, "eva"), [], CLASSES)


def run(*words: str) -> Any:
    return CliRunner().invoke(main, ["slides", *words])


def test_from_a_cut_slide_over_two_readers_to_a_training_set(smear: tuple[Path, Cells], tmp_path: Path) -> None:
    tiles = tmp_path / "tiles"
    assert run("tile", str(smear[0]), "--out", str(tiles), "--size", "256").exit_code == 0
    found = tiles_in(tiles)
    names = [t.name for t in found.tiles]
    assert found.scale == TileScale(256, 0.5)
    assert "no reader has labelled" in run("gather", str(tiles), "--out", str(tmp_path / "no")).output
    label_classes(tiles, CLASSES)
    for reader, odd in (("ana", 0), ("rui", 3)):
        with open_labels(tiles, reader, found, CLASSES) as labels:
            labels.put([(n, CLASSES[(i % 4 == 0) ^ (i < odd)]) for i, n in enumerate(names[:-2])])
    told = run("agreement", str(tiles), "--json")
    facts = json.loads(told.stdout)
    assert facts["differing"] == names[:3]
    assert facts["tiles"] == len(names) - 2
    assert 0 < facts["kappa"]["value"] < 1
    assert (tiles / "agreement.html").read_text().count("<li><img") == 3
    assert "they differ on 3; look at" in run("agreement", str(tiles)).output
    assert "only ana" in run("agreement", str(tiles), "--reader", "ana").output
    assert "has no labels of 'eva'; it has those of ana, rui" in run("agreement", str(tiles), "--reader", "eva").output
    made = run("gather", str(tiles), "--out", str(tmp_path / "set"), "--laboratory", "lab_2", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["left_out"] == {"disputed": 3, "unlabelled": 2}
    rows = list(csv.DictReader((tmp_path / "set" / "origins.csv").open()))
    assert len(rows) == len(names) - 5
    first, tile = rows[0], found.tiles[3]
    assert (first["slide"], first["laboratory"], first["reader"]) == ("smear", "lab_2", "ana rui")
    assert (first["x"], first["y"], first["size"], first["mpp"]) == (str(tile.x), str(tile.y), "256", "0.5")
    assert (tmp_path / "set" / first["file"]).read_bytes() == tile.path.read_bytes()
    assert read_tile_scale(tmp_path / "set") == TileScale(256, 0.5)


def test_class_folders_are_shown_in_an_order_that_does_not_tell_the_class(tmp_path: Path) -> None:
    for i in range(6):
        path = tmp_path / "abc"[i % 3] / f"s_x{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    assert [t.path.parent.name for t in tiles_in(tmp_path).tiles] == ["a", "b", "c", "a", "b", "c"]
