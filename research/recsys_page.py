"""Fill docs/reproductions/recsys.md from a folder of studies: `python -m research.recsys_page runs`.

The studies are looked for by name: parts, paper, transfer, transfer-plain, users, shares, consent-1m and consent-100k,
each as `mutirao study studies/recsys-NAME.toml --out runs/NAME` leaves it. What is not there is left as it is.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mutirao.report.plots import draw_bands
from mutirao.runs.csv_tables import CsvTable, typed_row
from mutirao.stats import interval
from mutirao.studies.comparison import markdown_table as markdown
from research.pages import fill_page

ROOT = Path(__file__).parent.parent
PAGE, IMAGES = ROOT / "docs/reproductions/recsys.md", ROOT / "docs/images"
USERS = (50, 40, 30, 20, 10)

Curve = dict[int, float]  # RMSE by round
Methods = Mapping[str, Sequence[Curve]]  # a curve a seed


def curves(folder: Path) -> Methods:
    """The RMSE of the finished runs of a study by method."""
    found: dict[str, list[Curve]] = {}
    for name in json.loads((folder / "study.json").read_text(encoding="utf-8"))["cells"]:
        run = folder / "cells" / name
        if (run / "summary.json").exists():
            rows = [typed_row(row) for row in CsvTable(run / "history.csv").read()]
            curve = {int(row["round"]): float(row["rmse"]) for row in rows if row.get("rmse") not in (None, "")}
            found.setdefault(name.split("/")[0], []).append(curve)
    return found


def rounds_to(runs: Sequence[Curve], target: float) -> str:
    """The median of the first rounds with this RMSE, and the least and most; runs that never have it count as later."""
    last = max(max(run) for run in runs)
    first = sorted(min((r for r, v in run.items() if v <= target), default=last + 1) for run in runs)
    middle = first[len(first) // 2]
    said = [str(r) if r <= last else f"> {last}" for r in (middle, first[0], first[-1])]
    return said[0] if first[0] == first[-1] else f"{said[0]} ({said[1]} to {said[2]})"


def at(runs: Sequence[Curve], round: int) -> str:
    """The mean RMSE after a round with half of its 95% interval."""
    found = interval([run[round] for run in runs])
    return f"{found.mean:.4f} ± {found.half:.4f}" if np.isfinite(found.half) else f"{found.mean:.4f}"


def lines(methods: Methods, what: str, target: float, rounds: Sequence[int]) -> str:
    """A line a method: rounds to the target, and the RMSE after some rounds."""
    head = (what, f"rounds to {target:g}", *(f"RMSE after {r}" for r in rounds))
    return markdown(
        [head, *((m, rounds_to(runs, target), *(at(runs, r) for r in rounds)) for m, runs in methods.items())]
    )


def users(methods: Methods) -> str:
    """Rounds to 0.907 by users a round."""
    sources = tuple(dict.fromkeys(name.rpartition("-")[0] for name in methods))
    rows = [(str(many), *(rounds_to(methods[f"{s}-{many}"], 0.907) for s in sources)) for many in USERS]
    return markdown([("users a round", *sources), *rows])


TABLES: dict[str, Callable[[Methods], str]] = {
    "parts": partial(lines, what="method", target=0.907, rounds=(100, 300)),
    "paper": partial(lines, what="vectors", target=0.907, rounds=(30, 100, 500)),
    "transfer": partial(lines, what="vectors from", target=0.907, rounds=(1, 10, 120)),
    "transfer-plain": partial(lines, what="vectors from", target=0.907, rounds=(4, 40)),
    "users": users,
    "shares": partial(lines, what="share of the items", target=0.907, rounds=(2, 10, 80)),
    "consent-1m": partial(lines, what="vectors", target=0.94, rounds=(1, 10, 40, 120)),
    "consent-100k": partial(lines, what="vectors", target=0.94, rounds=(1, 10, 40, 120)),
}
SOURCES = ("netflix", "synthetic", "ml-100k", "consent5", "consent20")
PICTURES: dict[str, Sequence[str]] = {  # and the methods they show; none named: all
    "transfer": ("none", *(f"{source}-word2vec" for source in SOURCES)),
    "consent-100k": (),
}


def main(folder: Path) -> None:
    """Write the tables and pictures of the studies that are there."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        if not (folder / name / "study.json").exists() or f"<!-- {name} -->" not in text:
            continue
        methods = curves(folder / name)
        fill_page(PAGE, {name: table(methods)})
        if name in PICTURES:
            shown = {m: [sorted(run.items()) for run in methods[m]] for m in PICTURES[name] or methods}
            draw_bands(shown, "RMSE on unseen users", IMAGES / f"recsys-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
