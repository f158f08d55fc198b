"""Fill docs/privacy.md with what privacy costs: `python -m research.privacy_page DIGITS MOVIES`.

The two folders are as `mutirao study studies/privacy.toml` and `studies/privacy-recsys.toml` leave them. Methods are
named by their epsilon; others have no noise.
"""

import sys
from pathlib import Path

from mutirao.report.plots import BRIGHT, INK, blank, save, tidy
from mutirao.stats import Interval, interval
from mutirao.studies.comparison import markdown_table as markdown
from mutirao.studies.targets import runs_by_method
from research.pages import fill_page

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs/privacy.md", ROOT / "docs/images/privacy-cost.png"
STUDIES = {"digits": ("accuracy", "digits, 400 clients"), "movies": ("rmse", "MovieLens-1M, users as clients")}

Ends = dict[str, tuple[Interval, float]]  # by method: the metric at the end, and the noise


def ends(folder: Path, metric: str) -> Ends:
    """By epsilon: the last value of the metric over the seeds with its 95% interval, and the noise."""
    found = {}
    for method, runs in runs_by_method(folder).items():
        values = [float(run.summary["final"][metric]) for run in runs if run.summary]
        found[method] = interval(values), float(runs[0].summary.get("privacy", {}).get("noise", 0.0))
    return found


def table(found: Ends, metric: str) -> str:
    """A line an epsilon."""
    rows = []
    for name, (end, noise) in found.items():
        rows.append((name, f"{noise:.3g}" if noise else "", f"{end.mean:.3f} ± {end.half:.3f}"))
    return markdown([("epsilon", "noise", metric), *rows])


def draw(panels: dict[str, Ends]) -> None:
    """The metric against epsilon, with intervals; the band is what there is without noise."""
    figure, sides = blank(9.5, 3.6, 1, 2)
    for axes, (name, found), colour in zip(sides, panels.items(), BRIGHT, strict=False):
        metric, title = STUDIES[name]
        plain, _ = found["none"]
        axes.axhspan(plain.mean - plain.half, plain.mean + plain.half, color="#DDDDDD", label="no privacy")
        points = sorted((float(e), end) for e, (end, noise) in found.items() if noise)
        x, y, half = zip(*((e, end.mean, end.half) for e, end in points), strict=True)
        axes.errorbar(x, y, yerr=half, color=colour, marker="o", markersize=5, capsize=4, label="central privacy")
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{e:g}" for e in x])
        axes.set(xlabel="epsilon (delta 1e-5)", ylabel=metric.upper() if metric == "rmse" else metric, title=title)
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
        tidy(axes, "y")
    save(figure, PICTURE)


def main(digits: Path, movies: Path) -> None:
    """Write both tables and the picture."""
    panels = {name: ends(f, STUDIES[name][0]) for name, f in (("digits", digits), ("movies", movies))}
    fill_page(PAGE, {name: table(panel, STUDIES[name][0]) for name, panel in panels.items()})
    draw(panels)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
