"""Pins of a policy: what a site has agreed on, and refuses to see changed.

The recipe is pinned by a hash of the source code that a site would run for it, settings by their values, and the model
by a digest of its arrays' names, types and shapes.

A server that may choose the model, the batch size or the number of steps can choose them so that single samples stand
in an update (`mutirao drill leak` shows it). A policy pins them, by default to what the recipe says.
"""

import functools
import hashlib
import importlib.util
import symtable
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mutirao.config import constants_of, dump, flatten, load_name, nearest, one_line, resolve, toml_lines, toml_string
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Scalar
from mutirao.errors import ConfigError, Refused
from mutirao.experiments.task import NAMES, Recipe, Task, find
from mutirao.registry import is_dotted

SOURCES = {".py", ".c", ".h"}


def content_hash(recipe: str) -> str:
    """sha256 over mutirao's own sources and, for a recipe from elsewhere, those of its top-level package.

    The recipe `my_task:recipe` is hashed without importing it. Compiled files and other packages (torch, numpy) are
    not part of it. Any other version of mutirao has another hash.
    """
    sha = hashlib.sha256(f"recipe\x1f{recipe}\x1e".encode())
    packages = ["mutirao"]
    # A name without a colon is one of mutirao's own recipes.
    if ":" in recipe:
        packages.append(recipe.partition(":")[0].partition(".")[0])
    for package in dict.fromkeys(packages):
        for name, content in sources(package):
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
    file: Path | None = origin
    if rest:
        places = [origin.parent.joinpath(*rest).with_suffix(".py"), origin.parent.joinpath(*rest, "__init__.py")]
        file = next((place for place in places if place.is_file()), None)
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
        # For a top-level name this imports nothing; for a dotted one it would import the packages above it.
        spec = importlib.util.find_spec(package)
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


ARCHITECTURE = "architecture"
# Settings that are the server's affair: nothing that a site does with its own data depends on them, or other rules of
# a policy hold for them (`data`, `privacy`). How many `clients` there are is agreed on when all have come.
FREE = frozenset(
    {"rounds", "clients", "per_round", "select", "aggregate", "screen", "available", "devices", "device", "privacy"}
    | {"secure", "compress", "personal", "exclude", "engine", "min_replies", "wait", "evaluate_every", "clients_every"}
    | {"track", "data", "size_cap"}
)
# Recipes in which the arrays of a request are not the same for all clients: heads of groups, item rows of a user.
VARYING = {"groups", "recsys"}


def architecture_of(arrays: Arrays) -> str:
    """sha256 over the names, types and shapes of a model's arrays; no number in them counts.

    >>> import numpy as np
    >>> architecture_of({"w": np.zeros((2, 3))}) == architecture_of({"w": np.ones((2, 3))})
    True
    """
    parts = sorted(f"{name}\x1f{array.dtype.str}\x1f{array.shape}\x1e" for name, array in arrays.items())
    return f"sha256:{hashlib.sha256(''.join(parts).encode()).hexdigest()}"


def settings_of(recipe: str, sets: Iterable[tuple[str, Any]] = ()) -> dict[str, Scalar]:
    """All settings of a recipe as they would be used, `key` or `part.key`, the part itself as `part.name`."""
    return dict(flatten(tomllib.loads(dump(recipe, resolve(find(recipe).config, {}, sets)))))


def settings_with_constants(recipe: str, sets: Iterable[tuple[str, Any]]) -> dict[str, Scalar]:
    """The same with what earlier versions had as settings, which policies may still pin, at the constants of now."""
    chosen = list(sets)
    return {**constants_of(resolve(find(recipe).config, {}, chosen)), **settings_of(recipe, chosen)}


@functools.lru_cache(maxsize=2)
def prepared(recipe: str, sets: tuple[tuple[str, Any], ...] = ()) -> tuple[Any, Task]:
    """A recipe's configuration with these settings, and its task; cached, so that data are read once."""
    found = find(recipe)
    config = resolve(found.config, {}, sets)
    return config, found.prepare(config)


def model_of(recipe: str, sets: Iterable[tuple[str, Any]] = ()) -> str:
    """The architecture of a recipe's model with these settings; ConfigError if it is not one for all clients."""
    if recipe in VARYING:
        raise ConfigError(f"the models of {recipe!r} differ from client to client: they have no one architecture")
    first = prepared(recipe, tuple(sets))[1].initial()
    if not first:
        raise ConfigError("the model is made when clients have agreed on what they hold; a schema pins it")
    return architecture_of(first)


@functools.lru_cache(maxsize=16)
def pin_lines(recipe: str, sets: tuple[tuple[str, Any], ...] = ()) -> str:
    """The table of a policy that pins a recipe to its settings, and to its model if that can be made here."""
    name = recipe if recipe.isidentifier() else toml_string(recipe)
    if ":" in recipe and not isinstance(load_name(recipe), Recipe):  # a site's own function from Flower's context
        return f"# [pinned.{name}]\n# what its code reads of a run's settings, such as: batch_size = 16"
    pinned = {k: v for k, v in settings_of(recipe, sets).items() if k.partition(".")[0] not in {"recipe", *FREE}}
    try:
        model = f"{ARCHITECTURE} = {toml_string(model_of(recipe, sets))}"
    except Exception as error:  # the data or weights of a site may come later, and reading them may raise anything
        why = " ".join(str(error).split())
        model = f'# {ARCHITECTURE} = "sha256:..."  (mutirao site hash {recipe} --architecture; now: {why[:160]})'
    return "\n".join([f"[pinned.{name}]", model, *toml_lines(pinned)])


def check_pins(pins: Mapping[str, Scalar], settings: Mapping[str, Scalar]) -> None:
    """Refused if a setting is not what it is pinned to; the model is looked at when it comes."""
    for key, wanted in pins.items():
        if key == ARCHITECTURE:
            continue
        found = settings.get(key)
        # In Python True == 1: a boolean must not pass for a pinned number, nor a number for a pinned boolean.
        if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
            said = "is not set" if found is None else f"is {str(found)[:40]!r}"
            raise Refused(f"pinned.{key}", f"{key} {said} in this run, and {wanted!r} is agreed on here")


def check_architecture(pins: Mapping[str, Scalar], do: str, arrays: Arrays) -> None:
    """Refused if the model of a request has other arrays than agreed on."""
    wanted = pins.get(ARCHITECTURE)
    if wanted is not None and (arrays or do == "train") and architecture_of(arrays) != wanted:
        raise Refused(f"pinned.{ARCHITECTURE}", "the model has other arrays, types or shapes than agreed on here")
