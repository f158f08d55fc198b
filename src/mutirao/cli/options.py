"""What commands have in common: kinds of paths, options, and how a result is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

FILE = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
JSON = click.option("--json", "as_json", is_flag=True, help="For machines.")

Command = TypeVar("Command", bound=Callable[..., Any])
Assignments = list[tuple[str, Any]]


def settings(about: str) -> Callable[[Command], Command]:
    """The option `--set KEY=VALUE`, which may be given many times; the command gets the pairs as `sets`."""

    def parse(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> Assignments:
        from mutirao.config import parse_assignment

        return [parse_assignment(text) for text in texts]

    return click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help=about, callback=parse)


def tell(content: Any, as_json: bool, *lines: str) -> None:
    """Print the content for machines, or these lines for people."""
    if text := json.dumps(content, indent=2) if as_json else "\n".join(lines):
        click.echo(text)
