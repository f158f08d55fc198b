"""A recipe by its content: one hash over the installed source code that a site would run for it."""

import functools
import hashlib
import importlib.util
import symtable
from pathlib import Path

from mutirao.config import nearest, one_line
from mutirao.errors import ConfigError
from mutirao.experiments.task import NAMES
from mutirao.registry import is_dotted

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


def check_recipe(recipe: str) -> None:
    """Refuse the name of a recipe that is not installed; what it names is looked at, never imported."""
    if ":" not in recipe:
        if recipe not in NAMES:
            raise ConfigError(f"no recipe is called {recipe!r}{nearest(recipe, NAMES)}")
        return
    module, _, name = recipe.partition(":")
    if not is_dotted(recipe):
        raise ConfigError(f"{recipe!r} is not of the form package.module:name")
    top, *rest = module.split(".")
    sources(top)  # says so if there is no such package
    spec = importlib.util.find_spec(top)
    origin = Path(spec.origin) if spec and spec.origin else Path()
    places = [origin.parent.joinpath(*rest).with_suffix(".py"), origin.parent.joinpath(*rest, "__init__.py")]
    file = next((place for place in places if place.is_file()), None) if rest else origin
    if file is None:
        raise ConfigError(f"there is no module {module!r} in {origin.parent}")
    try:
        table = symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} is not Python that can be read: {one_line(error)}") from error
    names = [s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()]
    if name not in names:
        raise ConfigError(f"{module} has no {name!r}{nearest(name, names)}")


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
        found = [file]
        root = file.parent
    else:
        found = [f for f in file.parent.rglob("*") if f.suffix in SOURCES and f.is_file()]
        root = file.parent.parent
    named = sorted((f.relative_to(root).as_posix(), f) for f in found)
    return tuple((name, hashlib.sha256(f.read_bytes()).hexdigest()) for name, f in named)
