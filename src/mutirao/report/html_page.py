"""One self-contained page: styles, script and data inside, and a policy that lets it load and run nothing else."""

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mutirao.runs.reader import clean
from mutirao.templates import data_uri, macros, render

ASSETS = Path(__file__).parent / "assets"
Spec = dict[str, Any]
# More figures than this go into several rows, which are filled equally.
MOST_FIGURES = 7


@cache
def asset(name: str) -> str:
    """A file that ships with the package."""
    return (ASSETS / name).read_text(encoding="utf-8")


def is_steady(spec: Spec) -> bool:
    """Whether a chart would show nothing that moves: flat lines, a single round or bar, a map of one colour."""
    if spec.get("steady"):
        return True
    if spec["kind"] == "heat":
        return len({value for row in spec["values"] for value in row}) < 2
    if spec["kind"] == "bars":
        values = [value for series in spec["series"] for value in series["values"]]
        one = len(spec["series"]) == 1 and (len({*values}) < 2 or sum(value != 0 for value in values) < 2)
        return one or len(spec["categories"]) < 2
    if spec["kind"] == "lines":
        return all(len({*values}) < 2 for s in spec["series"] for values in (s["y"], s.get("lo", ()), s.get("hi", ())))
    return False


def in_words(spec: Spec) -> str:
    """What a chart would show, in a sentence."""
    title = str(spec["title"])
    about = str(spec["about"])
    if about.lower().startswith(title.lower()):
        return about
    return f"{title}: {about[:1].lower()}{about[1:]}"


def fill_rows(wide: Sequence[bool]) -> list[bool]:
    """Which of the charts, two a row, take a whole one: those that ask for it, and who would be alone in it."""
    out = list(wide)
    alone = False
    for place, whole in enumerate(wide):
        if whole and alone:
            out[place - 1] = True
        alone = not whole and not alone
    if alone:
        out[-1] = True
    return out


class Page:
    """A page that grows section by section; all text that it is given is escaped."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []
        self.specs: list[Spec] = []
        self.blocks = macros("report/assets/blocks.html")

    def heading(self, text: str, badge: str = "", under: str = "") -> None:
        """The first line of the page."""
        self.parts.append(self.blocks.heading(text, badge, under))

    def warn(self, text: str) -> None:
        """What must not be overlooked, if there is anything."""
        if text:
            self.parts.append(self.blocks.note(text, "notice"))

    def section(self, text: str) -> None:
        """A heading."""
        self.parts.append(self.blocks.section(text))

    def note(self, text: str) -> None:
        """A paragraph."""
        self.parts.append(self.blocks.note(text))

    def words(self, sentences: Iterable[str]) -> None:
        """Plain sentences, one below the other."""
        self.parts.append(self.blocks.words(sentences))

    def figures(self, figures: Mapping[str, tuple[str, str]]) -> None:
        """Headline figures: name -> (value, remark)."""
        rows = math.ceil(len(figures) / MOST_FIGURES) or 1
        self.parts.append(self.blocks.figures(figures, math.ceil(len(figures) / rows)))

    def charts(self, specs: Sequence[Spec]) -> None:
        """Charts side by side, each with its sentence in words; of one that shows a constant, the sentence alone."""
        drawn = [spec for spec in specs if not is_steady(spec)]
        if drawn:
            wide = fill_rows([bool(spec.get("wide")) for spec in drawn])
            self.parts.append(self.blocks.charts(drawn, wide, len(self.specs)))
            self.specs += drawn
        if len(drawn) < len(specs):
            self.words(in_words(spec) for spec in specs if is_steady(spec))

    def pictures(self, paths: Iterable[Path]) -> None:
        """PNG files side by side inside the page, named by what they show."""
        images = {path.stem.replace("_", " ").capitalize(): data_uri(path.read_bytes(), "image/png") for path in paths}
        self.parts.append(self.blocks.pictures(images))

    def hidden_table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table below a title that opens it."""
        self.parts.append(self.blocks.hidden_table(title, head, rows))

    def table(
        self, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()
    ) -> None:
        """A table; `numbers` are the columns set to the right."""
        self.parts.append(self.blocks.table(caption, head, rows, set(numbers)))

    def links(self, caption: str, head: Sequence[str], rows: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> None:
        """A table of names, each with the pages it has: what they are called, and where they are."""
        self.parts.append(self.blocks.links(caption, head, rows))

    def code(self, title: str, text: str) -> None:
        """Text as it stands, below a title that opens it."""
        self.parts.append(self.blocks.code(title, text))

    def html(self) -> str:
        """The whole page."""
        script = asset("charts.js") + asset("report.js")
        # The page's policy allows this one script by its hash, so a script smuggled into a name never runs.
        allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return render(
            "report/assets/page.html",
            title=self.title,
            allowed=allowed,
            style=asset("style.css"),
            parts=self.parts,
            specs=clean(self.specs),
            script=script,
        )
