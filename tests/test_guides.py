"""The commands of the five guides, of deploying and of the law exist, with the options and settings they show."""

import re
import shlex
from pathlib import Path

import click
import pytest

from mutirao.cli import main
from mutirao.config import parse_assignment, resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import NAMES, find

DOCS = Path(__file__).parent.parent / "docs"
GUIDES = ("ranking", "selection", "groups", "recsys", "cytology", "deploy", "law")


def commands(page: str) -> list[str]:
    return re.findall(r"^\$ (mutirao .*)$", page.replace("\\\n", ""), re.MULTILINE)


def parse(line: str) -> None:
    """Read a command as the shell and we would, without running it or looking for its files."""
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name!r}: {line}"
        command = found
    known = {name for part in command.params for name in (*part.opts, *part.secondary_opts)}
    for word in words:
        if word.startswith("-") and not word.lstrip("-").isdigit():
            assert word in known, f"there is no option {word!r}: {line}"
    sets = [parse_assignment(words[n + 1]) for n, word in enumerate(words) if word == "--set"]
    named = [word for word in words if word in NAMES]
    if sets and named:
        resolve(find(named[0]).config, {}, sets)


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_the_guide_are_commands_of_ours(guide: str) -> None:
    shown = commands((DOCS / f"{guide}.md").read_text(encoding="utf-8"))
    assert shown
    for line in shown:
        parse(line)


@pytest.mark.parametrize(
    "line",
    [
        "mutirao rnu ranking",
        "mutirao run ranking --sett lr=1",
        "mutirao run ranking --set lrr=1",
        "mutirao slides till a",
    ],
)
def test_a_command_that_is_none_is_found(line: str) -> None:
    with pytest.raises((AssertionError, ConfigError)):
        parse(line)
