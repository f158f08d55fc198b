"""Fill docs/reproductions/aoiu.md from the folder of the study: `python studies/aoiu_page.py runs/study-aoiu`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mutirao.drawing.participation import draw_best, draw_shares
from mutirao.runs.participation import participation_in
from mutirao.runs.reader import Record
from mutirao.studies import participation
from mutirao.studies.pages import fill_page
from mutirao.studies.participation import count_rounds, dominance, mean_best, values
from mutirao.studies.policies import last_known, markdown

ROOT = Path(__file__).parent.parent
PAGE, IMAGES = ROOT / "docs/reproductions/aoiu.md", ROOT / "docs/images"
METHODS = ("random", "entropy", "mixed", "aoi", "powerofchoice", "oort")
# What the paper reports: rounds to 60% and 65%; Gini, least and most participations (means of two runs).
ROUNDS = {"random": (39, 95), "entropy": (42, 88), "mixed": (43, 85), "aoi": (41, 73)}
FAIRNESS = {
    "random": ("0.1561", "2.5", "18.5"),
    "entropy": ("0.2339", "4", "25.5"),
    "mixed": ("0.0874", "7", "15.5"),
    "aoi": ("0", "10", "10"),
}

FIGURES = {
    "figure 1": """\
![Best accuracy so far by round](../images/aoiu-curves.png)

*Best test accuracy so far, mean over the seeds; the band spans them.*
""",
    "figure 2": """\
![How often clients were selected](../images/aoiu-fairness.png)

*Left: how many clients (width) were selected how often (height), all seeds together. Right: Lorenz curves.*
""",
}


def finished(folder: Path) -> dict[str, list[Record]]:
    """The finished runs by method, in the order of the study."""
    runs = {m: [run for run in found if run.summary] for m, found in participation.runs_of(folder).items()}
    return {m: runs[m] for m in METHODS if runs.get(m)}


def table_2(methods: Mapping[str, Sequence[Record]]) -> str:
    """Rounds to 60% and 65%, accuracy over the last ten rounds and at best, and who leads how often."""
    leads = dominance(methods, "accuracy")
    rows = [
        (
            "policy",
            "to 60%: published",
            "ours",
            "to 65%: published",
            "ours",
            "last ten rounds",
            "best",
            "worst decile",
            "leads",
        )
    ]
    for name, runs in methods.items():
        published = ROUNDS.get(name, ("", ""))
        ours = [", ".join(str(r or "> 100") for r in count_rounds(runs, "accuracy", t).rounds) for t in (0.6, 0.65)]
        ends = [np.mean(values(run, "accuracy")[-10:]) for run in runs]
        worst = [last_known(values(run, "accuracy_worst_decile")) for run in runs]
        each = (f"{np.mean(ends):.4f}", f"{mean_best(runs, 'accuracy')[-1]:.4f}", f"{np.mean(worst):.4f}")
        rows.append((name, str(published[0]), ours[0], str(published[1]), ours[1], *each, f"{leads[name]:.0%}"))
    return markdown(rows)


def table_3(methods: Mapping[str, Sequence[Record]]) -> str:
    """Gini, least and most participations, and Jain's index."""
    rows = [("policy", "Gini: published", "ours", "least: published", "ours", "most: published", "ours", "Jain")]
    for name, runs in methods.items():
        published = FAIRNESS.get(name, ("", "", ""))
        found = [participation_in(run).figures for run in runs]
        means = {k: np.mean([figures[k] for figures in found]) for k in ("gini", "least", "most", "jain")}
        ours = (f"{means['gini']:.4f}", f"{means['least']:g}", f"{means['most']:g}")
        pairs = [cell for pair in zip(published, ours, strict=True) for cell in pair]
        rows.append((name, *pairs, f"{means['jain']:.4f}"))
    return markdown(rows)


def runs_of(methods: Mapping[str, Sequence[Record]]) -> str:
    """Which runs the tables are made of."""
    text = ", ".join(f"{name} {len(runs)}" for name, runs in methods.items())
    return f"Runs of 100 rounds behind these tables, a seed each: {text}.\n"


def main(folder: Path) -> None:
    """Write tables and pictures."""
    methods = finished(folder)
    draw_best(methods, "accuracy", (0.6, 0.65), IMAGES / "aoiu-curves.png")
    draw_shares(methods, IMAGES / "aoiu-fairness.png")
    made = {"runs": runs_of(methods), "table 2": table_2(methods), "table 3": table_3(methods), **FIGURES}
    fill_page(PAGE, made)
    print(f"written: {PAGE} and two pictures in {IMAGES}; {runs_of(methods)}", end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
