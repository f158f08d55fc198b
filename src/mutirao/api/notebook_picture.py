"""A picture of a run or a study that a notebook shows: what `mutirao plot` draws, and what a run left in its folder."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.io import write_whole
from mutirao.report.plot_kinds import KINDS, draw


@dataclass(frozen=True)
class Drawn:
    """A picture in PNG; a notebook shows it, `save` writes it to a file."""

    kind: str
    content: bytes = field(repr=False)

    def save(self, path: Path | str) -> None:
        """Write the picture to a file."""
        write_whole(Path(path), self.content)

    def _repr_png_(self) -> bytes:
        return self.content


def draw_kind(folder: Path, kind: str, **options: Any) -> Drawn:
    """One of the kinds of `mutirao plot`, drawn anew; or else the picture of that name that lies in the folder.

    Of a study that is so for `wins`, too, which has one picture of all its methods.
    """
    left = folder / f"{kind}.png"
    if kind not in KINDS or (kind == "wins" and not options and (folder / "cells").is_dir()):
        if left.parent != folder or not left.is_file():
            known = {*KINDS, *(path.stem for path in folder.glob("*.png"))}
            raise ConfigError(f"{folder} has no picture called {kind!r}{nearest(kind, known)}")
        return Drawn(kind, left.read_bytes())
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) if kind == "selection" else Path(place) / f"{kind}.png"
        made = draw(folder, kind, out, **options)
        return Drawn(kind, made[-1].read_bytes())
