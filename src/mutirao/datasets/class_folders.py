"""Image files, and image sets with one folder for each class, checked before training.

Unreadable files are logged and left out. What would make results wrong raises ConfigError: the same image in training
and test, or class folders that differ.
"""

import hashlib
import io
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mutirao.config import one_line
from mutirao.errors import ConfigError
from mutirao.io import read_csv

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 100_000_000  # a cell or a tile has far fewer: more is an attack or a whole slide


def cache_home() -> Path:
    """The folder for files that can be computed again: `$MUTIRAO_CACHE`, or the user's cache folder."""
    home = os.environ.get("MUTIRAO_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "mutirao"


class UnreadableError(ValueError):
    """A file that is not an image, or a damaged one."""


def picture(content: bytes) -> "Image.Image":
    """Decode a complete image to RGB; UnreadableError if it is not an image, or truncated."""
    from PIL import Image  # late: listing data sets does not need it

    if not content:
        raise UnreadableError("it is empty (0 bytes)")
    try:
        found = Image.open(io.BytesIO(content))
        if found.width * found.height > MOST_PIXELS:
            raise UnreadableError(f"{found.width} x {found.height} pixels are too many for a picture of cells")
        return found.convert("RGB")
    except UnreadableError:
        raise
    except Exception as error:  # Pillow raises many kinds for broken files
        text = one_line(error)
        # Pillow reads from memory here: of an unknown format it names that stream, which means nothing to a user.
        if "BytesIO" in text:
            text = "it is no picture that can be read"
        raise UnreadableError(text[:120]) from error


def thumbnails(files: Sequence[Path], side: int) -> npt.NDArray[np.uint8]:
    """These images resized to `side` x `side` pixels: an array of files x 3 x side x side."""
    out = np.empty((len(files), 3, side, side), np.uint8)
    for i, file in enumerate(files):
        small = picture(file.read_bytes()).resize((side, side), 2)  # bilinear
        out[i] = np.asarray(small).transpose(2, 0, 1)
    return out


log = logging.getLogger("mutirao")

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff"}
LAYOUT = "a folder with one folder a class, and pictures (jpg, png, bmp, tif) in each"
MOST_BYTES = 1 << 29  # of an image file
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ImageSet:
    """Image files with their labels, content hashes, slides and laboratories."""

    files: tuple[Path, ...]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    hashes: tuple[str, ...]
    slides: npt.NDArray[np.str_]  # "" where unknown
    laboratories: npt.NDArray[np.str_]
    unreadable: tuple[tuple[Path, str], ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: Rows) -> "ImageSet":
        """Only these rows."""
        return replace(
            self,
            files=tuple(self.files[i] for i in rows),
            labels=self.labels[rows],
            hashes=tuple(self.hashes[i] for i in rows),
            slides=self.slides[rows],
            laboratories=self.laboratories[rows],
            unreadable=(),
        )

    def counts(self) -> dict[str, int]:
        """The number of images in each class."""
        return dict(zip(self.classes, np.bincount(self.labels, minlength=len(self.classes)).tolist(), strict=True))


def concatenate_image_sets(parts: Mapping[str, ImageSet]) -> ImageSet:
    """Concatenate image sets with the same classes; their names are used in errors."""
    classes = require_same_classes({name: part.classes for name, part in parts.items()})
    found = list(parts.values())
    return ImageSet(
        tuple(file for part in found for file in part.files),
        np.concatenate([part.labels for part in found]),
        classes,
        tuple(name for part in found for name in part.hashes),
        np.concatenate([part.slides for part in found]),
        np.concatenate([part.laboratories for part in found]),
        tuple(lost for part in found for lost in part.unreadable),
    )


def class_folders(root: Path) -> list[Path]:
    """The class folders in `root`, sorted by name; ConfigError says why there are none."""
    try:
        found = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))
    except NotADirectoryError as error:
        raise ConfigError(f"{root} is a file; right would be {LAYOUT}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"there is no folder {root}; right would be {LAYOUT}") from error
    except OSError as error:
        raise ConfigError(f"cannot look into {root}: {error.strerror or error}") from error
    if not found:
        raise ConfigError(f"{root} has no class folders; right would be {LAYOUT}")
    return found


def read_image_folder(root: Path, slide: str = "", classes: Sequence[str] = ()) -> ImageSet:
    """Read all images of a set; unreadable files are logged and left out.

    `slide` gives the slide of an image: a regular expression with the slide's name in the file name as first group,
    or the path of a table (CSV) with columns `file`, `slide` and optionally `laboratory`.

    >>> from PIL import Image
    >>> for name, colour in {"NILM": "white", "HSIL": "purple"}.items():
    ...     Path("cells", name).mkdir(parents=True)
    ...     Image.new("RGB", (8, 8), colour).save(Path("cells", name, "1.png"))
    >>> pictures = read_image_folder(Path("cells"))
    >>> pictures.classes, pictures.counts()
    (('HSIL', 'NILM'), {'HSIL': 1, 'NILM': 1})
    """
    folders = class_folders(root)
    names = tuple(classes) or tuple(p.name for p in folders)
    require_same_classes({"the class list": names, str(root): [p.name for p in folders]})
    candidates: list[tuple[Path, int]] = []
    unreadable: list[tuple[Path, str]] = []
    for label, folder in enumerate(folders):
        try:
            inside = image_files_in(folder)
            if not inside:
                for slide_folder in slide_folders(folder):
                    inside += tile_files(slide_folder)
        except OSError as error:
            unreadable.append((folder, error.strerror or str(error)))
            continue
        candidates += [(file, label) for file in inside]
    found = replace(load_images(candidates, root, unreadable), classes=names)
    for name, count in found.counts().items():
        if not count:
            log.warning("%s: the class %r has no usable pictures", root, name)
    slides, laboratories = slide_origins(root, found.files, slide)
    if not slide.endswith(".csv"):
        slides = slides.astype(object)
        for i, file in enumerate(found.files):
            parts = file.relative_to(root).parts
            if len(parts) > 2:  # CLASS/SLIDE/TILE
                slides[i] = parts[1]
        slides = slides.astype(str)
    return replace(found, slides=slides, laboratories=laboratories)


def image_files_in(folder: Path) -> list[Path]:
    """The image files in a folder, sorted by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in ENDINGS and not p.name.startswith("."))


def slide_folders(folder: Path) -> list[Path]:
    """The folders in a class folder without images of its own: each is one slide."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def tile_files(slide: Path) -> list[Path]:
    """The tiles in a slide's folder; only the kept ones, if `mutirao slides tile` wrote it."""
    table = slide / "tiles.csv"
    if not table.exists():
        return image_files_in(slide)
    rows = read_csv(table)
    if rows and not {"tile", "kept"} <= set(rows[0]):
        raise ConfigError(f"{table} must have columns 'tile' and 'kept', as mutirao slides tile writes it")
    return sorted(slide / "tiles" / row["tile"] for row in rows if row["kept"] == "1")


def load_images(
    candidates: Sequence[tuple[Path, int]], where: Path, unreadable: Sequence[tuple[Path, str]] = ()
) -> ImageSet:
    """Load files with their labels; those that are not images are logged and left out."""
    files = []
    labels = []
    hashes = []
    left_out = list(unreadable)
    for file, label in candidates:
        try:
            content = read_content(file)
            picture(content)
        except (OSError, UnreadableError) as error:
            left_out.append((file, getattr(error, "strerror", None) or str(error)))
            continue
        files.append(file)
        labels.append(label)
        hashes.append(hashlib.sha256(content).hexdigest())
    for file, why in left_out[:20]:
        log.warning("left out: %s: %s", file, why)
    if len(left_out) > 20:
        log.warning("left out: %d more", len(left_out) - 20)
    if not files:
        raise ConfigError(f"{where} holds no usable picture; right would be {LAYOUT}")
    unknown = np.array([""] * len(files))
    return ImageSet(tuple(files), np.array(labels, np.int64), (), tuple(hashes), unknown, unknown, tuple(left_out))


def read_content(file: Path) -> bytes:
    """Read a regular file up to a size limit: a device or a pipe, to which a link may point, would never end."""
    if not file.exists():
        raise UnreadableError("there is no such file")
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        raise UnreadableError(f"it is not a regular file of at most {MOST_BYTES:,} bytes")
    return file.read_bytes()


def slide_origins(root: Path, files: Sequence[Path], slide: str) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Slide and laboratory of each file, from a table or a pattern with a group `lab`."""
    table = Path(slide).expanduser()
    if slide.endswith(".csv"):
        known = read_origin_table(table)
        rows = [known.get(str(f.relative_to(root)), known.get(f.name, ("", ""))) for f in files]
        missing = sum(s == "" for s, _ in rows)
        if missing:
            log.warning("%s names no slide for %d of %d pictures", table, missing, len(files))
        return np.array([s for s, _ in rows]), np.array([lab for _, lab in rows])
    if not slide:
        return np.array([""] * len(files)), np.array([""] * len(files))
    try:
        pattern = re.compile(slide)
    except re.error as error:
        raise ConfigError(f"slide: {slide!r} is not a regular expression: {error}") from error
    if not pattern.groups:
        raise ConfigError(f"slide: {slide!r} has no (group) for the slide's name")
    slides = [""] * len(files)
    labs = [""] * len(files)
    for i, file in enumerate(files):
        if found := pattern.search(file.name):
            # An optional group that matched nothing is None.
            slides[i] = found[1] or ""
            if "lab" in pattern.groupindex:
                labs[i] = found["lab"]
    return np.array(slides), np.array(labs)


def read_origin_table(path: Path) -> dict[str, tuple[str, str]]:
    """Read a table of files with their slides and laboratories."""
    rows = read_csv(path)
    if not rows or not {"file", "slide"} <= set(rows[0]):
        raise ConfigError(f"{path} must have columns 'file' and 'slide', and may have 'laboratory'")
    return {r["file"]: (r["slide"] or "", r.get("laboratory") or "") for r in rows}


def require_same_classes(lists: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Return the class list that all have in common; ConfigError if they differ, since labels would be mixed up."""
    class_lists = {owner: tuple(names) for owner, names in lists.items()}
    union = sorted(set().union(*class_lists.values()))
    lacking = []
    for owner, names in class_lists.items():
        missing = [name for name in union if name not in names]
        if missing:
            lacking.append(f"{owner} lacks {', '.join(missing)}")
    if lacking:
        raise ConfigError(
            f"the class folders differ: {'; '.join(lacking)}; a class without pictures needs an empty folder"
        )
    if len(set(class_lists.values())) > 1:
        orders = "; ".join(f"{owner}: {names}" for owner, names in class_lists.items())
        raise ConfigError(f"the class lists have different orders: {orders}")
    return next(iter(class_lists.values()), ())


def refuse_shared(train: ImageSet, test: ImageSet) -> None:
    """Raise ConfigError if an image is in both sets: the test would measure memory."""
    trained = dict(zip(train.hashes, train.files, strict=True))
    both = [(trained[h], file) for h, file in zip(test.hashes, test.files, strict=True) if h in trained]
    if both:
        here, there = both[0]
        raise ConfigError(
            f"{len(both)} pictures are in training and in test, such as {here} and {there}; remove them from one"
        )


def check_image_folder(path: Path | str | None) -> list[str]:
    """Describe what is at `path`, for `mutirao data check cells PATH`."""
    if path is None:
        raise ConfigError(f"cells need a path: {LAYOUT}, or Training/ and Test/ of that kind")
    root = Path(path)
    findings = []
    parts = [p for p in (root / "Training", root / "Test") if p.is_dir()] or [root]
    sets = []
    for part in parts:
        found = read_image_folder(part, r"^(\d+)-")
        sets.append(found)
        counts = ", ".join(f"{name} {count}" for name, count in found.counts().items())
        findings.append(f"{part}: {len(found):,} pictures in {len(found.classes)} classes: {counts}")
        known = found.slides[found.slides != ""]
        findings.append(f"slides by the digits before the first dash: {len(set(known))}, of {len(known):,} pictures")
        findings.append(f"the same picture twice: {len(found) - len(set(found.hashes)):,}")
        findings += [f"unreadable: {file}: {why}" for file, why in found.unreadable]
    if len(sets) == 2:
        require_same_classes({str(part): s.classes for part, s in zip(parts, sets, strict=True)})
        refuse_shared(*sets)
        findings.append("Training and Test have the same classes and no picture in common")
    return findings
