"""The README of research/ names every script, and every page that it links to names the script."""

import re
from pathlib import Path

HOME = Path(__file__).parents[2] / "research"
README = (HOME / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \|.*\]\((\.\./docs/[\w/-]+\.md)\) \| `python -m research\.(\w+)", re.MULTILINE)


def test_every_module_is_in_the_readme() -> None:
    modules = {path.stem for path in HOME.glob("*.py")} - {"__init__"}
    assert modules == set(re.findall(r"`(\w+)`", README)) & modules
    runnable = {name for name in modules if "__main__" in (HOME / f"{name}.py").read_text(encoding="utf-8")}
    assert {name for name, _, _ in ROW.findall(README)} == runnable


def test_every_page_says_which_script_made_it() -> None:
    for name, page, command in ROW.findall(README):
        assert command == name
        assert re.search(rf"\bresearch[./]{name}\b", (HOME / page).read_text(encoding="utf-8")), f"{page}: {name}"
