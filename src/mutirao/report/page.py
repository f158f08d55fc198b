"""One self-contained page: styles, script and data inside, and a policy that lets it load and run nothing else."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mutirao.runs.reader import clean

ASSETS = Path(__file__).parent / "assets"
Spec = dict[str, Any]
MOST_FIGURES = 7  # in a row; more are dealt to rows that are equally full
escape = html.escape


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
    title, about = str(spec["title"]), str(spec["about"])
    return about if about.lower().startswith(title.lower()) else f"{title}: {about[:1].lower()}{about[1:]}"


def fill_rows(wide: Sequence[bool]) -> list[bool]:
    """Which of the charts, two a row, take a whole one: those that ask for it, and who would be alone in it."""
    out, alone = list(wide), False
    for place, whole in enumerate(wide):
        if whole and alone:
            out[place - 1] = True
        alone = not whole and not alone
    if alone:
        out[-1] = True
    return out


class Page:
    """A page that grows section by section; everything told to it as text is escaped."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []
        self.specs: list[Spec] = []

    def heading(self, text: str, badge: str = "", under: str = "") -> None:
        """The first line of the page."""
        mark = f" <span class='badge {escape(badge)}'>{escape(badge)}</span>" if badge else ""
        self.parts.append(f"<h1>{escape(text)}{mark}</h1>")
        if under:
            self.parts.append(f"<p class=soft>{escape(under)}</p>")

    def warn(self, text: str) -> None:
        """What must not be overlooked, if there is anything."""
        if text:
            self.parts.append(f"<p class=notice>{escape(text)}</p>")

    def section(self, text: str) -> None:
        """A heading."""
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def note(self, text: str) -> None:
        """A paragraph."""
        self.parts.append(f"<p>{escape(text)}</p>")

    def words(self, sentences: Iterable[str]) -> None:
        """Plain sentences, one below the other."""
        self.parts.append("<ul class=words>" + "".join(f"<li>{escape(s)}</li>" for s in sentences) + "</ul>")

    def figures(self, figures: Mapping[str, tuple[str, str]]) -> None:
        """Headline figures: name -> (value, remark)."""
        rows = -(-len(figures) // MOST_FIGURES) or 1
        items = [
            f"<li>{escape(k)}<b>{escape(v)}</b>{f'<small>{escape(r)}</small>' if r else ''}</li>"
            for k, (v, r) in figures.items()
        ]
        self.parts.append(f"<ul class=figures style='--row: {-(-len(figures) // rows)}'>" + "".join(items) + "</ul>")

    def charts(self, specs: Sequence[Spec]) -> None:
        """Charts side by side, each with its sentence in words; of one that shows a constant, the sentence alone."""
        drawn = [spec for spec in specs if not is_steady(spec)]
        if drawn:
            self.parts.append("<div class=charts>")
        for spec, wide in zip(drawn, fill_rows([bool(s.get("wide")) for s in drawn]), strict=True):
            name = "'chart wide'" if wide else "chart"
            self.parts.append(
                f"<figure class={name} data-chart={len(self.specs)}><figcaption>{escape(spec['title'])}</figcaption>"
                f"<p class=about>{escape(spec['about'])}</p></figure>"
            )
            self.specs.append(spec)
        if drawn:
            self.parts.append("</div>")
        if len(drawn) < len(specs):
            self.words(in_words(spec) for spec in specs if is_steady(spec))

    def picture(self, path: Path, about: str) -> None:
        """A PNG file inside the page."""
        content = base64.b64encode(path.read_bytes()).decode()
        self.parts.append(
            f"<figure><figcaption>{escape(about)}</figcaption>"
            f"<img alt='{escape(about)}' src='data:image/png;base64,{content}'></figure>"
        )

    def hidden_table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table below a title that opens it."""
        self.parts.append(f"<details><summary>{escape(title)}</summary>")
        self.table(title, head, rows)
        self.parts.append("</details>")

    def table(
        self, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()
    ) -> None:
        """A table; `numbers` are the columns set to the right."""
        right = set(numbers)

        def cells(row: Sequence[str], tag: str) -> str:
            style = [" class=number" if i in right else "" for i in range(len(row))]
            return "".join(f"<{tag}{s}>{escape(text)}</{tag}>" for s, text in zip(style, row, strict=True))

        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
        self.parts.append(
            f"<div class=scroll tabindex=0 role=region aria-label='{escape(caption)}'><table>"
            f"<caption class=hush>{escape(caption)}</caption>"
            f"<thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def links(self, caption: str, head: Sequence[str], rows: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> None:
        """A table of names, each with the pages it has: what they are called, and where they are."""
        body = "".join(
            f"<tr><td class=tight>{escape(name)}</td><td>"
            + ", ".join(f'<a href="{escape(where)}">{escape(text)}</a>' for text, where in pages)
            + "</td></tr>"
            for name, pages in rows
        )
        self.parts.append(
            f"<div class=scroll tabindex=0 role=region aria-label='{escape(caption)}'><table>"
            f"<caption class=hush>{escape(caption)}</caption>"
            f"<thead><tr>{''.join(f'<th>{escape(text)}</th>' for text in head)}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )

    def code(self, title: str, text: str) -> None:
        """Text as it stands, below a title that opens it."""
        self.parts.append(f"<details><summary>{escape(title)}</summary><pre tabindex=0>{escape(text)}</pre></details>")

    def html(self) -> str:
        """The whole page."""
        data = json.dumps(clean(self.specs), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        for sign in "<>&\u2028\u2029":  # no text in the data can end the script
            data = data.replace(sign, f"\\u{ord(sign):04x}")
        script = asset("charts.js") + asset("report.js")
        allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'"
        policy += "; base-uri 'none'; form-action 'none'"
        return "\n".join(
            [
                "<!doctype html><html lang=en><head><meta charset=utf-8>",
                f'<meta http-equiv=Content-Security-Policy content="{policy}">',
                "<meta name=viewport content='width=device-width, initial-scale=1'>",
                f"<title>{escape(self.title)}</title><style>{asset('style.css')}</style></head><body>",
                "<div class=top><button type=button id=theme>dark</button></div><main>",
                "<noscript><p>The charts need JavaScript; the text and tables do not.</p></noscript>",
                *self.parts,
                "<footer>Written by Mutirão. This page is complete: it loads nothing from anywhere.</footer></main>",
                f"<script type=application/json id=data>{data}</script>",
                f"<script>{script}</script></body></html>",
            ]
        )
