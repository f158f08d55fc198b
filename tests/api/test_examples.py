"""The script among the examples runs as it is, and in a notebook a run shows itself."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_notebook_shows_one_line_of_progress_the_result_and_the_table(tmp_path: Path) -> None:
    begin = "import torch\nfrom sklearn.datasets import load_digits\nimport mutirao as mu\n"
    given = "torch.nn.Linear(64, 10), load_digits(return_X_y=True), clients=5"
    methods = "methods={'FedAvg': {}, 'FedProx': {'aggregate': 'fedprox', 'mu': 0.1}}, seeds=3, rounds=2"
    code = [f"{begin}mu.run({given}, rounds=20)", f"table = mu.compare({given}, {methods})\ntable", "table.report"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in code])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [o for cell in notebook.cells for o in cell.outputs if o.output_type == "error"] == []
    progress, result = shown_by(notebook.cells[0])
    assert progress["text/plain"].startswith("round 20/20")  # one line, written over twenty times
    assert "<polyline" in result["text/html"]
    progress, table = shown_by(notebook.cells[1])
    assert progress["text/plain"].startswith("cell 6/6")
    assert "FedProx" in table["text/html"]
    assert "<iframe" in shown_by(notebook.cells[2])[0]["text/html"]
