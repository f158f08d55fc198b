"""Notebooks as pages of the documentation: a MkDocs hook that shows them as they were last executed.

Each `notebooks/NAME.ipynb` becomes the page `notebooks/NAME.md`, with its pictures beside it. Nothing is executed here.
"""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files

HOME = Path(__file__).parent.parent / "notebooks"
DESCRIBED = re.compile(r"[^.!?]*[.!?]")  # the first sentence of a text


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages and pictures of all notebooks."""
    for path in sorted(HOME.glob("*.ipynb")):
        page = f"notebooks/{path.stem}.md"
        text, pictures = as_page(nbformat.read(path, as_version=4), path.stem)
        files.append(File.generated(config, page, content=text))
        files.append(File.generated(config, f"notebooks/{path.name}", content=path.read_bytes()))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link of a page of ours to a notebook leads to its page."""
    return re.sub(r"\]\(\.\./notebooks/([\w.-]+)\.ipynb\)", r"](notebooks/\1.md)", markdown)


def as_page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by the names that the text uses."""
    parts, pictures = list[str](), dict[str, bytes]()
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(relink(cell.source))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        below = notebook.cells[place + 1].source if place + 1 < len(notebook.cells) else ""
        for part, picture in show(cell.outputs):
            if picture:
                file = f"{name}/{len(pictures)}.png"
                pictures[file] = picture
                part = f"![{describe(below)}]({file})"
            parts.append(part)
    get = "Baixe este notebook" if name.endswith(".pt") else "Download this notebook"
    return "\n\n".join([*parts, f"[{get}]({name}.ipynb)"]), pictures


def show(outputs: list[Any]) -> Iterator[tuple[str, bytes]]:
    """What a cell shows: text for the page, or a picture."""
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            yield "", base64.b64decode(data["image/png"])
        elif "text/html" in data and "<iframe" not in data["text/html"]:
            yield f"<div class='output'>{' '.join(data['text/html'].split())}</div>", b""
        elif said := data.get("text/plain", "").rstrip():
            yield f"```text\n{said}\n```", b""


def describe(below: str) -> str:
    """What a picture shows, for who does not see it: the first sentence that follows it."""
    plain = re.sub(r"[*`\[\]#]|\([^)]*\)", "", below.partition("\n\n")[0])
    found = DESCRIBED.match(" ".join(plain.split()))
    return found[0].strip() if found else "What the code above draws"


def relink(text: str) -> str:
    """Links that lead from the notebook to a page or another notebook, as they lead from page to page."""
    text = re.sub(r"\]\(\.\./docs/", "](../", text)
    return re.sub(r"\]\(([\w.-]+)\.ipynb\)", r"](\1.md)", text)
