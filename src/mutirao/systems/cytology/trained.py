"""The network of a run of the cytology recipe, or of a file written of one."""

import json
from pathlib import Path

from mutirao.config import one_line
from mutirao.datasets.tile_folders import Scale
from mutirao.errors import ConfigError, Damaged
from mutirao.systems.cytology.slides.models import Model, assemble, load_model
from mutirao.systems.cytology.slides.slide_sources import scale_in
from mutirao.systems.recsys.trained import arrays_of_run, config_of_run


def network_of_run(folder: Path, which: str = "best") -> Model:
    """The network of a run of the cytology recipe, body and head."""
    config, verdict = config_of_run(folder, "cytology"), folder / "verdict.json"
    if not verdict.exists():
        raise ConfigError(f"{verdict} is missing: the run is not finished, or had no global test set")
    try:
        told = json.loads(verdict.read_text(encoding="utf-8"))
        classes = list(told["classes"])
        scale = Scale(int(told["tile"]), float(told["mpp"])) if told.get("tile") else None
        if scale is None and config.data == "synthetic":  # a run made before runs noted it
            scale = scale_in(config)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise Damaged(f"{verdict} is damaged: {one_line(error)}") from error
    return assemble(config, classes, arrays_of_run(folder, which)[0], scale)


def network_at(path: Path) -> Model:
    """The cytology network in a run folder, or in a file that `mutirao slides export` wrote."""
    return network_of_run(path) if path.is_dir() else load_model(path)
