"""What there is to choose from: recipes, their settings, and the parts that fit any of them."""

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping

from mutirao.config import KINDS, Part, can_set, resolve
from mutirao.experiments.presets import expand, presets
from mutirao.experiments.task import NAMES, find

NAME = r"[^\W\d_a-z][\w'-]+(?: [^\W\d_a-z][\w'-]+)*"  # of an author, of one word or several
PAPER = re.compile(rf'({NAME}(?:(?:, (?!")| and | et al\.)[^."()]*?)?), (?:"[^"]*",? ?[^.\d]*)?((?:19|20)\d\d)')


def recipes() -> dict[str, str]:
    """Name and one line of each recipe."""
    return {name: about for name, (_, about) in NAMES.items()}


def everything() -> dict[str, dict[str, str]]:
    """All there is to choose from, by kind."""
    about = {name: str(table["about"]) for name, table in presets().items()}
    return {"recipes": recipes(), "presets": about} | parts()


def parts() -> dict[str, dict[str, str]]:
    """The parts of each kind with their settings and defaults."""
    out: dict[str, dict[str, str]] = {}
    for kind, module in KINDS.items():
        rows = {}
        for name, make in importlib.import_module(module).NAMES.items():
            options = [f"{k}={p.default}" for k, p in can_set(make).items() if p.default is not p.empty]
            text = inspect.getdoc(getattr(make, "func", make)) or ""
            about = " ".join(filter(None, [text.split("\n")[0], paper_in(text)]))
            rows[name] = about + (f"  [{', '.join(options)}]" if options else "")
        out[kind] = rows
    return out


def paper_in(text: str) -> str:
    """The paper that a part's words name last, in brackets; nothing if they name none.

    >>> paper_in("The mean. McMahan, Moore and Ramage, 2017.")
    '(McMahan et al., 2017)'
    """
    found = PAPER.findall(" ".join(text.split()))
    if not found:
        return ""
    authors, year = found[-1]
    first, *others = re.split(r", | and | et al", authors)
    more = "" if not others else " et al." if len(others) > 1 or "et al" in authors else f" and {others[0]}"
    return f"({first}{more}, {year})"


def settings_of(recipe: str) -> dict[str, str]:
    """Each setting of a recipe or preset with its default and a line of help."""
    rows = {}
    name, table = expand(recipe)
    found = find(name).config
    preset = resolve(found, table) if table else None
    for f in dataclasses.fields(found):
        default = getattr(preset, f.name) if f.name in table else f.default
        if isinstance(default, Part):
            own = ", ".join(f"{f.name}.{k}={v}" for k, v in default.settings.items())
            default = default.name + (f" ({own})" if own else "")
        choices = f.metadata.get("choices")
        rows[f.name] = f"{f.metadata['doc']}{' (' + ', '.join(choices) + ')' if choices else ''}  [{default}]"
    return rows


def in_columns(rows: Mapping[str, str], width: int) -> Iterator[str]:
    """Names and what is said of them, wrapped to a terminal's width; 0: each on one line, for other programs.

    >>> list(in_columns({"fedavg": "the mean by samples", "mean": "the plain mean"}, 22))
    ['  fedavg  the mean by', '          samples', '  mean    the plain', '          mean']
    """
    names = max(map(len, rows))
    for name, text in rows.items():
        first, rest = f"  {name:<{names}}  ", " " * (names + 4)
        room = max(width, names + 14) if width else len(first + text) + 1
        yield from textwrap.wrap(text, room, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
