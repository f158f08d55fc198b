"""What there is to choose from: recipes, their settings, and the parts that fit any of them."""

import dataclasses
import importlib
import inspect
import re

from mutirao.config import KINDS, Part, parameters
from mutirao.recipes.task import NAMES, find

NAME = r"[^\W\d_a-z][\w'-]+(?: [^\W\d_a-z][\w'-]+)*"  # of an author, of one word or several
PAPER = re.compile(rf'({NAME}(?:(?:, (?!")| and | et al\.)[^."()]*?)?), (?:"[^"]*",? ?[^.\d]*)?((?:19|20)\d\d)')


def recipes() -> dict[str, str]:
    """Name and one line of each recipe."""
    return {name: about for name, (_, about) in NAMES.items()}


def parts() -> dict[str, dict[str, str]]:
    """The parts of each kind with their settings and defaults."""
    out: dict[str, dict[str, str]] = {}
    for kind, module in KINDS.items():
        rows = {}
        for name, make in importlib.import_module(module).NAMES.items():
            options = [f"{k}={p.default}" for k, p in parameters(make).items() if p.default is not p.empty]
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
    """Each setting of a recipe with its default and a line of help."""
    rows = {}
    for f in dataclasses.fields(find(recipe).config):
        default = f.default
        if isinstance(default, Part):
            own = ", ".join(f"{f.name}.{k}={v}" for k, v in default.settings.items())
            default = default.name + (f" ({own})" if own else "")
        choices = f.metadata.get("choices")
        rows[f.name] = f"{f.metadata['doc']}{' (' + ', '.join(choices) + ')' if choices else ''}  [{default}]"
    return rows
