"""The laboratories of cytology: pictures of cells in folders, or cut out of synthetic slides."""

from pathlib import Path
from typing import Any

from mutirao.datasets.tiled import Scale, scale_of
from mutirao.images.sources import Sources, find_pictures, read_prepared


def find_sources(config: Any) -> Sources:
    """The parties that a configuration's `data` describes."""
    if config.data == "synthetic":
        from mutirao.slides.demo import laboratories

        root = laboratories(config.clients, config.slides, config.side, config.seed)
        return read_prepared(root, config.clients, config.slide)
    return find_pictures(Path(config.data).expanduser(), config, config.slide)


def scale_in(config: Any) -> Scale | None:
    """What one picture of a configuration's `data` shows, where that is known: it goes with the model to screening."""
    if config.data == "synthetic":
        return Scale(512, 0.5)  # as `tile_slide` cuts them there
    return scale_of(Path(config.data).expanduser())
