"""Docstrings as the API reference shows them: examples as code, formulas to the letter.

Ours are plain text in which `code` stands in backticks, formulas stand as they are and examples begin with `>>>`;
Markdown would take an asterisk in a formula for emphasis, a product such as <h, y> for HTML, and an example for a
quotation. A Griffe extension, named in `mkdocs.yml`.
"""

import re
from typing import Any

import griffe

CODE = re.compile(r"(`[^`]*`)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring that is shown, once it is read."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring as Markdown: paragraphs that begin with `>>>` are code, the others are shown as they are written.

    >>> as_markdown("a * b < c").replace("&lt;", "&")
    'a \\\\* b & c'
    >>> as_markdown(">>> 1 + 1").split()
    ['```pycon', '>>>', '1', '+', '1', '```']
    """
    paragraphs = re.split(r"\n[ \t]*\n", text.strip("\n"))
    return "\n\n".join(f"```pycon\n{p}\n```" if p.startswith(">>>") else plain(p) for p in paragraphs)


def plain(paragraph: str) -> str:
    """A paragraph whose asterisks and brackets mean themselves; what is indented is code already."""
    if all(line.startswith("    ") for line in paragraph.splitlines()):
        return paragraph
    parts = CODE.split(paragraph)
    parts[::2] = [part.replace("<", "&lt;").replace("*", r"\*").replace("__", r"\_\_") for part in parts[::2]]
    return "".join(parts)
