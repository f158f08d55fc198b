"""Folder-per-class sets of pictures, checked before anything is trained on them.

What cannot be used is named and left out; what would make results wrong (the same picture in training and test,
class folders that differ) is refused.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.datasets.image_files import UnreadableError, picture
from mutirao.errors import ConfigError
from mutirao.io import read_csv

log = logging.getLogger("mutirao")

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff"}
LAYOUT = "a folder with one folder a class, and pictures (jpg, png, bmp, tif) in each"
MOST_BYTES = 1 << 29  # of a picture
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ImageSet:
    """Pictures by file, class, content and, where it is known, the slide and the laboratory they come from."""

    files: tuple[Path, ...]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    hashes: tuple[str, ...]
    slides: npt.NDArray[np.str_]  # "" where nobody knows
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
        """How many pictures each class has."""
        return dict(zip(self.classes, np.bincount(self.labels, minlength=len(self.classes)).tolist(), strict=True))


def concatenate_image_sets(parts: Mapping[str, ImageSet]) -> ImageSet:
    """The pictures of several folders of the same classes as one set; who they are is for a refusal."""
    classes, found = agree({name: part.classes for name, part in parts.items()}), list(parts.values())
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
    """The class folders in `root`, sorted by name, or one clear line why there are none."""
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
    """All pictures of a set; those that cannot be read are named in the log and left out.

    `slide` says how a picture's slide is known: a pattern whose first group is the slide's name, looked for in the
    file's name, or the path of a table (CSV) with columns `file`, `slide` and perhaps `laboratory`.

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
    agree({"the class list": names, str(root): [p.name for p in folders]})
    candidates: list[tuple[Path, int]] = []
    closed: list[tuple[Path, str]] = []
    for label, folder in enumerate(folders):
        try:
            inside = pictures_in(folder) or [file for slide in slides_in(folder) for file in tiles_in(slide)]
        except OSError as error:
            closed.append((folder, error.strerror or str(error)))
            continue
        candidates += [(file, label) for file in inside]
    found = replace(look_at(candidates, root, closed), classes=names)
    for name, count in found.counts().items():
        if not count:
            log.warning("%s: the class %r has no usable pictures", root, name)
    slides, laboratories = origins(root, found.files, slide)
    if not slide.endswith(".csv"):
        places = [file.relative_to(root).parts for file in found.files]
        slides = np.array([parts[1] if len(parts) > 2 else s for parts, s in zip(places, slides, strict=True)])
    return replace(found, slides=slides, laboratories=laboratories)


def pictures_in(folder: Path) -> list[Path]:
    """The pictures in a folder, sorted by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in ENDINGS and not p.name.startswith("."))


def slides_in(folder: Path) -> list[Path]:
    """The folders in that of a class which has no pictures itself: each is a slide's."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def tiles_in(slide: Path) -> list[Path]:
    """The tiles in a slide's folder; of one that `mutirao slides tile` wrote, those that were kept."""
    table = slide / "tiles.csv"
    if not table.exists():
        return pictures_in(slide)
    rows = read_csv(table)
    if rows and not {"tile", "kept"} <= set(rows[0]):
        raise ConfigError(f"{table} must have columns 'tile' and 'kept', as mutirao slides tile writes it")
    return sorted(slide / "tiles" / row["tile"] for row in rows if row["kept"] == "1")


def look_at(candidates: Sequence[tuple[Path, int]], where: Path, closed: Sequence[tuple[Path, str]] = ()) -> ImageSet:
    """These files with their labels, as far as they are pictures; the others are named in the log and left out."""
    files, labels, hashes, left_out = [], [], [], list(closed)
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
    nobody = np.array([""] * len(files))
    return ImageSet(tuple(files), np.array(labels, np.int64), (), tuple(hashes), nobody, nobody, tuple(left_out))


def read_content(file: Path) -> bytes:
    """What an ordinary file of no absurd size holds: a device or a pipe, which a link may name, would never end."""
    if not file.exists():
        raise UnreadableError("there is no such file")
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        raise UnreadableError(f"it is no ordinary file of at most {MOST_BYTES:,} bytes")
    return file.read_bytes()


def origins(root: Path, files: Sequence[Path], slide: str) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Slide and laboratory of each file, by a pattern or a table; the laboratory may also be a folder `lab_...`."""
    table = Path(slide).expanduser()
    if slide.endswith(".csv"):
        known = origin_table(table)
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
        raise ConfigError(f"slide: {slide!r} is no pattern: {error}") from error
    if not pattern.groups:
        raise ConfigError(f"slide: {slide!r} has no (group) that would be the slide's name")
    found = [pattern.search(f.name) for f in files]
    named = pattern.groupindex
    labs = [m["lab"] if m and "lab" in named else "" for m in found]
    return np.array([m[1] or "" if m else "" for m in found]), np.array(labs)


def origin_table(path: Path) -> dict[str, tuple[str, str]]:
    """A table of files with their slides and laboratories."""
    rows = read_csv(path)
    if not rows or not {"file", "slide"} <= set(rows[0]):
        raise ConfigError(f"{path} must have columns 'file' and 'slide', and may have 'laboratory'")
    return {r["file"]: (r["slide"] or "", r.get("laboratory") or "") for r in rows}


def agree(lists: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """The one class list of all, or a refusal that says who lacks what: labels would be swapped silently."""
    known = {who: tuple(names) for who, names in lists.items()}
    union = sorted({name for names in known.values() for name in names})
    odd = {who: [n for n in union if n not in names] for who, names in known.items()}
    if any(odd.values()):
        lacking = "; ".join(f"{who} lacks {', '.join(names)}" for who, names in odd.items() if names)
        raise ConfigError(f"the class folders differ: {lacking}; a class without pictures needs an empty folder")
    if len(set(known.values())) > 1:
        raise ConfigError(f"the class lists have different orders: {'; '.join(f'{w}: {n}' for w, n in known.items())}")
    return tuple(next(iter(known.values()), ()))


def refuse_shared(train: ImageSet, test: ImageSet) -> None:
    """Refuse a picture that is in both: the test would only show what was learnt by heart."""
    held = dict(zip(train.hashes, train.files, strict=True))
    both = [(held[h], file) for h, file in zip(test.hashes, test.files, strict=True) if h in held]
    if both:
        here, there = both[0]
        raise ConfigError(
            f"{len(both)} pictures are in training and in test, such as {here} and {there}; remove them from one"
        )


def check_image_folder(path: Path | str | None) -> list[str]:
    """What is found at `path`, for `mutirao data check cells PATH`."""
    if path is None:
        raise ConfigError(f"cells need a path: {LAYOUT}, or Training/ and Test/ of that kind")
    root, findings = Path(path), []
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
        agree({str(part): s.classes for part, s in zip(parts, sets, strict=True)})
        refuse_shared(*sets)
        findings.append("Training and Test have the same classes and no picture in common")
    return findings
