"""The laboratories of cytology: pictures of cells in folders, or cut out of synthetic slides."""

from pathlib import Path
from typing import Any

from mutirao.datasets.layouts import as_they_are
from mutirao.images.names import BAG_HEADS
from mutirao.images.sources import Sources, find_pictures, read_prepared

SLIDES, PLANTED = 3, 16  # synthetic slides a laboratory: for tiles, and for whole slides


def find_sources(config: Any) -> Sources:
    """The parties that a configuration's `data` describes; with a head for whole slides, their rows are slides."""
    if bags := config.head in BAG_HEADS:
        from mutirao.images.bags import gather_slides, slides_of

    if config.data == "synthetic":
        from mutirao.slides.demo import laboratories

        slides = config.slides or (PLANTED if bags else SLIDES)
        root = laboratories(config.clients, slides, config.side, config.seed, planted=bags)
        found = read_prepared(root, config.clients, config.slide)
    else:
        rows_of = gather_slides if bags else as_they_are
        found = find_pictures(Path(config.data).expanduser(), config, config.slide, rows_of=rows_of)
    return slides_of(found) if bags else found
