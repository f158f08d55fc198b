"""Cervical cells as their publishers ship them: SIPaKMeD, Mendeley LBC, CRIC and HiCervix, read where they lie.

Each is known by its own files. CRIC has whole images with a point a nucleus: its cells are cut out once, and kept in
the user's cache.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import one_line
from mutirao.datasets.class_folders import ENDINGS, ImageSet, look_at, read_content
from mutirao.datasets.image_files import UnreadableError, cache_home, picture
from mutirao.errors import ConfigError
from mutirao.io import read_csv, read_text, write_whole

SIPAKMED = ("im_Dyskeratotic", "im_Koilocytotic", "im_Metaplastic", "im_Parabasal", "im_Superficial-Intermediate")
LBC = (
    "High squamous intra-epithelial lesion",
    "Low squamous intra-epithelial lesion",
    "Negative for Intraepithelial malignancy",
    "Squamous cell carcinoma",
)
CRIC = ("ASC-H", "ASC-US", "HSIL", "LSIL", "Negative for intraepithelial lesion", "SCC")
CELL = 90  # pixels a side of a cell of CRIC's, as much published work cuts them
SPLITS = ("train", "val", "test")  # of HiCervix


@dataclass(frozen=True)
class Cell:
    """One picture: its file, its class, the slide or image it is of if that is known, and whether it is the test's."""

    file: Path
    label: str
    slide: str = ""
    test: bool = False


@dataclass(frozen=True)
class Published:
    """A published set: how it is recognised, how it is read, and how many pictures it has when it is whole."""

    name: str
    here: Callable[[Path], bool]
    read: Callable[[Path], list[Cell]]
    pictures: int
    layout: str


def sipakmed_folders(root: Path) -> dict[str, Path]:
    """The folders of single cells by class: `im_X/im_X/CROPPED`, or `im_X/CROPPED`."""
    found = {name: [root / name / name / "CROPPED", root / name / "CROPPED"] for name in SIPAKMED}
    return {name: path for name, paths in found.items() for path in paths if path.is_dir()}


def read_sipakmed(root: Path) -> list[Cell]:
    """4,049 single cells; `001_02.bmp` is the second of image 001 of its class, whose contours (.dat) are not read."""
    folders = sipakmed_folders(root)
    if missing := [name for name in SIPAKMED if name not in folders]:
        raise ConfigError(f"{root} lacks {missing[0]}/{missing[0]}/CROPPED of SIPaKMeD")
    return [
        Cell(file, name, f"{name}/{file.stem.partition('_')[0]}")
        for name, folder in folders.items()
        for file in inside(folder)
    ]


def lbc_home(root: Path) -> Path | None:
    """The folder that holds the class folders of Mendeley's set: this one, or the only one in it."""
    homes = [root, *sorted(p for p in root.iterdir() if p.is_dir())]
    return next((home for home in homes if all((home / name).is_dir() for name in LBC)), None)


def read_lbc(root: Path) -> list[Cell]:
    """963 images of liquid-based cytology in four classes; which of 460 patients each is of, it does not say."""
    home = lbc_home(root)
    return [] if home is None else [Cell(file, name) for name in LBC for file in inside(home / name)]


def cric_table(root: Path) -> Path | None:
    """CRIC's table of cells, as JSON or CSV."""
    found = [p for ending in ("json", "csv") for p in sorted(root.glob(f"classifications*.{ending}"))]
    return next((p for p in found if "nucleus_x" in read_text(p)), None)


def read_cric(root: Path) -> list[Cell]:
    """11,534 cells of 400 images of conventional smears, a square of 90 pixels around each nucleus.

    At an image's edge the square is moved into the image.
    """
    table = cric_table(root)
    if table is None:
        raise ConfigError(f"{root} has no classifications.json or classifications.csv of CRIC")
    content = read_text(table)
    home = cache_home() / "cric" / hashlib.sha256(content.encode()).hexdigest()[:16]
    places = {p.name: p for p in [*root.glob("*/*"), *root.glob("*")] if p.suffix.lower() in ENDINGS}
    cells: list[Cell] = []
    for image, name, points in cric_images(table, content):
        if name not in places:
            raise ConfigError(f"{table} names {name[:80]!r}, which is neither beside it nor in a folder there")
        targets = {home / label / f"{image}-{cell}.png": (x, y) for cell, label, x, y in points}
        if any(not target.exists() for target in targets):
            cut_cells(places[name], targets)
        cells += [Cell(target, target.parent.name, str(image)) for target in targets]
    return cells


def cric_images(table: Path, content: str) -> Iterator[tuple[int, str, list[tuple[int, str, int, int]]]]:
    """Each image's number and file, and its cells: number, class, and where the nucleus is."""
    try:
        if table.suffix == ".json":
            for image in json.loads(content):
                name = image["image_name"] if "image_name" in image else image["image_filename"]
                yield int(image["image_id"]), str(name), [cric_cell(c) for c in image["classifications"]]
            return
        grouped: dict[tuple[int, str], list[tuple[int, str, int, int]]] = {}
        for row in read_csv(table):
            grouped.setdefault((int(row["image_id"]), row["image_filename"]), []).append(cric_cell(row))
        for (number, name), cells in grouped.items():
            yield number, name, cells
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{table} is no table of CRIC's cells: {one_line(error)[:120]}") from error


def cric_cell(row: Any) -> tuple[int, str, int, int]:
    """A cell's number, class, and where its nucleus is, counted from 1."""
    label = str(row["bethesda_system"])
    if label not in CRIC:
        raise ValueError(f"the class {label[:60]!r} is none of {', '.join(CRIC)}")
    return int(row["cell_id"]), label, int(row["nucleus_x"]), int(row["nucleus_y"])


def cut_cells(image: Path, targets: dict[Path, tuple[int, int]]) -> None:
    """Cut the squares around these points out of an image; a point that is not in it is refused."""
    from PIL import Image

    try:
        whole = np.asarray(picture(read_content(image)))
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"{image}: {getattr(error, 'strerror', None) or error}") from error
    height, width = whole.shape[:2]
    for target, (x, y) in targets.items():
        if not (0 < x <= width and 0 < y <= height):
            raise ConfigError(f"{image} has {width} x {height} pixels, and no nucleus at {x}, {y}")
        left, top = (max(0, min(at - 1 - CELL // 2, side - CELL)) for at, side in ((x, width), (y, height)))
        stream = io.BytesIO()
        Image.fromarray(whole[top : top + CELL, left : left + CELL]).save(stream, "PNG")
        write_whole(target, stream.getvalue(), durable=False)


def read_hicervix(root: Path) -> list[Cell]:
    """40,229 cells in 29 classes, the finest of three levels: train and val are trained on, test is the test."""
    cells: list[Cell] = []
    for split in SPLITS:
        table = root / f"{split}.csv"
        for at, row in enumerate(read_csv(table), 2):
            name, label = row.get("image_name", ""), row.get("class_name", "")
            if not name or not label:
                raise ConfigError(f"{table}, line {at}: image_name and class_name are needed")
            places = [root / split / name, root / name, root / "images" / name, root / split / label / name]
            cells.append(Cell(next((p for p in places if p.is_file()), places[0]), label, test=split == "test"))
    return cells


def holds_hicervix(root: Path) -> bool:
    """Whether the three tables of HiCervix are there, with its columns."""
    tables = [root / f"{split}.csv" for split in SPLITS]
    first = next(iter(read_csv(tables[0])), {}) if all(t.is_file() for t in tables) else {}
    return {"image_name", "class_name"} <= first.keys()


PUBLISHED = (
    Published(
        "sipakmed",
        lambda root: bool(sipakmed_folders(root)),
        read_sipakmed,
        4049,
        "im_Dyskeratotic/im_Dyskeratotic/CROPPED/*.bmp and so on; the whole images beside CROPPED are not read",
    ),
    Published("mendeley_lbc", lambda root: bool(lbc_home(root)), read_lbc, 963, "a folder for each of four classes"),
    Published(
        "cric",
        lambda root: cric_table(root) is not None,
        read_cric,
        11_534,
        "classifications.json or classifications.csv, and the 400 images beside it or in a folder there",
    ),
    Published("hicervix", holds_hicervix, read_hicervix, 40_229, "{train,val,test}.csv and train/, val/, test/"),
)


def find_published(root: Path) -> Published | None:
    """Which of these sets lies in a folder, if any does."""
    return next((p for p in PUBLISHED if p.here(root)), None) if root.is_dir() else None


def read_published(found: Published, root: Path) -> tuple[ImageSet, ImageSet | None]:
    """All pictures of a set, or those to train on and those of its own test."""
    cells = found.read(root)
    classes = tuple(sorted({cell.label for cell in cells}))
    tests = [cell for cell in cells if cell.test]
    rest = [cell for cell in cells if not cell.test]
    return pictures_of(rest, classes, root), pictures_of(tests, classes, root) if tests else None


def pictures_of(cells: Sequence[Cell], classes: tuple[str, ...], root: Path) -> ImageSet:
    """These cells as pictures; those that cannot be read are named and left out."""
    by_file = {cell.file: cell for cell in cells}
    found = look_at([(cell.file, classes.index(cell.label)) for cell in by_file.values()], root)
    return replace(found, classes=classes, slides=np.array([by_file[file].slide for file in found.files]))


def inside(folder: Path) -> list[Path]:
    """The picture files in a folder."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in ENDINGS and not p.name.startswith("."))


def check_published(name: str, path: Path | str | None) -> list[str]:
    """What is found of that set at `path`, against what was published."""
    wanted = next(p for p in PUBLISHED if p.name == name)
    if path is None:
        raise ConfigError(f"{name} needs a path: a folder with {wanted.layout}")
    if not Path(path).is_dir() or not wanted.here(Path(path)):
        raise ConfigError(f"{path} does not hold {name}; right would be a folder with {wanted.layout}")
    parts = [part for part in read_published(wanted, Path(path)) if part is not None]
    total, left_out = sum(map(len, parts)), sum(len(part.unreadable) for part in parts)
    whole = "as published" if total == wanted.pictures else f"published are {wanted.pictures:,}"
    findings = [f"{path}: {total:,} pictures, {whole}; {left_out:,} left out"]
    for what, part in zip(("to train on", "its own test"), parts, strict=False):
        counts = ", ".join(f"{label} {count}" for label, count in part.counts().items())
        findings.append(f"{what}: {len(part):,} in {len(part.classes)} classes: {counts}")
        if slides := len(set(part.slides) - {""}):
            findings.append(f"images that they are of: {slides:,}; none will be on both sides of a split")
    return findings


def check_sipakmed(path: Path | str | None) -> list[str]:
    """What is found of SIPaKMeD."""
    return check_published("sipakmed", path)


def check_lbc(path: Path | str | None) -> list[str]:
    """What is found of Mendeley's liquid-based cytology."""
    return check_published("mendeley_lbc", path)


def check_cric(path: Path | str | None) -> list[str]:
    """What is found of CRIC Cervix."""
    return check_published("cric", path)


def check_hicervix(path: Path | str | None) -> list[str]:
    """What is found of HiCervix."""
    return check_published("hicervix", path)
