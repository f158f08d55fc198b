"""Execute notebooks and keep what they show: `python scripts/notebooks.py [NAME ...]`; all of them without a name.

Each runs in an empty folder, as Jupyter would run it from top to bottom. What is kept is what a reader sees: pictures,
tables and printed lines, but no progress, no warnings and nothing about this machine. It prints how long each took.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HOME = Path(__file__).parent.parent / "notebooks"
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
SHOWN = ("image/png", "text/html", "text/plain")  # the richest that an output has is kept


def main() -> None:
    """Execute those that are named."""
    names = sys.argv[1:] or sorted(path.name for path in HOME.glob("*.ipynb"))
    for name in names:
        path = HOME / f"{Path(name).name.removesuffix('.ipynb')}.ipynb"
        began = time.monotonic()
        notebook = execute(nbformat.read(path, as_version=4))
        tidy(notebook)
        nbformat.write(notebook, path)
        print(f"{path.stem}: {time.monotonic() - began:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


def execute(notebook: Any, folder: Path | None = None) -> Any:
    """The notebook after a run from top to bottom in a folder, or in an empty one that is then removed."""
    with tempfile.TemporaryDirectory() as empty:
        place = {"metadata": {"path": str(folder or empty)}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    return notebook


def tidy(notebook: Any) -> None:
    """Leave what a reader sees, and nothing that changes from run to run without need."""
    notebook.metadata = nbformat.from_dict(KERNEL)
    for i, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, f"cell-{i}"
        if cell.cell_type == "code":
            cell.outputs = join([tidied(output) for output in cell.outputs if is_shown(output)])


def is_shown(output: Any) -> bool:
    """Whether an output is for the reader: not what goes to standard error, nor a line of progress."""
    if output.output_type == "stream":
        return bool(output.name == "stdout")
    return bool(output.output_type != "display_data" or [*output.data] != ["text/plain"])


def tidied(output: Any) -> Any:
    """An output with the richest of its forms alone."""
    if "data" in output:
        best = next((form for form in SHOWN if form in output.data), None)
        output.data = {form: text for form, text in output.data.items() if form in (best, "text/plain")}
        output.metadata = {}
    return output


def join(outputs: list[Any]) -> list[Any]:
    """Printed lines that follow each other as one output: where the kernel cut them hangs on time."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    main()
