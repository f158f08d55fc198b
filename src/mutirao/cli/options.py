"""What commands have in common: kinds of paths, options, and how a result is told."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from mutirao.registry import dotted_in

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


@dataclass
class Agreement:
    """Whether the user agrees to run the code that a file names: by `--trust`, or asked once on a terminal."""

    given: bool
    agreed: set[str] = field(default_factory=set)

    def __call__(self, where: Path, names: Sequence[str]) -> bool:
        """Whether this code may be run; nobody is asked where nobody can answer."""
        if self.given or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return self.given
        new = [name for name in names if name not in self.agreed]
        if new and not click.confirm(f"{where} names code to run: {', '.join(new)}. Run it?", err=True):
            return False
        self.agreed.update(new)
        return True


TRUST = click.option(
    "--trust",
    is_flag=True,
    help="Run the code that a file names (package.module:name).",
    callback=lambda context, option, given: Agreement(given),
)


def look_here(*named: Any) -> None:
    """Look for code of the user's own in the working folder too, behind all that is installed, if any is named."""
    if dotted_in(named) and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def tell_page(said: str, address: str, host: str, browse: bool | None) -> None:
    """Say where a page is shown, warn where others can reach it, and open it on a terminal or if asked to."""
    click.echo(f"{said} at {address}")
    if host not in ("127.0.0.1", "localhost", "::1"):
        click.echo("note: others on the network can reach it, and what they send is not encrypted", err=True)
    if browse or (browse is None and sys.stdout.isatty()):
        click.launch(address)


def tell(content: Any, as_json: bool, *lines: str) -> None:
    """Print the content for machines, or these lines for people."""
    if text := json.dumps(content, indent=2) if as_json else "\n".join(lines):
        click.echo(text)
