"""The laboratories of cytology: pictures of cells in folders, or cut out of synthetic slides."""

from pathlib import Path
from typing import Any

from mutirao.datasets.tiled import Scale, scale_of
from mutirao.images.names import ELSEWHERE
from mutirao.images.sources import Sources, find_pictures, read_own, read_prepared


def find_sources(config: Any, classes: tuple[str, ...] = ()) -> Sources:
    """The parties that a configuration's `data` describes; with `sites` it is all one party's own."""
    if config.data == ELSEWHERE:
        return read_own(None, config.clients, config.slide, classes)
    if config.data == "synthetic":
        from mutirao.slides.demo import laboratories

        root = laboratories(config.clients, config.slides, config.side, config.seed)
        return read_prepared(root, config.clients, config.slide)
    root = Path(config.data).expanduser()
    if config.sites:
        return read_own(root, config.clients, config.slide, classes)
    return find_pictures(root, config, config.slide)


def scale_in(config: Any) -> Scale | None:
    """What one picture of a configuration's `data` shows, where that is known: it goes with the model to screening."""
    if config.data == "synthetic":
        return Scale(512, 0.5)  # as `tile_slide` cuts them there
    return None if config.data == ELSEWHERE else scale_of(Path(config.data).expanduser())
