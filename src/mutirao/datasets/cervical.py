"""Readers of cervical cell sets as their publishers ship them: SIPaKMeD, Mendeley LBC, CRIC and HiCervix.

Each set is recognised by its files. CRIC has whole images with a point for each nucleus: its cells are cut out once,
and kept in the user's cache.
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
from mutirao.datasets.class_folders import (
    ENDINGS,
    ImageSet,
    UnreadableError,
    cache_home,
    image_files_in,
    load_images,
    picture,
    read_content,
)
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
CELL = 90  # pixels a side of a cell of CRIC, as in much published work
SPLITS = ("train", "val", "test")  # of HiCervix


@dataclass(frozen=True)
class CellImage:
    """One image: its file, its class, the slide or image it was cut from, and whether it belongs to the test set."""

    file: Path
    label: str
    slide: str = ""
    test: bool = False


@dataclass(frozen=True)
class CervicalSet:
    """A published set: functions that recognise and read it, and its number of images."""

    name: str
    is_at: Callable[[Path], bool]
    read: Callable[[Path], list[CellImage]]
    pictures: int
    layout: str


def sipakmed_folders(root: Path) -> dict[str, Path]:
    """The folders of single cells by class: `im_X/im_X/CROPPED`, or `im_X/CROPPED`."""
    found = {}
    for name in SIPAKMED:
        for path in (root / name / name / "CROPPED", root / name / "CROPPED"):
            if path.is_dir():
                found[name] = path
    return found


def read_sipakmed(root: Path) -> list[CellImage]:
    """Read 4,049 single cells; `001_02.bmp` is cell 2 of image 001 of its class; contours (.dat) are not read."""
    folders = sipakmed_folders(root)
    if missing := [name for name in SIPAKMED if name not in folders]:
        raise ConfigError(f"{root} lacks {missing[0]}/{missing[0]}/CROPPED of SIPaKMeD")
    cells = []
    for name, folder in folders.items():
        for file in image_files_in(folder):
            image = file.stem.partition("_")[0]
            cells.append(CellImage(file, name, f"{name}/{image}"))
    return cells


def lbc_home(root: Path) -> Path | None:
    """The folder with the class folders of Mendeley's set: this one, or one in it."""
    for home in [root, *sorted(p for p in root.iterdir() if p.is_dir())]:
        if all((home / name).is_dir() for name in LBC):
            return home
    return None


def read_lbc(root: Path) -> list[CellImage]:
    """Read 963 images of liquid-based cytology in four classes; the patients of the images are not published."""
    home = lbc_home(root)
    if home is None:
        return []
    return [CellImage(file, name) for name in LBC for file in image_files_in(home / name)]


def cric_table(root: Path) -> Path | None:
    """Find CRIC's table of cells, as JSON or CSV."""
    found = [*sorted(root.glob("classifications*.json")), *sorted(root.glob("classifications*.csv"))]
    return next((path for path in found if "nucleus_x" in read_text(path)), None)


def read_cric(root: Path) -> list[CellImage]:
    """Read 11,534 cells in 400 images of conventional smears, a square of 90 pixels around each nucleus.

    At an image's edge the square is moved into the image.
    """
    table = cric_table(root)
    if table is None:
        raise ConfigError(f"{root} has no classifications.json or classifications.csv of CRIC")
    content = read_text(table)
    # The cache is named by the table's content, so that a corrected table cuts its cells anew.
    home = cache_home() / "cric" / hashlib.sha256(content.encode()).hexdigest()[:16]
    places = {p.name: p for p in [*root.glob("*/*"), *root.glob("*")] if p.suffix.lower() in ENDINGS}
    cells: list[CellImage] = []
    for image, name, points in cric_images(table, content):
        if name not in places:
            raise ConfigError(f"{table} names {name[:80]!r}, which is neither beside it nor in a folder there")
        targets = {home / label / f"{image}-{cell}.png": (x, y) for cell, label, x, y in points}
        if any(not target.exists() for target in targets):
            cut_cells(places[name], targets)
        cells += [CellImage(target, target.parent.name, str(image)) for target in targets]
    return cells


def cric_images(table: Path, content: str) -> Iterator[tuple[int, str, list[tuple[int, str, int, int]]]]:
    """Yield each image's number and file, and its cells: number, class, and position of the nucleus."""
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
        raise ConfigError(f"{table} is not a table of CRIC's cells: {one_line(error)[:120]}") from error


def cric_cell(row: Any) -> tuple[int, str, int, int]:
    """A cell's number, class, and the position of its nucleus, counted from 1."""
    label = str(row["bethesda_system"])
    if label not in CRIC:
        raise ValueError(f"the class {label[:60]!r} is none of {', '.join(CRIC)}")
    return int(row["cell_id"]), label, int(row["nucleus_x"]), int(row["nucleus_y"])


def cut_cells(image: Path, targets: dict[Path, tuple[int, int]]) -> None:
    """Cut squares around points out of an image; ConfigError if a point is outside."""
    from PIL import Image

    try:
        whole = np.asarray(picture(read_content(image)))
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"{image}: {getattr(error, 'strerror', None) or error}") from error
    height, width = whole.shape[:2]
    # Positions count from 1. At an edge the square moves into the image, so that all cells have one size.
    for target, (x, y) in targets.items():
        if not (0 < x <= width and 0 < y <= height):
            raise ConfigError(f"{image} has {width} x {height} pixels, and no nucleus at {x}, {y}")
        left = max(0, min(x - 1 - CELL // 2, width - CELL))
        top = max(0, min(y - 1 - CELL // 2, height - CELL))
        stream = io.BytesIO()
        Image.fromarray(whole[top : top + CELL, left : left + CELL]).save(stream, "PNG")
        write_whole(target, stream.getvalue(), durable=False)


def read_hicervix(root: Path) -> list[CellImage]:
    """Read 40,229 cells in 29 classes, the finest of three levels; train and val are the training set."""
    cells: list[CellImage] = []
    for split in SPLITS:
        table = root / f"{split}.csv"
        for at, row in enumerate(read_csv(table), 2):
            name = row.get("image_name", "")
            label = row.get("class_name", "")
            if not name or not label:
                raise ConfigError(f"{table}, line {at}: image_name and class_name are needed")
            places = [root / split / name, root / name, root / "images" / name, root / split / label / name]
            cells.append(CellImage(next((p for p in places if p.is_file()), places[0]), label, test=split == "test"))
    return cells


def is_hicervix(root: Path) -> bool:
    """Whether a folder contains the three tables of HiCervix, with its columns."""
    tables = [root / f"{split}.csv" for split in SPLITS]
    if not all(table.is_file() for table in tables):
        return False
    first = next(iter(read_csv(tables[0])), {})
    return {"image_name", "class_name"} <= first.keys()


CERVICAL_SETS = (
    CervicalSet(
        "sipakmed",
        lambda root: bool(sipakmed_folders(root)),
        read_sipakmed,
        4049,
        "im_Dyskeratotic/im_Dyskeratotic/CROPPED/*.bmp and so on; the whole images beside CROPPED are not read",
    ),
    CervicalSet("mendeley_lbc", lambda root: bool(lbc_home(root)), read_lbc, 963, "a folder for each of four classes"),
    CervicalSet(
        "cric",
        lambda root: cric_table(root) is not None,
        read_cric,
        11_534,
        "classifications.json or classifications.csv, and the 400 images beside it or in a folder there",
    ),
    CervicalSet("hicervix", is_hicervix, read_hicervix, 40_229, "{train,val,test}.csv and train/, val/, test/"),
)


def find_cervical(root: Path) -> CervicalSet | None:
    """Return the set in a folder, or None."""
    if not root.is_dir():
        return None
    return next((known for known in CERVICAL_SETS if known.is_at(root)), None)


def read_cervical(found: CervicalSet, root: Path) -> tuple[ImageSet, ImageSet | None]:
    """Read all images of a set; the second is its own test set, if it has one."""
    cells = found.read(root)
    classes = tuple(sorted({cell.label for cell in cells}))
    tests = [cell for cell in cells if cell.test]
    rest = [cell for cell in cells if not cell.test]
    train = load_cells(rest, classes, root)
    if not tests:
        return train, None
    return train, load_cells(tests, classes, root)


def load_cells(cells: Sequence[CellImage], classes: tuple[str, ...], root: Path) -> ImageSet:
    """Load cells as an image set; unreadable files are logged and left out."""
    by_file = {cell.file: cell for cell in cells}
    found = load_images([(cell.file, classes.index(cell.label)) for cell in by_file.values()], root)
    return replace(found, classes=classes, slides=np.array([by_file[file].slide for file in found.files]))


def check_cervical(name: str, path: Path | str | None) -> list[str]:
    """Describe the copy of a set at `path`, compared with what was published."""
    wanted = next(p for p in CERVICAL_SETS if p.name == name)
    if path is None:
        raise ConfigError(f"{name} needs a path: a folder with {wanted.layout}")
    if not Path(path).is_dir() or not wanted.is_at(Path(path)):
        raise ConfigError(f"{path} does not hold {name}; right would be a folder with {wanted.layout}")
    parts = [part for part in read_cervical(wanted, Path(path)) if part is not None]
    total = sum(map(len, parts))
    left_out = sum(len(part.unreadable) for part in parts)
    expected = "as published" if total == wanted.pictures else f"published are {wanted.pictures:,}"
    findings = [f"{path}: {total:,} pictures, {expected}; {left_out:,} left out"]
    for what, part in zip(("training", "its own test"), parts, strict=False):
        counts = ", ".join(f"{label} {count}" for label, count in part.counts().items())
        findings.append(f"{what}: {len(part):,} in {len(part.classes)} classes: {counts}")
        if slides := len(set(part.slides) - {""}):
            findings.append(f"images that they are of: {slides:,}; none will be on both sides of a split")
    return findings


def check_sipakmed(path: Path | str | None) -> list[str]:
    """Describe a copy of SIPaKMeD."""
    return check_cervical("sipakmed", path)


def check_lbc(path: Path | str | None) -> list[str]:
    """Describe a copy of Mendeley LBC."""
    return check_cervical("mendeley_lbc", path)


def check_cric(path: Path | str | None) -> list[str]:
    """Describe a copy of CRIC Cervix."""
    return check_cervical("cric", path)


def check_hicervix(path: Path | str | None) -> list[str]:
    """Describe a copy of HiCervix."""
    return check_cervical("hicervix", path)
