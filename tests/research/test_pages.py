"""Tables of a page are made anew between their marks."""

from pathlib import Path

import pytest
from research.pages import fill_page

from mutirao.errors import ConfigError


def test_only_what_stands_between_the_marks_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- one -->\n\nold\n\n<!-- end -->\n\ntext\n\n<!-- two -->\n<!-- end -->\nlast\n")
    fill_page(page, {"two": "b\n", "one": "a\n"})
    text = "# A\n\n<!-- one -->\n\na\n\n<!-- end -->\n\ntext\n\n<!-- two -->\n\nb\n\n<!-- end -->\nlast\n"
    assert page.read_text() == text
    fill_page(page, {"two": "b\n", "one": "a\n"})
    assert page.read_text() == text
    for name in ("three", "text"):
        with pytest.raises(ConfigError, match=f"no place for '{name}'"):
            fill_page(page, {name: "c\n"})
    assert page.read_text() == text
