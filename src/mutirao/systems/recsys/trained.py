"""Load the trained model of a run; for recsys, the item vectors with their catalogue."""

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
    """The configuration of the run in a folder. Raises ConfigError if it is not a run of this recipe."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} holds no run")
    name = str(read_toml(folder / "config.toml").get("recipe", ""))
    if name != recipe:
        raise ConfigError(f"{folder} holds a run of {name!r}, not of {recipe!r}")
    return reopen(name, folder, [])[1]


def arrays_of_run(folder: Path, which: str) -> tuple[Arrays, int]:
    """The model of the `best` or `last` round of a run, and the round. Without a best one, that of the last."""
    best = folder / "checkpoints" / "best.safetensors"
    if which == "best" and best.exists():
        arrays, facts = load_arrays(best)
        return arrays, int(facts["round"])
    run = Folder(folder).newest(states=False)
    return run.arrays, run.round


def embeddings_of_run(folder: Path, which: str = "best") -> Embeddings:
    """The item vectors of a run of the recsys recipe, with all settings that `Recommender` needs."""
    config = config_of_run(folder, "recsys")
    arrays, number = arrays_of_run(folder, which)
    ratings = recsys.load(config)
    if config.method.name != "fedrecon":
        raise ConfigError(
            f"{folder}: with method={config.method.name} a part of the model stays with each user; only models of "
            "fedrecon can be exported"
        )
    card = {"how": "recsys", "round": number, "seed": config.seed, "data": Path(config.data).name}
    method = asdict(method_of(config, ratings))
    for name in ("items", "workers", "compiled", "schedule"):
        del method[name]
    return Embeddings(ratings.catalogue, arrays[ITEMS], card | method)
