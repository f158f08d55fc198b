"""The page on which a reader puts tiles into classes: it shows pictures, and writes one file, at every click."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Body, FastAPI, HTTPException, Query
from fastapi.responses import Response

from mutirao.dashboard.pages import HERE, page_app
from mutirao.datasets.class_folders import UnreadableError, picture, read_content
from mutirao.errors import ConfigError
from mutirao.research_notice import NOTICE
from mutirao.systems.cytology.slides.readers import encode_image
from mutirao.systems.cytology.slides.tile_labels import Labels, Tiles, open_labels

ASSETS = (HERE / "label.js", HERE / "label.css")
# pixels of a picture's longer side on the sheet, and looked at closely
SMALL = 224
LARGE = 1024
Changes = Annotated[list[tuple[str, str]], Body(embed=True, max_length=1000)]


def picture_for(path: Path, most: int) -> bytes:
    """A tile as a JPEG file that a browser can show, no larger than asked for."""
    found = picture(read_content(path))
    found.thumbnail((most, most))
    return encode_image(found, quality=90)


def make_page(tiles: Tiles, labels: Labels, reader: str, token: str, hosts: frozenset[str] | None) -> FastAPI:
    """The application of one reader; `hosts` are the addresses it answers to (None: any)."""
    app = page_app("dashboard/assets/label.html", ASSETS, token, hosts, notice=NOTICE)

    @app.get("/api/tiles")
    def state() -> dict[str, object]:
        with labels.guard:
            return {
                "folder": tiles.folder.name,
                "reader": reader,
                "classes": labels.classes,
                "tiles": [[tile.name, tile.slide] for tile in tiles.tiles],
                "labels": labels.now,
                "steps": labels.steps(),
            }

    @app.get("/api/picture")
    def show(i: int = Query(ge=0), large: bool = False) -> Response:
        if i >= len(tiles.tiles):
            raise HTTPException(404, "there is no such tile")
        try:
            content = picture_for(tiles.tiles[i].path, LARGE if large else SMALL)
        except (OSError, UnreadableError) as error:
            raise HTTPException(404, "this tile cannot be read") from error
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})

    @app.post("/api/labels")
    def put(changes: Changes) -> dict[str, int]:
        try:
            labels.put(changes)
        except ConfigError as error:
            raise HTTPException(409, str(error)) from error
        except OSError as error:
            raise HTTPException(507, f"the disk refuses: {error.strerror}") from error
        return {"saved": len(changes), "labelled": len(labels.now)}

    return app


@contextmanager
def labelling(
    tiles: Tiles, folder: Path, reader: str, classes: tuple[str, ...], token: str, hosts: frozenset[str] | None
) -> Iterator[FastAPI]:
    """The page of a reader; no other page can open the reader's file meanwhile."""
    with open_labels(folder, reader, tiles, classes) as labels:
        yield make_page(tiles, labels, reader, token, hosts)
