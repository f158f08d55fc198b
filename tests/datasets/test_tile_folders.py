"""Tiles that know where they were cut: names that can be folders, one scale a set, sets that are whole or absent."""

import csv
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mutirao.datasets.class_folders import read_image_folder
from mutirao.datasets.tile_folders import (
    Origin,
    TileScale,
    is_class_name,
    read_tile_scale,
    tile_scale_of,
    write_set,
    write_tile_scale,
)
from mutirao.errors import ConfigError
from mutirao.systems.images.image_sources import even, write_client_folders


def tile(label: str, number: int, slide: str) -> tuple[Origin, partial[None]]:
    pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    origin = Origin(
        f"{label}/{slide}_x{number}_y0.png", slide, f"lab of {slide}", 0.5, number, 0, 64, label, "s.xml", "ana"
    )
    return origin, partial(Image.fromarray(pixels).save)


def test_the_table_of_a_set_is_read_as_slides_and_laboratories_and_its_further_columns_are_borne(
    tmp_path: Path,
) -> None:
    tiles = [tile("abnormal" if i % 3 else "normal", i, f"s  {i % 5}") for i in range(15)]  # two blanks stay two
    write_set(tmp_path / "set", ["abnormal", "normal", "unusable"], tiles, TileScale(64, 0.5))
    assert (tmp_path / "set" / "unusable").is_dir()  # empty: all parties agree on the list
    rows = list(csv.DictReader((tmp_path / "set" / "origins.csv").open()))
    assert list(rows[0]) == ["file", "slide", "laboratory", "mpp", "x", "y", "size", "class", "source", "reader"]
    found = read_image_folder(tmp_path / "set", str(tmp_path / "set" / "origins.csv"))
    assert set(found.slides) == {f"s  {i}" for i in range(5)}
    assert set(found.laboratories) == {f"lab of s  {i}" for i in range(5)}


def test_a_set_that_fails_midway_leaves_nothing_and_a_full_folder_is_not_touched(tmp_path: Path) -> None:
    def broken() -> object:
        yield tile("a", 1, "s")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_set(tmp_path / "set", ["a", "b"], broken(), None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="is not empty"):
        write_set(tmp_path / "set", ["a"], [], None)
    assert (tmp_path / "set" / "mine.txt").read_text() == "kept"


def test_the_scale_goes_along_when_hospitals_are_made_and_different_scales_are_refused(tmp_path: Path) -> None:
    tiles = [tile("ab"[i % 2], i, f"s{i % 6}") for i in range(24)]
    write_set(tmp_path / "set", ["a", "b"], tiles, TileScale(64, 0.25))
    table = str(tmp_path / "set" / "origins.csv")
    write_client_folders(tmp_path / "set", tmp_path / "fed", 2, even, np.random.default_rng(0), 0, slide=table)
    assert (
        read_tile_scale(tmp_path / "fed" / "client_2")
        == read_tile_scale(tmp_path / "fed" / "global_test")
        == TileScale(64, 0.25)
    )
    assert tile_scale_of(tmp_path / "fed") == TileScale(64, 0.25)
    write_tile_scale(tmp_path / "fed" / "client_1", TileScale(64, 0.5))
    with pytest.raises(ConfigError, match=r"different scales: .*client_1: 64 x 64 pixels at 0.5"):
        tile_scale_of(tmp_path / "fed")
    assert tile_scale_of(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["[]", '{"size": 0, "mpp": 0.5}', '{"size": "x", "mpp": 1}', "{", "[" * 9999, '{"size": 1e999}']
)
def test_a_scale_that_cannot_be_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "tiles.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_tile_scale(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\\b", "", ".x", "__x", "a,b", "x" * 61, "global_test", "client_1", "a\n"]
)
def test_what_cannot_be_a_folder_or_is_one_already_is_no_class(name: str) -> None:
    assert not is_class_name(name)
    assert is_class_name("Tumor: Positive")
    assert is_class_name("lesão leve")
