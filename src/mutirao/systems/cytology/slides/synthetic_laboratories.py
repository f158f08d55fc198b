"""The whole way from slides to a federation, on synthetic slides: made, cut, selected, labelled by what is known."""

import hashlib
import json
import logging
import shutil
from pathlib import Path

import numpy as np

from mutirao.config import one_line
from mutirao.datasets.image_layouts import GLOBAL_TEST
from mutirao.errors import ConfigError
from mutirao.systems.cytology.slides.readers import check_readers
from mutirao.systems.cytology.slides.synthetic_slides import LABORATORIES, Cells, Smear, write_slide
from mutirao.systems.cytology.slides.tile_ranking import Choice
from mutirao.systems.cytology.slides.tiling import Cut, Tile, read_table, tile_slide
from mutirao.systems.images.features import cache_folder

log = logging.getLogger("mutirao")

CLASSES = ("abnormal", "normal")
VERSION = 1  # to be raised when slides are drawn or cut another way


def laboratories(clients: int, slides: int, side: int, seed: int, planted: bool = False) -> Path:
    """A folder with `client_1/ ..` and `global_test/` of tiles, one laboratory a client, its last slide for the test.

    With `planted` every second slide is abnormal by one or two cells, tiles lie in CLASS/SLIDE/, and the last quarter
    of the slides is for the test. It is made once for these settings and kept with the features.
    """
    if planted and slides < 4:
        raise ConfigError(f"slides: {slides} a laboratory are too few for a head of whole slides; 4 at least")
    what = json.dumps([VERSION, clients, slides, side, seed, *(["planted"] if planted else [])])
    out = cache_folder().parent / "synthetic" / hashlib.sha256(what.encode()).hexdigest()[:16]
    if (out / GLOBAL_TEST).is_dir():
        return out
    check_readers()
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    log.info("making %d synthetic slides for %d laboratories", clients * slides, clients)
    for client in range(1, clients + 1):
        laboratory = LABORATORIES[(client - 1) % len(LABORATORIES)]
        for number in range(1, slides + 1):
            name = f"{client}{number:02d}"
            tests = slides - (max(2, slides // 4) if planted else 1)
            home = part / (GLOBAL_TEST if number > tests else f"client_{client}")
            for folder in CLASSES:
                (home / folder).mkdir(parents=True, exist_ok=True)
            slide = part / "work" / f"{name}.tiff"
            smear = (
                Smear(side, side, planted=1 + number // 2 % 2 if number % 2 else 0) if planted else Smear(side, side)
            )
            cells = write_slide(slide, smear, laboratory, seed=seed * 1000 + client * 100 + number)
            tile_slide(slide, part / "work" / name, Cut(), Choice())
            if planted:
                label = CLASSES[0] if cells.abnormal.any() else CLASSES[1]
                (part / "work" / name / "tiles").rename(home / label / name)
                continue
            for tile in read_table(part / "work" / name / "tiles.csv"):
                if tile.kept and (label := label_of(tile, cells)):
                    (part / "work" / name / "tiles" / tile.name).rename(home / label / f"{name}-{tile.name}")
    shutil.rmtree(part / "work")
    try:
        part.replace(out)
    except OSError as error:  # another run was faster
        if not (out / GLOBAL_TEST).is_dir():
            raise
        log.info("the synthetic slides were made by another run: %s", one_line(error))
    return out


def label_of(tile: Tile, cells: Cells) -> str:
    """`abnormal` if the nucleus of an abnormal cell lies in the tile; "" if the nucleus of none does."""
    inside = (cells.x >= tile.x) & (cells.x < tile.x + tile.side) & (cells.y >= tile.y) & (cells.y < tile.y + tile.side)
    if not inside.any():
        return ""
    return CLASSES[0] if np.any(cells.abnormal & inside) else CLASSES[1]
