"""What `mutirao list` shows: recipes, their settings, and the methods that fit any of them."""

import dataclasses
import importlib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mutirao.config import KINDS, Part, can_set, resolve
from mutirao.experiments.presets import expand, presets
from mutirao.experiments.task import NAMES, find

NAME = r"[^\W\d_a-z][\w'-]+(?: [^\W\d_a-z][\w'-]+)*"  # an author's name, of one word or several
PAPER = re.compile(rf'({NAME}(?:(?:, (?!")| and | et al\.)[^."()]*?)?), (?:"[^"]*",? ?[^.\d]*)?((?:19|20)\d\d)')


def recipes() -> dict[str, str]:
    """Name and one line of each recipe."""
    return {name: about for name, (_, about) in NAMES.items()}


def everything() -> dict[str, dict[str, str]]:
    """Recipes, presets and parts by kind, each with one line of description."""
    about = {name: str(table["about"]) for name, table in presets().items()}
    return {"recipes": recipes(), "presets": about} | parts()


def parts() -> dict[str, dict[str, str]]:
    """The parts of each kind with their settings and defaults."""
    out: dict[str, dict[str, str]] = {}
    for kind, module in KINDS.items():
        rows = {}
        for name, make in importlib.import_module(module).NAMES.items():
            rows[name] = describe_part(make)
        out[kind] = rows
    return out


def describe_part(make: Callable[..., Any]) -> str:
    """A part's first sentence, its paper, and its settings with their defaults."""
    # The docstring of a partial is that of the class `functools.partial`; its function has the one of the part.
    doc = inspect.getdoc(getattr(make, "func", make)) or ""
    text = " ".join(filter(None, [doc.split("\n")[0], paper_in(doc)]))
    options = [f"{key}={p.default}" for key, p in can_set(make).items() if p.default is not p.empty]
    if options:
        text += f"  [{', '.join(options)}]"
    return text


def paper_in(text: str) -> str:
    """The last paper that a docstring names, in brackets; empty if it names none.

    >>> paper_in("The mean. McMahan, Moore and Ramage, 2017.")
    '(McMahan et al., 2017)'
    """
    found = PAPER.findall(" ".join(text.split()))
    if not found:
        return ""
    authors, year = found[-1]
    first, *others = re.split(r", | and | et al", authors)
    if not others:
        more = ""
    elif len(others) > 1 or "et al" in authors:
        more = " et al."
    else:
        more = f" and {others[0]}"
    return f"({first}{more}, {year})"


def list_settings(recipe: str) -> dict[str, str]:
    """Each setting of a recipe or preset with its default and a line of help."""
    rows = {}
    name, table = expand(recipe)
    config_class = find(name).config
    preset = resolve(config_class, table) if table else None
    for setting in dataclasses.fields(config_class):
        default = getattr(preset, setting.name) if setting.name in table else setting.default
        if isinstance(default, Part):
            options = ", ".join(f"{setting.name}.{key}={value}" for key, value in default.settings.items())
            default = f"{default.name} ({options})" if options else default.name
        text = setting.metadata["doc"]
        choices = setting.metadata.get("choices")
        if choices:
            text += f" ({', '.join(choices)})"
        rows[setting.name] = f"{text}  [{default}]"
    return rows


def terminal_width() -> int:
    """Columns of the terminal; 0 if the output goes elsewhere."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return 0


def in_columns(rows: Mapping[str, str], width: int) -> Iterator[str]:
    """Names with their texts, wrapped to the width of a terminal. With width 0 each is on one line, for other programs.

    >>> list(in_columns({"fedavg": "the mean by samples", "mean": "the plain mean"}, 22))
    ['  fedavg  the mean by', '          samples', '  mean    the plain', '          mean']
    """
    names = max(map(len, rows))
    for name, text in rows.items():
        first = f"  {name:<{names}}  "
        rest = " " * (names + 4)
        room = max(width, names + 14) if width else len(first + text) + 1
        yield from textwrap.wrap(text, room, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
