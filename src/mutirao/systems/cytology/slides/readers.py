"""Read whole slides: with OpenSlide for scanners' formats, with tifffile for tiled TIFF that OpenSlide refuses.

The size of a pixel comes from the slide or from the user: micrometres per pixel are never guessed.
"""

import importlib.util
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
from PIL import Image

from mutirao.config import one_line
from mutirao.errors import ConfigError
from mutirao.io import read_csv

Pixels = npt.NDArray[np.uint8]
ENDINGS = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide", ".czi", ".dcm")
# OME's units of length; the default is micrometres.
MICROMETRES = {"m": 1e6, "dm": 1e5, "cm": 1e4, "mm": 1e3, "µm": 1.0, "nm": 1e-3, "pm": 1e-6, "Å": 1e-4, "in": 25_400.0}
OME_CHARACTERS = 64_000_000
BLOCK = 2048  # pixels a side read at once, so that no slide is in memory as a whole


class SlideError(ConfigError):
    """A slide that cannot be used; the message names it."""


class SlideReader(Protocol):
    """A reader of slides; the sizes of levels are (width, height), the finest first."""

    sizes: list[tuple[int, int]]
    mpp: float | None

    def read(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """Read a region inside the level; (x, y) is in pixels of that level."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class OpenSlideSource:
    """A slide through OpenSlide."""

    def __init__(self, path: Path) -> None:
        import openslide

        self.slide = openslide.OpenSlide(path)
        self.sizes = list(self.slide.level_dimensions)
        self.scales = self.slide.level_downsamples
        found = [self.slide.properties.get(k) for k in (openslide.PROPERTY_NAME_MPP_X, openslide.PROPERTY_NAME_MPP_Y)]
        self.mpp = plausible_mpp([float(v) for v in found if v is not None])

    def read(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """Read a region of a level; areas that were never scanned are white."""
        corner = (round(x * self.scales[level]), round(y * self.scales[level]))
        # OpenSlide takes the corner in pixels of the finest level, and the size in pixels of the level that is read.
        found = self.slide.read_region(corner, level, (width, height))
        whole = np.array(found.convert("RGB"))
        whole[np.asarray(found.getchannel("A")) == 0] = 255
        return whole

    def close(self) -> None:
        """Close the file."""
        self.slide.close()


class TiffSource:
    """A tiled, pyramidal TIFF through tifffile; JPEG tiles are decoded by Pillow."""

    def __init__(self, path: Path) -> None:
        import tifffile

        self.file = tifffile.TiffFile(path)
        series = self.file.series[0]
        self.pages: list[Any] = [level.keyframe for level in series.levels]
        for page in self.pages:
            if not page.is_tiled or page.dtype != np.uint8 or page.samplesperpixel not in (3, 4):
                self.file.close()
                raise ValueError("only tiled TIFF in 8-bit colour can be read")
        self.sizes = [(int(p.imagewidth), int(p.imagelength)) for p in self.pages]
        self.lock = threading.Lock()
        self.mpp = ome_mpp(self.file.ome_metadata or "") or self._tag_mpp()

    def read(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """Read a region from the tiles that it touches."""
        page = self.pages[level]
        out = np.full((height, width, 3), 255, np.uint8)
        wide = page.tilewidth
        high = page.tilelength
        across = -(-page.imagewidth // wide)
        for row in range(y // high, -(-(y + height) // high)):
            for column in range(x // wide, -(-(x + width) // wide)):
                tile = self._tile(page, row * across + column)
                top = row * high - y
                left = column * wide - x
                target = out[max(top, 0) : top + high, max(left, 0) : left + wide]
                target[:] = tile[max(-top, 0) :, max(-left, 0) :][: target.shape[0], : target.shape[1]]
        return out

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _tile(self, page: Any, index: int) -> Pixels:
        if index >= len(page.dataoffsets) or not page.databytecounts[index]:
            return np.full((page.tilelength, page.tilewidth, 3), 255, np.uint8)
        with self.lock:
            self.file.filehandle.seek(page.dataoffsets[index])
            content: bytes = self.file.filehandle.read(page.databytecounts[index])
        if page.compression == 7:
            tables = page.jpegtables
            # JPEG tables are stored once for all tiles. They go before each, without end and start markers in between.
            if tables:
                content = tables[:-2] + content[2:]
            # Without Adobe's marker (no transform) the decoder takes RGB for YCbCr.
            if page.photometric == 2 and b"Adobe" not in content[:200]:
                content = content[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00" + content[2:]
            return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        decoded: Pixels = page.decode(content, index)[0][0]
        return decoded[..., :3]

    def _tag_mpp(self) -> float | None:
        tags = self.pages[0].tags
        if "ResolutionUnit" not in tags:
            return None
        # Micrometres in an inch and in a centimetre; resolutions are fractions n / d of pixels in one of these.
        unit = {2: 25_400.0, 3: 10_000.0}.get(int(tags["ResolutionUnit"].value))
        pairs = [tags[k].value for k in ("XResolution", "YResolution") if k in tags]
        if unit:
            return plausible_mpp([unit * d / n for n, d in pairs if n])
        return None


def ome_mpp(text: str) -> float | None:
    """Micrometres a pixel from the OME-XML of an OME-TIFF: PhysicalSizeX and Y of the first image.

    A document with a DOCTYPE is not parsed: its entities could expand without end, or fetch other files.
    """
    if not text or "<!DOCTYPE" in text or "<!ENTITY" in text or len(text) > OME_CHARACTERS:
        return None
    try:
        pixels = ElementTree.fromstring(text).find("{*}Image/{*}Pixels")
        attributes = {} if pixels is None else pixels.attrib
        sizes = []
        for name in ("PhysicalSizeX", "PhysicalSizeY"):
            if name in attributes:
                # Unicode has two of them: the Greek mu, and the micro sign.
                unit = attributes.get(f"{name}Unit", "µm").replace("μ", "µ")
                sizes.append(float(attributes[name]) * MICROMETRES[unit])
    except (ElementTree.ParseError, ValueError, KeyError, RecursionError):
        return None  # not a document, not a number, or not a unit of length, such as "pixel"
    return plausible_mpp(sizes)


def plausible_mpp(values: list[float]) -> float | None:
    """The mean of both directions, without values that a microscope cannot have."""
    plausible = [v for v in values if 0.02 <= v <= 50]
    if plausible:
        return sum(plausible) / len(plausible)
    return None


@dataclass(frozen=True)
class Slide:
    """An open slide: its path, micrometres per finest pixel, and reader."""

    path: Path
    mpp: float
    source: SlideReader

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the finest level."""
        return self.source.sizes[0]

    def scale(self, level: int) -> float:
        """How many of the finest pixels one pixel of a level covers, along a side."""
        return self.size[0] / self.source.sizes[level][0]

    def level_for(self, scale: float) -> int:
        """The coarsest level that is at least as fine as `scale`."""
        fine = [i for i in range(len(self.source.sizes)) if self.scale(i) <= scale * 1.01]
        return max(fine, key=self.scale, default=0)

    def region(self, x: int, y: int, side: int, pixels: int) -> Pixels:
        """The square of `side` finest pixels at (x, y), as `pixels` x `pixels`; beyond the edge it is white."""
        level = self.level_for(side / pixels)
        scale = self.scale(level)
        width, height = self.source.sizes[level]
        left = round(x / scale)
        top = round(y / scale)
        wanted = round(side / scale)
        wide = min(wanted, width - left)
        high = min(wanted, height - top)
        if wide <= 0 or high <= 0:
            return np.full((pixels, pixels, 3), 255, np.uint8)
        found = self._read(level, left, top, wide, high)
        found = np.pad(found, ((0, wanted - high), (0, wanted - wide), (0, 0)), constant_values=255)
        if wanted == pixels:
            return found
        return np.asarray(Image.fromarray(found).resize((pixels, pixels), Image.Resampling.BOX))

    def overview(self, mpp: float) -> Pixels:
        """The whole slide at about `mpp`, read block by block: memory does not grow with the slide."""
        scale = max(mpp / self.mpp, 1.0)
        level = self.level_for(scale)
        shrink = max(1, round(scale / self.scale(level)))
        width, height = self.source.sizes[level]
        out = np.full((-(-height // shrink), -(-width // shrink), 3), 255, np.uint8)
        # Blocks are a multiple of `shrink`, so that each becomes whole pixels of the overview.
        step = max(1, BLOCK // shrink) * shrink
        for y in range(0, height, step):
            for x in range(0, width, step):
                block = self._read(level, x, y, min(step, width - x), min(step, height - y))
                small = block
                if shrink > 1:
                    small = np.asarray(Image.fromarray(block).reduce(shrink))
                out[y // shrink : y // shrink + small.shape[0], x // shrink : x // shrink + small.shape[1]] = small
        return out

    def _read(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        try:
            return self.source.read(level, x, y, width, height)
        except Exception as error:  # OpenSlide, tifffile and Pillow raise exceptions of their own
            raise SlideError(f"{self.path} is truncated or damaged: {one_line(error)[:150]}") from error

    def close(self) -> None:
        """Close the file."""
        self.source.close()


def open_slide(path: Path, mpp: float | None = None) -> Slide:
    """Open a slide; `mpp` replaces the pixel size that the slide gives, if any.

    >>> from mutirao.systems.cytology.slides.synthetic_slides import LABORATORIES, Smear, write_slide
    >>> _ = write_slide(Path("opened.tiff"), Smear(1024, 1024), LABORATORIES[0])
    >>> slide = open_slide(Path("opened.tiff"))
    >>> slide.size, slide.region(0, 0, side=512, pixels=64).shape
    ((1024, 1024), (64, 64, 3))
    >>> slide.close()
    """
    if not path.exists():
        raise SlideError(f"there is no slide {path}")
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise SlideError(f"{path} is empty (0 bytes)")
    except OSError as error:
        raise SlideError(f"cannot read {path}: {error.strerror or error}") from error
    source = open_source(path)
    known = mpp or source.mpp
    if known is None:
        source.close()
        raise SlideError(f"{path} does not say how large its pixels are; give --mpp, or --mpp-table with a line for it")
    return Slide(path, known, source)


def open_source(path: Path) -> SlideReader:
    """Open with OpenSlide, else with tifffile; a plain tiled TIFF the other way round, which is twice as fast."""
    reasons = []
    readers: list[tuple[str, Callable[[Path], SlideReader]]] = [
        ("openslide", OpenSlideSource),
        ("tifffile", TiffSource),
    ]
    if is_plain_tiff(path):
        readers.reverse()
    for package, make in readers:
        if importlib.util.find_spec(package) is None:
            reasons.append(f"{package} is not installed")
            continue
        try:
            return make(path)
        except Exception as error:  # each raises exceptions of its own
            reasons.append(f"{package}: {one_line(error)[:100]}")
    missing = sum("not installed" in r for r in reasons) == 2
    hint = "; install mutirao[slides]" if missing else ""
    raise SlideError(f"{path} is not a slide that can be read ({'; '.join(reasons)}){hint}")


def check_readers() -> None:
    """Raise ConfigError early if no package that reads slides is installed."""
    if not any(importlib.util.find_spec(package) for package in ("openslide", "tifffile")):
        raise ConfigError("slides need openslide or tifffile to be read: pip install 'mutirao[slides]'")


def is_plain_tiff(path: Path) -> bool:
    """Whether OpenSlide recognises only a tiled TIFF, no scanner's format."""
    if importlib.util.find_spec("openslide") is None:
        return False
    import openslide

    return bool(openslide.OpenSlide.detect_format(path) == "generic-tiff")


def read_mpp_table(path: Path) -> dict[str, float]:
    """Read a table (CSV) with columns `slide` and `mpp`: pixel sizes of slides that do not contain them."""
    try:
        return {row["slide"]: float(row["mpp"]) for row in read_csv(path)}
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path} is not a table with columns 'slide' and 'mpp': {one_line(error)}") from error


def encode_image(picture: Image.Image, form: str = "JPEG", **options: int) -> bytes:
    """The content of an image file."""
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def find_slides(paths: tuple[Path, ...]) -> list[Path]:
    """The given slides, and those in the given folders."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS and not p.name.startswith("."))
        else:
            found.append(path)
    if not found:
        raise ConfigError(f"no slides in {', '.join(map(str, paths))}; their names end in {', '.join(ENDINGS)}")
    return found
