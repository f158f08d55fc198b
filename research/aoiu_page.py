"""Fill docs/reproductions/aoiu.md from the folder of the study: `python -m research.aoiu_page runs/study-aoiu`.

Runs of another size or on other data have tables of their own: `--into NAME` writes between the marks of that name, and
`--target` says to which accuracies rounds are counted there.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mutirao.report.run_plots import draw_best, draw_shares
from mutirao.runs.participation import participation_in
from mutirao.runs.reader import Record
from mutirao.stats import interval
from mutirao.studies import targets as participation
from mutirao.studies.comparison import markdown_table as markdown
from mutirao.studies.selection_policies import last_known
from mutirao.studies.targets import count_rounds, dominance, mean_best, values
from research.gains import swing_of
from research.pages import fill_page

ROOT = Path(__file__).parent.parent
PAGE, IMAGES = ROOT / "docs/reproductions/aoiu.md", ROOT / "docs/images"
METHODS = ("random", "entropy", "mixed", "aoi", "powerofchoice", "oort")
PAPERS = METHODS[:4]  # policies that the paper compares
TARGETS = (0.6, 0.65)
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
    runs = {m: [run for run in found if run.summary] for m, found in participation.runs_by_method(folder).items()}
    return {m: runs[m] for m in METHODS if runs.get(m)}


def table_2(methods: Mapping[str, Sequence[Record]], targets: Sequence[float], published: bool) -> str:
    """Rounds to each target, accuracy at the end and at best, how far it swings, and who leads how often."""
    leads = dominance(methods, "accuracy")
    heads = [f"to {t:.0%}: {whose}" for t in targets for whose in (("published", "ours") if published else ("rounds",))]
    rows = [("policy", *heads, "last ten rounds", "best", "worst decile", "deviation", "change", "leads")]
    for name, runs in methods.items():
        counted = []
        for i, target in enumerate(targets):
            reached = count_rounds(runs, "accuracy", target)
            ours = ", ".join(str(r or f"> {reached.of}") for r in reached.rounds)
            counted += [str(ROUNDS.get(name, ("", ""))[i]), ours] if published else [ours]
        ends = [np.mean(values(run, "accuracy")[-10:]) for run in runs]
        worst = [last_known(values(run, "accuracy_worst_decile")) for run in runs]
        swings = np.mean([swing_of(run, "accuracy") for run in runs], axis=0)
        each = (np.mean(ends), mean_best(runs, "accuracy")[-1], np.mean(worst), *swings)
        rows.append((name, *counted, *(f"{figure:.4f}" for figure in each), f"{leads[name]:.0%}"))
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


def judge_lead(methods: Mapping[str, Sequence[Record]]) -> str:
    """Whether age leads most rounds among the paper's policies, by the rule of `mutirao reproduce`; empty for one."""
    runs = {m: {run.path.name: run for run in methods.get(m, ())} for m in PAPERS}
    seeds = sorted(set.intersection(*({*of} for of in runs.values())))
    if len(seeds) < 2:
        return ""
    found = interval([dominance({m: [of[s]] for m, of in runs.items()}, "accuracy")["aoi"] for s in seeds])
    verdict = "not shown" if found.holds(0.5) else "holds" if found.mean > 0.5 else "does not hold"
    share = f"{found.mean:.0%} ± {found.half:.0%}"
    return f"*Age leads in most rounds*: **{verdict}**. It leads {share} of them ({len(seeds)} seeds, 95% interval).\n"


def runs_of(methods: Mapping[str, Sequence[Record]]) -> str:
    """Which runs the tables are made of."""
    text = ", ".join(f"{name} {len(runs)}" for name, runs in methods.items())
    rounds = {run.rounds for runs in methods.values() for run in runs}
    return f"Runs of {', '.join(map(str, sorted(rounds)))} rounds behind these tables, a seed each: {text}.\n"


def main() -> None:
    """Write tables and pictures."""
    told = argparse.ArgumentParser(description="Fill the page of AoI-U from the folder of a study.")
    told.add_argument("folder", type=Path)
    told.add_argument("--into", default="", help="the name of the marks, for runs that are not the paper's setting")
    told.add_argument("--target", type=float, action="append", help="an accuracy to which rounds are counted")
    given = told.parse_args()
    methods, before = finished(given.folder), f"{given.into} " if given.into else ""
    table = table_2(methods, given.target or TARGETS, published=not given.target)
    made = {"runs": runs_of(methods), "table 2": table}
    if lead := judge_lead(methods):
        made["lead"] = lead
    if not given.into:
        draw_best(methods, "accuracy", TARGETS, IMAGES / "aoiu-curves.png")
        draw_shares(methods, IMAGES / "aoiu-fairness.png")
        made |= {"table 3": table_3(methods), **FIGURES}
    fill_page(PAGE, {f"{before}{name}": content for name, content in made.items()})
    print(f"written: {PAGE}; {runs_of(methods)}", end="")


if __name__ == "__main__":
    main()
