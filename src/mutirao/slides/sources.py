"""The laboratories of cytology: pictures of cells in folders, or cut out of synthetic slides."""

from pathlib import Path
from typing import Any

from mutirao.images.names import ELSEWHERE
from mutirao.images.sources import Sources, find_pictures, read_own, read_prepared


def find_sources(config: Any) -> Sources:
    """The parties that a configuration's `data` describes."""
    if config.data == ELSEWHERE:
        names = sorted(name.strip() for name in config.classes.split(",") if name.strip())
        return read_own(None, config.clients, config.slide, tuple(names))
    if config.data == "synthetic":
        from mutirao.slides.demo import laboratories

        root = laboratories(config.clients, config.slides, config.side, config.seed)
        return read_prepared(root, config.clients, config.slide)
    return find_pictures(Path(config.data).expanduser(), config, config.slide)
