"""The examples run as they are: a script, and a notebook that is executed as Jupyter would."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_script_runs_as_it_is(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "five_lines.py")]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Result(runs/python: accuracy 0." in done.stdout
    assert (tmp_path / "runs/python/report.html").exists()
    assert (tmp_path / "runs/compare-python/table.md").read_text().count("FedYogi") == 1


def shown_by(cell: Any) -> list[Any]:
    return [output["data"] for output in cell.outputs if "data" in output]


def test_the_notebook_runs_and_shows_what_it_should(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "hospitals.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # committed without
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    said = {output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"}
    assert said == {"labels are numbered in sorted order: benign is 0, malignant is 1\n"}
    progress, result = shown_by(cells[1])
    assert progress["text/plain"].startswith("round 20/20")  # one line, written over twenty times
    assert "<polyline" in result["text/html"]
    assert "image/png" in shown_by(cells[2])[0]
    assert "tensor" in shown_by(cells[4])[0]["text/plain"]
    progress, table = shown_by(cells[5])
    assert progress["text/plain"].startswith("cell 6/6")
    assert "FedProx" in table["text/html"]
    assert "<iframe" in shown_by(cells[6])[0]["text/html"]
    assert "FedProx" in cells[6].outputs[0].text
