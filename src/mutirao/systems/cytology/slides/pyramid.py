"""Write a pyramidal BigTIFF of JPEG tiles, one tile after the other: a gigapixel never is in memory."""

import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

TILE = 512
SHORT, LONG, RATIONAL, LONG8 = (3, "H"), (4, "I"), (5, "II"), (16, "Q")  # number of the type, and its struct code


class Pyramid:
    """A BigTIFF file that grows: `add` a level after the other, the finest first; use it as a context.

    Adobe, "TIFF 6.0", 1992, and its addition of 64-bit offsets (version 43). Tiles are JPEG files of 512 x 512 in
    YCbCr with colours at half the resolution, as Pillow writes them with `subsampling=2`.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        self.link = 8  # where the place of the next level must be written

    def add(self, width: int, height: int, tiles: Iterable[bytes], mpp: float) -> None:
        """Write a level from its tiles, row by row."""
        offsets: list[int] = []
        lengths: list[int] = []
        for content in tiles:
            offsets.append(self.file.tell())
            lengths.append(len(content))
            self.file.write(content)
        expected = -(-width // TILE) * -(-height // TILE)
        if len(offsets) != expected:
            raise ValueError(f"{len(offsets)} tiles for a level of {expected}")
        per_cm = (round(1e7 / mpp), 1000)
        entries = [
            (254, LONG, [0 if self.link == 8 else 1]),  # a reduced picture of the first
            (256, LONG, [width]),
            (257, LONG, [height]),
            (258, SHORT, [8, 8, 8]),
            (259, SHORT, [7]),  # JPEG
            (262, SHORT, [6]),  # YCbCr
            (277, SHORT, [3]),
            (282, RATIONAL, [*per_cm]),
            (283, RATIONAL, [*per_cm]),
            (284, SHORT, [1]),
            (296, SHORT, [3]),  # a centimetre
            (322, LONG, [TILE]),
            (323, LONG, [TILE]),
            (324, LONG8, offsets),
            (325, LONG8, lengths),
            (530, SHORT, [2, 2]),
        ]
        packed = []
        for tag, (kind, code), values in entries:
            count = len(values) // len(code)
            content = struct.pack(f"<{code * count}", *values)
            if len(content) > 8:  # what does not fit into the entry lies before the directory
                place = self.file.tell()
                self.file.write(content)
                content = struct.pack("<Q", place)
            packed.append(struct.pack("<HHQ", tag, kind, count) + content.ljust(8, b"\0"))
        here = self.file.tell()
        self.file.write(struct.pack("<Q", len(packed)) + b"".join(packed))
        following = self.file.tell()
        self.file.write(struct.pack("<Q", 0))
        self.file.seek(self.link)
        self.file.write(struct.pack("<Q", here))
        self.file.seek(0, 2)
        self.link = following

    def __enter__(self) -> "Pyramid":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
