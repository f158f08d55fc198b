"""What commands share: kinds of paths, options, groups of commands, and how a result is printed."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import click

from mutirao.registry import dotted_in

FILE = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
JSON = click.option("--json", "as_json", is_flag=True, help="Output JSON.")
WORKERS = click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes [default: one a core].")
STOPPED = "stopped; finished runs are kept: run the same command again to continue"

Command = TypeVar("Command", bound=Callable[..., Any])
Assignments = list[tuple[str, Any]]


class CommandGroup(click.Group):
    """A group that lists its commands with their whole first sentence, under headings if it has any."""

    headings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    group_class = type  # groups inside are of the same class

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands; click itself would cut summaries off at the width of the terminal."""
        summaries: dict[str, str] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                summaries[name] = command.get_short_help_str(limit=1000)
        listed = {name for names in self.headings.values() for name in names}
        others = tuple(name for name in summaries if name not in listed)
        for heading, names in {**self.headings, "Commands": others}.items():
            if names:
                with formatter.section(heading):
                    formatter.write_dl([(name, summaries[name]) for name in names])


def settings(about: str) -> Callable[[Command], Command]:
    """The option `--set KEY=VALUE`, which may be given many times; the command gets the pairs as `sets`."""

    def parse(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> Assignments:
        from mutirao.config import parse_assignment

        return [parse_assignment(text) for text in texts]

    return click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help=about, callback=parse)


@dataclass
class CodeConsent:
    """The user's consent to run the code that a file names: by `--trust`, or asked once on a terminal."""

    given: bool
    agreed: set[str] = field(default_factory=set)

    def __call__(self, where: Path, names: Sequence[str]) -> bool:
        """Whether this code may be run; without a terminal to ask on, only `--trust` allows it."""
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
    callback=lambda context, option, given: CodeConsent(given),
)


def allow_local_imports(*named: Any) -> None:
    """Let the user's own modules be imported from the working folder, if any is named.

    The folder goes behind everything that is installed, so that no file in it can replace an installed module.
    """
    here = str(Path.cwd())
    if dotted_in(named) and here not in sys.path:
        sys.path.append(here)


def announce_page(text: str, address: str, host: str, browse: bool | None) -> None:
    """Print the address of a page, warn if it is visible to other machines, open it on a terminal or if asked to."""
    click.echo(f"{text} at {address}")
    if host not in ("127.0.0.1", "localhost", "::1"):
        click.echo("note: others on the network can reach it, and what they send is not encrypted", err=True)
    if browse or (browse is None and sys.stdout.isatty()):
        click.launch(address)


def print_result(content: Any, as_json: bool, *lines: str) -> None:
    """Print the content as JSON, or these lines of text."""
    text = json.dumps(content, indent=2) if as_json else "\n".join(lines)
    if text:
        click.echo(text)


def fail(text: str, code: int) -> NoReturn:
    """Print what is wrong on one line and end with this exit code."""
    click.echo(f"error: {text}", err=True)
    sys.exit(code)
