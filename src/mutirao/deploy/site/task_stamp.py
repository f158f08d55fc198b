"""The specification of a task, and a stamp of the code, environment and data it is made from."""

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mutirao.core.fleet import Scalar

MOST_FILES = 5000  # of a data folder that are checked for changes
WHOLE = ("flwr", "numpy", "torch")  # packages that an installer replaces as a whole


@dataclass(frozen=True)
class TaskSpec:
    """What a task is made from: the site's own function or a recipe, and all settings."""

    name: str  # the client's
    task: str = ""  # the site's own function from Flower's context to a Task; empty: the recipe of the run
    run: str = ""  # of Flower; only for a function of the site
    node: int = 0
    run_config: Mapping[str, Scalar] = field(default_factory=dict)
    node_config: Mapping[str, Scalar] = field(default_factory=dict)
    instead: Mapping[str, Scalar] = field(default_factory=dict)  # settings the site insists on

    def key(self) -> str:
        """Equal for specifications of the same task."""
        return json.dumps(asdict(self), sort_keys=True)


def stamp(spec: TaskSpec) -> str:
    """A digest of the installed code, the environment and the data, by names and modification times."""
    names = [spec.task]
    recipe = str(spec.run_config.get("recipe", ""))
    # A name without a colon is one of mutirao's own recipes, and of no other package.
    if ":" in recipe:
        names.append(recipe)
    sha = hashlib.sha256(code_stamp(*names).encode())
    for table in (spec.node_config, spec.instead):
        if isinstance(data := table.get("data"), str):
            for line in dates_in(Path(data).expanduser()):
                sha.update(line.encode())
    return sha.hexdigest()


def code_stamp(*names: str) -> str:
    """A digest of the installed code, of the packages of these dotted names, and of the environment."""
    sha = hashlib.sha256(f"{sys.executable} {sys.version}".encode())
    for top in sorted({"mutirao", *WHOLE, *(name.partition(":")[0].partition(".")[0] for name in names)} - {""}):
        for line in dates_of_package(top):
            sha.update(line.encode())
    for key, value in sorted(os.environ.items()):
        if key.startswith(("MUTIRAO_", "PYTHON", "CUDA_", "OMP_")):
            sha.update(f"{key}={value}\n".encode())
    return sha.hexdigest()


def dates_of_package(top: str) -> list[str]:
    """The source files of a package with sizes and dates; for third-party packages one file is enough."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
        if spec is not None and spec.origin:
            file = Path(spec.origin)
            if top in WHOLE or spec.submodule_search_locations is None:
                return [date_of(file)]
            found = sorted(f for f in file.parent.rglob("*") if f.suffix in {".py", ".c", ".so"})
            return [date_of(f) for f in found]
    return []


def dates_in(path: Path) -> Iterator[str]:
    """A file or folder with sizes and dates, down to the first few thousand files."""
    yield date_of(path)
    left = MOST_FILES
    for folder, names, files in os.walk(path):
        names.sort()
        for name in sorted(files)[:left]:
            left -= 1
            yield date_of(Path(folder) / name)
        if left <= 0:
            return


def date_of(path: Path) -> str:
    """A file by its name, size and date."""
    # Its content is not read: a stamp is made for every message.
    try:
        facts = path.stat()
    except OSError:
        return f"{path} missing\n"
    return f"{path} {facts.st_size} {facts.st_mtime_ns}\n"
