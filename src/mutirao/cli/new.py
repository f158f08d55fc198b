"""`mutirao new`: a folder with a recipe, a study and a test of one's own, which run as they are."""

import importlib.util
import keyword
import sys
from importlib.resources import files
from pathlib import Path

import click

from mutirao.errors import ConfigError

# What is written, and the file it is made of: NAME in either is the name chosen.
STARTER = {"NAME.py": "recipe.txt", "study.toml": "study.toml", "test_NAME.py": "test.txt", "README.md": "README.txt"}


def check_name(name: str) -> None:
    """Refuse what could not be imported under that name, or would be something else."""
    right = "right would be a name such as my_task"
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name.startswith(("_", "test_")):
        raise ConfigError(f"{name!r} cannot be the name of a recipe's module; {right}")
    if name in sys.stdlib_module_names:
        raise ConfigError(f"{name!r} is part of Python itself; {right}")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} is an installed package, which would be found first; {right}")


def make_starter(name: str, home: Path) -> Path:
    """Write the folder `name` in `home`; nothing that is there is touched."""
    check_name(name)
    folder = home / name
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise ConfigError(f"{folder} is there already; choose another name, or remove it") from error
    for path, source in STARTER.items():
        text = (files("mutirao.cli") / "starter" / source).read_text(encoding="utf-8")
        (folder / path.replace("NAME", name)).write_text(text.replace("NAME", name), encoding="utf-8")
    return folder


@click.command()
@click.argument("name")
def new(name: str) -> None:
    """Make a folder NAME with a recipe of your own, a study and a test, which run as they are.

    Example: mutirao new my_task
    """
    folder = make_starter(name, Path.cwd())
    for file in sorted(folder.iterdir()):
        click.echo(f"written: {name}/{file.name}")
    click.echo(f"next: cd {name} && mutirao run {name}:recipe")
