"""Load the network of a cytology run, or of a file exported from one."""

import json
from pathlib import Path

from mutirao.config import one_line
from mutirao.datasets.tile_folders import TileScale
from mutirao.errors import ConfigError, Damaged
from mutirao.systems.cytology.recipe import scale_in
from mutirao.systems.cytology.slides.models import ScreeningModel, assemble, load_model
from mutirao.systems.recsys.trained import arrays_of_run, config_of_run


def network_of_run(folder: Path, which: str = "best") -> ScreeningModel:
    """The network that a cytology run trained: backbone and head."""
    config = config_of_run(folder, "cytology")
    verdict = folder / "verdict.json"
    if not verdict.exists():
        raise ConfigError(f"{verdict} is missing: the run is not finished, or had no global test set")
    try:
        facts = json.loads(verdict.read_text(encoding="utf-8"))
        classes = list(facts["classes"])
        scale = TileScale(int(facts["tile"]), float(facts["mpp"])) if facts.get("tile") else None
        # Runs that are older than this entry have no scale, but that of the synthetic slides is known.
        if scale is None and config.data == "synthetic":
            scale = scale_in(config)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise Damaged(f"{verdict} is damaged: {one_line(error)}") from error
    return assemble(config, classes, arrays_of_run(folder, which)[0], scale)


def network_at(path: Path) -> ScreeningModel:
    """The network in a run folder, or in a file written by `mutirao slides export`."""
    if path.is_dir():
        return network_of_run(path)
    return load_model(path)
