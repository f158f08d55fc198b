"""A page that shows how readers agree, and the tiles on which they do not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutirao.datasets.class_folders import read_content
from mutirao.datasets.image_files import UnreadableError, picture
from mutirao.research_notice import NOTICE
from mutirao.systems.cytology.slides.reader_agreement import Agreement
from mutirao.systems.cytology.slides.readers import encode
from mutirao.templates import data_uri, render

MOST = 300  # tiles on the page
THUMB = 160


def page_of(found: Agreement, paths: Mapping[str, Path], folder: str) -> str:
    """One page that needs no other file: kappas, tables, and each tile on which readers differ with what each chose."""
    differing = found.differing
    return render(
        "systems/cytology/slides/assets/agreement.html",
        found=found,
        folder=folder,
        notice=NOTICE,
        hidden=len(differing) - MOST,
        tiles=[tile_on_page(found, int(i), paths) for i in differing[:MOST]],
    )


def tile_on_page(found: Agreement, i: int, paths: Mapping[str, Path]) -> dict[str, Any]:
    """A tile with what each reader chose for it; without a picture if it cannot be read."""
    name = found.tiles[i]
    chosen = (found.classes[k] for k in found.given[i].tolist())
    try:
        small = picture(read_content(paths[name]))
        small.thumbnail((THUMB, THUMB))
        address = data_uri(encode(small, quality=85), "image/jpeg")
    except (OSError, UnreadableError):
        address = ""
    return {"name": name, "picture": address, "given": dict(zip(found.readers, chosen, strict=True))}
