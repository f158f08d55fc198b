"""`mutirao new`: create a folder with a recipe, a study and a test, which run as they are."""

import importlib.util
import keyword
import sys
from importlib.resources import files
from pathlib import Path

import click

from mutirao.errors import ConfigError

# Each new file and its template. NAME stands for the chosen name, in file names and texts.
STARTER = {"NAME.py": "recipe.txt", "study.toml": "study.toml", "test_NAME.py": "test.txt", "README.md": "README.txt"}


def check_module_name(name: str) -> None:
    """Refuse names that cannot be imported, or that would import another module."""
    expected = "choose a name such as my_task"
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name.startswith(("_", "test_")):
        raise ConfigError(f"{name!r} cannot be the name of a recipe's module; {expected}")
    if name in sys.stdlib_module_names:
        raise ConfigError(f"{name!r} is part of Python itself; {expected}")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} is an installed package, which would be found first; {expected}")


def make_starter(name: str, home: Path) -> Path:
    """Write the folder `name` in `home`. An existing folder is never changed."""
    check_module_name(name)
    folder = home / name
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise ConfigError(f"{folder} already exists; choose another name, or remove it") from error
    for path, source in STARTER.items():
        text = (files("mutirao.cli") / "starter" / source).read_text(encoding="utf-8")
        (folder / path.replace("NAME", name)).write_text(text.replace("NAME", name), encoding="utf-8")
    return folder


@click.command()
@click.argument("name")
def new(name: str) -> None:
    """Create a recipe of your own, with a study and a test.

    They are written to a folder NAME and run as they are.

    Example: mutirao new my_task
    """
    folder = make_starter(name, Path.cwd())
    for file in sorted(folder.iterdir()):
        click.echo(f"written: {name}/{file.name}")
    click.echo(f"next: cd {name} && mutirao run {name}:recipe")
