"""The tables, the verdicts and the picture of docs/reproductions/online.md, from the folders of two studies a set.

`python -m research.online_page runs/online` expects `mq2008` and `mslr` there (studies/online.toml), and beside each of
them `mq2008-control` and `mslr-control` (studies/online-control.toml).
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.report.plots import BRIGHT, INK, add_legend, blank, save, tidy
from mutirao.runs.reader import Record
from mutirao.stats import Interval, interval
from mutirao.studies.comparison import markdown_table as markdown
from mutirao.studies.targets import runs_by_method, values
from research.pages import fill_page

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs/reproductions/online.md", ROOT / "docs/images/online-curves.png"
SETS = {"mq2008": "MQ2008", "mslr": "the MSLR sample"}
ORDER = ("perfect", "navigational", "informational")  # from reliable clicks to noisy ones
LATE = 0.25  # the share of rounds at the end that is judged: no single evaluation decides
SHARED = 1 / 3  # folds share training data: one part of five tests, three train (Nadeau and Bengio, 2003)
MEASURES = {"ndcg@10": "offline nDCG@10", "train_shown_ndcg": "nDCG@10 of what users saw"}
Methods = Mapping[str, Sequence[Record]]


def late(run: Record, metric: str) -> float:
    """The mean of a metric over the last rounds."""
    found = np.array(values(run, metric))
    return float(np.nanmean(found[-max(1, round(LATE * len(found))) :]))


def last(run: Record, metric: str) -> float:
    """A metric after the last round."""
    return values(run, metric)[-1]


def by_place(runs: Sequence[Record], metric: str) -> dict[str, float]:
    """The late mean of each run by its place in the grid, such as fold1-seed0."""
    return {run.path.name: late(run, metric) for run in runs}


def compare(methods: Methods, better: str, worse: str, metric: str) -> tuple[Interval, str]:
    """The paired difference of two methods with its corrected interval, and what the rule says of it."""
    one, two = by_place(methods[better], metric), by_place(methods[worse], metric)
    gap = interval([one[place] - two[place] for place in sorted(one.keys() & two.keys())], shared=SHARED)
    if not abs(gap.mean) > gap.half:
        return gap, "open"
    return gap, "holds" if gap.mean > 0 else "reversed"


def verdicts(methods: Methods) -> str:
    """Each step of the published order, by both measures."""
    rows = [("step", *(f"{words}: difference" for words in MEASURES.values()), "verdict")]
    for better, worse in (*pairwise(ORDER), (ORDER[0], ORDER[-1]), (ORDER[-1], "near-random")):
        found = [compare(methods, better, worse, metric) for metric in MEASURES]
        cells = [f"{gap.mean:+.4f} ± {gap.half:.4f}" for gap, _ in found]
        rows.append((f"{better} above {worse}", *cells, ", ".join(verdict for _, verdict in found)))
    return markdown(rows)


def table(methods: Methods) -> str:
    """How each method ends: the late means, and what was lost on the way."""
    rows = [("method", "runs", *MEASURES.values(), "online nDCG, discounted", "regret")]
    for name, runs in methods.items():
        ends = [np.mean([late(run, metric) for run in runs]) for metric in MEASURES]
        way = [np.mean([last(run, metric) for run in runs]) for metric in ("online_ndcg", "regret")]
        rows.append((name, f"{len(runs)}", *(f"{v:.4f}" for v in ends), f"{way[0]:.1f}", f"{way[1]:,.0f}"))
    return markdown(rows)


def curves(runs: Sequence[Record], metric: str) -> tuple[npt.NDArray[np.float64], ...]:
    """Interactions, the mean over the folds, and how far they deviate."""
    found = np.array([values(run, metric) for run in runs])
    there = ~np.isnan(found).any(0)
    at = np.array(values(runs[0], "interactions"))[there]
    return at, found[:, there].mean(0), found[:, there].std(0, ddof=1)


def draw(found: Mapping[str, Methods], path: Path) -> None:
    """Both measures by interactions: a line a click model with a band of one deviation, the controls broken."""
    figure, grid = blank(9.6, 6.6, len(found), 2, sharex=True, squeeze=False)
    for row, (name, methods) in zip(grid, found.items(), strict=True):
        for axes, (metric, words) in zip(row, MEASURES.items(), strict=True):
            for (method, runs), colour in zip(methods.items(), colours(methods), strict=True):
                control = method.startswith("pdgd") or method == "untrained"
                at, mean, spread = curves(runs, metric)
                axes.plot(
                    at,
                    mean,
                    color=colour,
                    linewidth=1.2 if control else 1.8,
                    label=method,
                    linestyle=(0, (4, 2)) if control else "-",
                )
                if not control:
                    axes.fill_between(at, mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)
            axes.set(title=f"{SETS[name]}: {words}")
            tidy(axes, grid="both")
        row[0].set_ylabel("nDCG@10")
    for axes in grid[-1]:
        axes.set_xlabel("interactions")
    add_legend(figure, loc="outside lower center", ncols=4, handles=grid[0, 0].get_lines())
    save(figure, path)


def colours(methods: Methods) -> list[str]:
    """One a click model, the same for its control."""
    known = dict(zip((*ORDER, "near-random"), BRIGHT, strict=False))
    return [known.get(method.removeprefix("pdgd-"), INK) for method in methods]


def main(folder: Path) -> None:
    """Write tables and picture."""
    found = {name: {**runs_by_method(folder / name), **runs_by_method(folder / f"{name}-control")} for name in SETS}
    draw(found, PICTURE)
    made = {f"{name} table": table(methods) for name, methods in found.items()}
    fill_page(PAGE, made | {f"{name} verdicts": verdicts(methods) for name, methods in found.items()})
    print(f"written: {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
