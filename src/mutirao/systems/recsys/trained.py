"""The model of a run, taken away to be used elsewhere; of recsys it is item vectors with their catalogue."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutirao.config import read_toml
from mutirao.core.arrays import Arrays
from mutirao.errors import ConfigError
from mutirao.io import load_arrays
from mutirao.runs.execute import reopen
from mutirao.runs.run_folder import Folder
from mutirao.systems.recsys import recipe as recsys
from mutirao.systems.recsys.embeddings import Embeddings
from mutirao.systems.recsys.fedrecon import ITEMS
from mutirao.systems.recsys.partially_local.methods import method_of


def config_of_run(folder: Path, recipe: str) -> Any:
    """The configuration of the run in a folder; ConfigError unless it is one of this recipe."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} holds no run")
    name = str(read_toml(folder / "config.toml").get("recipe", ""))
    if name != recipe:
        raise ConfigError(f"{folder} holds a run of {name!r}, not of {recipe!r}")
    return reopen(name, folder, [])[1]


def arrays_of_run(folder: Path, which: str) -> tuple[Arrays, int]:
    """The model of the `best` round of a run, or of its `last`, and the round; without a best one the last counts."""
    best = folder / "checkpoints" / "best.safetensors"
    if which == "best" and best.exists():
        arrays, facts = load_arrays(best)
        return arrays, int(facts["round"])
    run = Folder(folder).newest(states=False)
    return run.arrays, run.round


def embeddings_of_run(folder: Path, which: str = "best") -> Embeddings:
    """The item vectors of a run of the recsys recipe, with all that serving needs."""
    config = config_of_run(folder, "recsys")
    arrays, number = arrays_of_run(folder, which)
    ratings = recsys.load(config)
    if config.method.name != "fedrecon":
        raise ConfigError(
            f"{folder}: of method={config.method.name} a part stayed with each user; only fedrecon is served"
        )
    method = asdict(method_of(config, ratings))
    card = {"how": "recsys", "round": number, "seed": config.seed, "data": Path(config.data).name}
    kept = {k: v for k, v in method.items() if k not in ("items", "workers", "compiled", "schedule")}
    return Embeddings(ratings.catalogue, arrays[ITEMS], card | kept)
