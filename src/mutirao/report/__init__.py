"""A run or a study on one self-contained page: readable offline, on a phone, on paper, in a mail."""

from pathlib import Path
from typing import Any

from mutirao.core.fleet import Fleet
from mutirao.experiments.task import Recipe
from mutirao.io import write_whole
from mutirao.report.run_plots import draw_run
from mutirao.report.run_report import run_page
from mutirao.report.study_report import study_page
from mutirao.runs.execute import Watch
from mutirao.runs.execute import execute as make_run
from mutirao.runs.reader import Record


def execute(
    recipe: Recipe | str,
    config: Any,
    out: Path | str,
    *,
    fleet: Fleet | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    pictures: bool = True,
) -> dict[str, Any]:
    """Make the rounds of a recipe, record each in `out` with pictures and a page at the end, and return the summary.

    `config` is the recipe's configuration, a table of settings, or None for its defaults; `fleet` is local by default.

    >>> summary = execute("quickstart", {"rounds": 2, "per_round": 5}, "runs/execute", pictures=False)
    >>> summary["rounds"], summary["final"]["accuracy"] > 0.2
    (2, True)
    """
    results: dict[str, Any] = {}
    if pictures:
        results = {"draw": draw_run, "report": write_report}
    return make_run(recipe, config, out, fleet=fleet, resume=resume, watch=watch, **results)


def write_report(folder: Path) -> Path:
    """Write `report.html` from what the folder of a run or study holds.

    >>> _ = execute("quickstart", {"rounds": 1, "per_round": 2}, "runs/report", pictures=False)
    >>> write_report(Path("runs/report")).name
    'report.html'
    """
    write_whole(folder / "report.html", render(folder), durable=False)
    return folder / "report.html"


def render(folder: Path) -> str:
    """The page of a run or study."""
    if (folder / "study.json").is_file() or (folder / "table.json").is_file():
        return study_page(folder).html()
    return run_page(Record.of(folder)).html()
