"""Decode image files: complete, in RGB, and up to a size limit."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mutirao.config import one_line

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
        raise UnreadableError("it is no picture that can be read" if "BytesIO" in text else text[:120]) from error


def thumbnails(files: Sequence[Path], side: int) -> npt.NDArray[np.uint8]:
    """These images resized to `side` x `side` pixels: an array of files x 3 x side x side."""
    out = np.empty((len(files), 3, side, side), np.uint8)
    for i, file in enumerate(files):
        small = picture(file.read_bytes()).resize((side, side), 2)  # bilinear
        out[i] = np.asarray(small).transpose(2, 0, 1)
    return out
