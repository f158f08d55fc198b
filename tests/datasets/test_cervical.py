"""Published sets of cervical cells, on small files of their layout: read, split, checked; and what is wrong in them."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.datasets import check_data_set
from mutirao.datasets.cervical import CRIC, LBC, SIPAKMED, find_cervical
from mutirao.datasets.image_layouts import read_train_test
from mutirao.errors import ConfigError
from mutirao.experiments.task import find

DRAW = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def cache_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))


def draw_picture(path: Path, width: int = 24, height: int = 20) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(DRAW.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path


def sipakmed(root: Path, nested: bool = True) -> Path:
    for name in SIPAKMED:
        home = root / name / name if nested else root / name
        for image in range(1, 6):
            whole = draw_picture(home / f"{image:03d}.bmp", 60, 50)
            whole.with_name(f"{image:03d}_cyt01.dat").write_text("1,2\n3,4\n")
            for cell in (1, 2):
                draw_picture(home / "CROPPED" / f"{image:03d}_{cell:02d}.bmp")
                for part in ("cyt", "nuc"):
                    (home / "CROPPED" / f"{image:03d}_{cell:02d}_{part}.dat").write_text("1.5,2.5\n")
    return root


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def cric(root: Path, form: str) -> Path:
    images, rows = [], []
    for number in range(1, 8):
        name = f"{number:02d}a0c1f06eb3.png"
        draw_picture(root / "images" / name, 200, 160)
        cells = [
            {"cell_id": 100 * number + i, "bethesda_system": label, "nucleus_x": 10 + 35 * i, "nucleus_y": 1 + 31 * i}
            for i, label in enumerate(CRIC)
        ]
        about = {"image_id": number, "image_doi": f"10.6084/m9.figshare.{number}"}
        images.append({**about, "image_name": name, "classifications": cells})
        rows += [{**about, "image_filename": name, **cell} for cell in cells]
    if form == "json":
        (root / "classifications.json").write_text(json.dumps(images))
    else:
        write_csv(root / "classifications.csv", rows)
    return root


def hicervix(root: Path) -> Path:
    for split, count in (("train", 8), ("val", 2), ("test", 4)):
        rows = []
        for i in range(count):
            name, abnormal = f"{split}_{i}.jpg", i % 2
            draw_picture(root / split / name)
            names = {"class_name": "HSIL" if abnormal else "Normal", "level_1": "ASC" if abnormal else "negative"}
            rows.append({"image_name": name, "class_id": abnormal, **names, "level_2": "x", "level_3": "y"})
        write_csv(root / f"{split}.csv", rows)
    return root


@pytest.mark.parametrize("nested", [True, False])
def test_sipakmeds_single_cells_are_read_and_no_image_is_on_both_sides(tmp_path: Path, nested: bool) -> None:
    train, test = read_train_test(sipakmed(tmp_path / "set", nested), r"^(\d+)-", 0.2, 0)
    assert train.classes == tuple(sorted(SIPAKMED))
    assert len(train) + len(test) == 50
    assert {file.parent.name for file in (*train.files, *test.files)} == {"CROPPED"}
    assert not set(train.slides) & set(test.slides)
    assert train.slides[0] == "im_Dyskeratotic/001"


def test_mendeleys_four_classes_are_read_as_they_unpack(tmp_path: Path) -> None:
    for home in (tmp_path / "a", tmp_path / "b" / "Liquid based cytology"):
        for name in LBC:
            for i in range(1, 6):
                draw_picture(home / name / f"{name[:4]}_1 ({i}).jpg")
        train, test = read_train_test(tmp_path / home.relative_to(tmp_path).parts[0], "", 0.2, 0)
        assert train.classes == LBC
        assert (len(train), len(test)) == (16, 4)


@pytest.mark.parametrize("form", ["json", "csv"])
def test_crics_cells_are_cut_around_their_nuclei(tmp_path: Path, form: str) -> None:
    root = cric(tmp_path / "cric", form)
    train, test = read_train_test(root, r"^(\d+)-", 0.2, 0)
    assert train.classes == tuple(sorted(CRIC))
    assert len(train) + len(test) == 42
    assert not set(train.slides) & set(test.slides)
    cells = {file.name: file for file in (*train.files, *test.files)}
    whole = np.asarray(Image.open(root / "images" / "03a0c1f06eb3.png"))
    assert np.array_equal(np.asarray(Image.open(cells["3-302.png"])), whole[17:107, 34:124])  # around 80, 63
    assert np.array_equal(np.asarray(Image.open(cells["3-300.png"])), whole[:90, :90])  # moved in from the corner
    before = cells["3-302.png"].stat().st_mtime_ns
    read_train_test(root, "", 0.2, 0)
    assert cells["3-302.png"].stat().st_mtime_ns == before  # cut once
    assert not list(root.glob("**/*302*"))  # the publisher's folder stays as it is


def test_hicervix_keeps_its_own_test(tmp_path: Path) -> None:
    train, test = read_train_test(hicervix(tmp_path / "set"), "", 0.2, 0)
    assert {file.parent.name for file in train.files} == {"train", "val"}
    assert {file.parent.name for file in test.files} == {"test"}
    assert (len(train), len(test), train.classes) == (10, 4, ("HSIL", "Normal"))


def test_recipes_and_commands_take_them_by_their_path(tmp_path: Path) -> None:
    root = sipakmed(tmp_path / "set")
    told = {"data": str(root), "weights": "random", "normal": "im_Sup*,im_Parabasal"}
    task = find("cytology").task(resolve(find("cytology").config, told))
    assert task.classes == len(SIPAKMED)
    shown = CliRunner().invoke(main, ["data", "check", "sipakmed", str(root)])
    assert shown.exit_code == 0, shown.output
    assert "50 pictures, published are 4,049; 0 left out" in shown.output
    assert "images that they are of: 25" in shown.output
    made = CliRunner().invoke(main, ["data", "prepare", str(root), "--out", str(tmp_path / "federation")])
    assert made.exit_code == 0, made.output
    assert sorted(p.name for p in (tmp_path / "federation" / "client_1").iterdir()) == sorted(SIPAKMED)


@pytest.mark.parametrize("name", ["sipakmed", "mendeley_lbc", "cric", "hicervix"])
def test_a_folder_that_holds_something_else_is_refused_with_what_would_be_right(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="needs a path"):
        check_data_set(name)
    with pytest.raises(ConfigError, match=f"does not hold {name}; right would be a folder with"):
        check_data_set(name, tmp_path)
    assert find_cervical(tmp_path) is None


def test_what_is_wrong_in_a_published_set_is_one_line(tmp_path: Path) -> None:
    root = cric(tmp_path / "cric", "json")
    table = root / "classifications.json"
    images = json.loads(table.read_text())

    def told(**instead: Any) -> str:
        cell = images[0]["classifications"][0] | instead
        table.write_text(json.dumps([images[0] | {"classifications": [cell]}]))
        with pytest.raises(ConfigError) as found:
            check_data_set("cric", root)
        return str(found.value)

    assert "no nucleus at 900, 1" in told(nucleus_x=900)
    assert "'../evil' is none of" in told(bethesda_system="../evil")
    assert "not a table of CRIC's cells" in told(cell_id="../1")
    table.write_text(json.dumps([images[0] | {"image_name": "../../etc/secret.png"}]))
    with pytest.raises(ConfigError, match="neither beside it nor in a folder"):
        check_data_set("cric", root)
    other = hicervix(tmp_path / "hicervix")
    (other / "val.csv").write_text("image_name,class_name\n,Normal\n")
    with pytest.raises(ConfigError, match=r"val.csv, line 2: image_name and class_name are needed"):
        check_data_set("hicervix", other)
    partial = sipakmed(tmp_path / "partial")
    (partial / "im_Parabasal").rename(partial / "gone")
    with pytest.raises(ConfigError, match="lacks im_Parabasal/im_Parabasal/CROPPED"):
        check_data_set("sipakmed", partial)
