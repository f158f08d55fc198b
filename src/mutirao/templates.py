"""HTML from Jinja templates that ship with the package; every value put into them is escaped."""

import base64
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> "Environment":
    """The Jinja environment; templates are named by their path in the package, such as `report/assets/page.html`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # imported late: it takes 30 ms

    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["thousands"] = "{:,}".format
    found.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    return found


def render(template: str, **values: Any) -> str:
    """A page made from a template."""
    return environment().get_template(template).render(values)


def macros(template: str) -> Any:
    """The macros of a template, as functions that give HTML.

    >>> str(macros("report/assets/blocks.html").section("a < b"))
    '<h2>a &lt; b</h2>'
    """
    return environment().get_template(template).module


def data_uri(content: bytes, kind: str) -> str:
    """A file as a data URI.

    >>> data_uri(b"abc", "image/png")
    'data:image/png;base64,YWJj'
    """
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
