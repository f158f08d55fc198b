"""Notebooks run from top to bottom in an empty folder, show what is stored in them, and have their Portuguese twins."""

import ast
import json
import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
HOME = ROOT / "notebooks"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))
PAGES = runpy.run_path(str(ROOT / "scripts" / "notebook_pages.py"))
NOTEBOOKS = sorted(HOME.glob("*.ipynb"))
TOPICS = ("own-model", "fedrisk", "aoiu", "groups", "fedrecon", "cytology", "deployment")
TWINS = [path for path in NOTEBOOKS if path.name.endswith(".pt.ipynb")]


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_in(notebook: Any) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def pictures_in(notebook: Any) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def forms_of(notebook: Any) -> list[list[str]]:
    """What each cell shows, by its forms: pictures, tables, lines."""
    return [[min(output.get("data", {"lines": ""})) for output in cell.get("outputs", ())] for cell in notebook.cells]


def test_there_is_one_notebook_a_topic_and_five_of_them_in_portuguese() -> None:
    english = [path.stem for path in NOTEBOOKS if path not in TWINS]
    assert [name[:1] for name in english] == list("1234567")
    assert all(topic in name for topic, name in zip(TOPICS, english, strict=True))
    assert [path.name[:1] for path in TWINS] == list("23456")


@pytest.mark.slow
# The Portuguese ones have the same code, which a test below asserts, and are not executed again.
@pytest.mark.parametrize("path", sorted(set(NOTEBOOKS) - set(TWINS)), ids=lambda path: path.stem)
def test_the_notebook_runs_and_shows_what_is_stored_in_it(path: Path, tmp_path: Path) -> None:
    stored, notebook = read(path), read(path)
    SCRIPT["execute"](notebook, tmp_path)
    SCRIPT["tidy"](notebook)
    assert pictures_in(notebook) >= 2
    assert forms_of(notebook) == forms_of(stored)
    assert code_in(notebook) == code_in(stored)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_for_readers_and_tells_nothing_of_a_machine(path: Path) -> None:
    text, notebook = path.read_text(encoding="utf-8"), read(path)
    assert len(text) < 600_000
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    shown = re.sub(r'"image/png": "[^"]*"', "", shown)
    assert not re.findall(r"/(?:tmp|home|root|work|usr)/|Traceback|Warning", shown)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert notebook.cells[0].source.startswith("# ")
    assert "pip install" in notebook.cells[0].source
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", prose):
        assert (HOME / link).resolve().exists(), link


def skeleton(code: str) -> str:
    """Code without its comments and without the text that people read."""
    lines = "\n".join("pass" if line.startswith(("%", "!")) else line for line in code.splitlines())
    tree = ast.parse(lines)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        elif isinstance(node, ast.JoinedStr):
            node.values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
    return ast.dump(tree)


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.stem)
def test_the_notebook_in_portuguese_is_in_step_with_the_english_one(path: Path) -> None:
    ours, theirs = read(path), read(path.with_name(path.name.replace(".pt.", ".")))
    assert [cell.cell_type for cell in ours.cells] == [cell.cell_type for cell in theirs.cells]
    assert [skeleton(code) for code in code_in(ours)] == [skeleton(code) for code in code_in(theirs)]
    for one, two in zip(ours.cells, theirs.cells, strict=True):
        if one.cell_type == "markdown":
            assert re.findall(r"^#+ ", one.source, re.M) == re.findall(r"^#+ ", two.source, re.M)
            assert re.findall(r"^- ", one.source, re.M) == re.findall(r"^- ", two.source, re.M)
    assert f"]({path.name.replace('.pt.', '.')})" in ours.cells[0].source
    assert f"]({path.name})" in theirs.cells[0].source


def test_the_pages_of_the_site_show_each_notebook_with_its_pictures() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        notebook = read(path)
        text, pictures = PAGES["as_page"](notebook, path.stem)
        assert len(pictures) == pictures_in(notebook)
        assert all(f"]({name})" in text for name in pictures)
        assert all(code in text for code in code_in(notebook))
        assert "![What the code above draws]" not in text, path.name
        assert f"notebooks/{path.stem}.md" in nav


def test_links_and_descriptions_of_a_page() -> None:
    assert PAGES["relink"]("[a](../docs/ranking.md#x) [b](2-b.pt.ipynb)") == "[a](../ranking.md#x) [b](2-b.pt.md)"
    assert PAGES["describe"]("**Each** bar is a [client](x.md). More.\n\nElse.") == "Each bar is a client."
