"""Every template can be read, escapes what is put into it, and misses nothing silently."""

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import mutirao
from mutirao.templates import environment, macros, render

HOME = Path(mutirao.__file__).parent
TEMPLATES = sorted(path.relative_to(HOME).as_posix() for path in HOME.rglob("*.html"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_our_own_style_and_script_go_in_as_they_are(name: str) -> None:
    environment().get_template(name)
    unescaped = re.findall(r"(\w+) *\| *safe", (HOME / name).read_text(encoding="utf-8"))
    assert unescaped == (["style", "script"] if name == "report/assets/page.html" else [])


def test_text_is_escaped_in_elements_and_in_attributes() -> None:
    table = str(macros("report/assets/blocks.html").table("it's", ["<b>"], [["a & b"]]))
    assert "aria-label='it&#39;s'" in table
    assert "<th>&lt;b&gt;</th>" in table
    assert "<td>a &amp; b</td>" in table


def test_a_value_that_is_not_given_is_an_error() -> None:
    assert '<p class="notice">not &lt;for&gt; diagnosis</p>' in render(
        "dashboard/assets/label.html", notice="not <for> diagnosis"
    )
    with pytest.raises(UndefinedError, match="notice"):
        render("dashboard/assets/label.html")
