"""Every setting is on the guide page where a user would look for it, not only in the generated reference."""

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutirao.cli.listing import recipes
from mutirao.config import KINDS, Part, can_set
from mutirao.experiments.task import find

DOCS = Path(__file__).parent.parent / "docs"
GUIDES = sorted(page for page in DOCS.glob("*.md") if not page.name.endswith(".pt.md"))
FENCE = re.compile(r"```.*?```", re.DOTALL)
OWN_BLOCK = re.compile(r"\s*(\||- |\d+\. )")  # rows and items each say something of their own


def code_of(page: str) -> Iterator[str]:
    """The code of each paragraph, item and row of a page, and each line of its listings."""
    for fence in FENCE.findall(page):
        yield from fence.splitlines()
    for paragraph in re.split(r"\n\s*\n", FENCE.sub("\n\n", page)):
        block: list[str] = []
        for line in paragraph.splitlines():
            if OWN_BLOCK.match(line) and block:
                yield joined_code(block)
                block = []
            block.append(line)
        yield joined_code(block)


def joined_code(block: list[str]) -> str:
    return " ; ".join(re.findall(r"`([^`]+)`", "\n".join(block)))


def is_word(word: str, code: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(word)}(?!\w)", code) is not None


def names_field(key: str, code: str) -> bool:
    """`key`, `key=value`, `key = value`, or a setting below it, `key.own`."""
    name = re.escape(key)
    return re.search(rf"(?:^|; ){name}(?= ;|$)|(?<![\w./-]){name}(?=\s*=|\.\w)", code) is not None


def names_part_setting(kind: str, part: str, key: str, code: str) -> bool:
    """`kind.key`, or the key beside the name of the part."""
    dotted = re.search(rf"(?<!\w){kind}\.{re.escape(key)}(?!\w)", code) is not None
    return dotted or (is_word(part, code) and is_word(key, code))


def fields() -> list[str]:
    """The settings of all recipes, those that name parts included."""
    return sorted({field.name for recipe in recipes() for field in dataclasses.fields(find(recipe).config)})


def part_settings() -> list[tuple[str, str, str]]:
    """The settings of parts: of each kind, part and setting one."""
    homes = set(KINDS.items())
    for recipe in recipes():
        for field in dataclasses.fields(find(recipe).config):
            if isinstance(field.default, Part) and field.default.home:
                homes.add((field.name, field.default.home))
    found = set()
    for kind, home in homes:
        for part, make in importlib.import_module(home).NAMES.items():
            found |= {(kind, part, key) for key in can_set(make)}
    return sorted(found)


def not_in(pages: list[str]) -> list[str]:
    """The settings that no page names."""
    code = {block for page in pages for block in code_of(page)}
    lost = [key for key in fields() if not any(key in block and names_field(key, block) for block in code)]
    for kind, part, key in part_settings():
        if not any(key in block and names_part_setting(kind, part, key, block) for block in code):
            lost.append(f"{kind}.{key} of {part}")
    return lost


def test_every_setting_is_named_by_a_guide() -> None:
    pages = [page.read_text(encoding="utf-8") for page in GUIDES]
    assert not not_in(pages), "name it in docs/, or make it a constant: docs/decisions/settings.md"


@pytest.mark.parametrize(
    ("page", "word", "lost"),
    [
        ("selection.md", "`penalty`", "select.penalty of oort"),
        ("backbones.md", "`cache=false`", "cache"),
        ("aggregation.md", "`beta2`", "aggregate.beta2 of fedyogi"),
    ],
)
def test_a_setting_that_a_guide_no_longer_names_is_noticed(page: str, word: str, lost: str) -> None:
    pages = {guide.name: guide.read_text(encoding="utf-8") for guide in GUIDES}
    assert word in pages[page]
    pages[page] = pages[page].replace(word, "it").replace(f"select.{word.strip('`')}=1", "it")
    assert lost in not_in(list(pages.values()))


def test_a_row_names_the_settings_of_its_own_part_alone() -> None:
    rows = list(code_of("| `oort` | `cut` 0.95 |\n| `fedcor` | `decay` 0.8 |\n\nSee `select.candidates`.\n"))
    assert [names_part_setting("select", "oort", "cut", row) for row in rows] == [True, False, False]
    assert not any(names_part_setting("select", "fedcor", "cut", row) for row in rows)
    assert names_part_setting("select", "divfl", "candidates", rows[-1])
