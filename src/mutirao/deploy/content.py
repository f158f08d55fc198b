"""A recipe by its content: one hash over the installed source code that a site would run for it."""

import functools
import hashlib
import importlib.util
from pathlib import Path

from mutirao.errors import ConfigError

SOURCES = {".py", ".c", ".h"}


def content_hash(recipe: str) -> str:
    """sha256 over mutirao's own sources and, for a recipe from elsewhere, those of its top-level package.

    The recipe `my_task:recipe` is hashed without importing it. Compiled files and other packages (torch, numpy) are
    not part of it. Any other version of mutirao has another hash.
    """
    sha = hashlib.sha256(f"recipe\x1f{recipe}\x1e".encode())
    own = ":" not in recipe  # a plain name is one of mutirao's own
    for place in dict.fromkeys(("mutirao", "mutirao" if own else recipe.partition(":")[0].partition(".")[0])):
        for name, content in sources(place):
            sha.update(f"{name}\x1f{content}\x1e".encode())
    return f"sha256:{sha.hexdigest()}"


@functools.lru_cache(maxsize=8)
def sources(package: str) -> tuple[tuple[str, str], ...]:
    """Each source file of an installed package or module with its sha256, sorted by name."""
    try:
        spec = importlib.util.find_spec(package)  # of a top-level name: finds it, imports nothing
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{package!r} cannot be found") from error
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        raise ConfigError(f"the sources of {package!r} cannot be found")
    file = Path(spec.origin)
    if spec.submodule_search_locations is None:
        found, root = [file], file.parent
    else:
        found, root = [f for f in file.parent.rglob("*") if f.suffix in SOURCES and f.is_file()], file.parent.parent
    named = sorted((f.relative_to(root).as_posix(), f) for f in found)
    return tuple((name, hashlib.sha256(f.read_bytes()).hexdigest()) for name, f in named)
