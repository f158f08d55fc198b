"""Fill docs/robust.md from the cells of the study: `python -m research.robust_page FOLDER`."""

import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np

from mutirao.report.plots import INK, blank, save
from mutirao.stats import interval
from research.pages import fill_page
from research.robust import ALONE, ATTACKS, DEFENCES, PARTITIONS, RECIPES, Cell, Outcome, load

ROOT = Path(__file__).parent.parent
PAGE, IMAGE = ROOT / "docs/robust.md", ROOT / "docs/images/robust-losses.png"
WORDS = {"iid": "IID", "dirichlet": "Dirichlet 0.3"}
COLUMNS = [ALONE, *DEFENCES]
FULL = 20.0  # points lost at which the colour is full

Cells = dict[Cell, Outcome]


def losses(
    cells: Cells, recipe: str, partition: str, attack: str, defence: str, against: str = "fedavg"
) -> list[float]:
    """Points lost, a figure a seed: against the federation where nobody lies, or against the honest clients alone."""
    attack = "none" if defence == ALONE else attack
    out = []
    for seed in range(100):
        found = cells.get(Cell(recipe, partition, attack, defence, seed))
        best = cells.get(Cell(recipe, partition, "none", against, seed))
        if found and best:
            out.append(100 * (best.metric - found.metric))
    return out


def figure(values: list[float]) -> str:
    """The mean with its 95% interval; of one seed the figure alone."""
    if not values:
        return ""
    found = interval(values)
    text = f"{found.mean:.1f}" if len(values) < 2 else f"{found.mean:.1f} ± {found.half:.1f}"
    return text.replace("-0.0", "0.0")


def mean(values: Iterable[float]) -> float:
    """The mean; NaN of nothing."""
    found = list(values)
    return float(np.mean(found)) if found else float("nan")


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def detail(cells: Cells, recipe: str, partition: str) -> str:
    """Points lost by attack and defence."""
    rows = [[a, *(figure(losses(cells, recipe, partition, a, d)) for d in COLUMNS)] for a in ATTACKS]
    return f"**{recipe}, {WORDS[partition]}**\n\n" + table(["attack", *COLUMNS], rows)


def verdict(cells: Cells) -> str:
    """What the screen costs: the worst attack against both references, honest rejections, backdoors."""
    rows = []
    for recipe, partition in product(RECIPES, PARTITIONS):
        mine = {c: o for c, o in cells.items() if (c.recipe, c.partition) == (recipe, partition)}
        screened = {c: o for c, o in mine.items() if c.defence == "screen=robust"}
        attacked = [a for a in ATTACKS if a != "none"]

        def worst(against: str, where: tuple[str, str] = (recipe, partition), tried: list[str] = attacked) -> str:
            found = {a: mean(losses(cells, *where, a, "screen=robust", against)) for a in tried}
            attack = max(found, key=lambda a: found[a])
            return f"{found[attack]:.1f} ({attack})"

        doors = {
            d: mean(100 * o.backdoor for c, o in mine.items() if (c.attack, c.defence) == ("backdoor", d))
            for d in DEFENCES
        }
        rejected = {
            c.attack: [o.false_rejections for k, o in screened.items() if k.attack == c.attack] for c in screened
        }
        most = max(rejected, key=lambda a: mean(rejected[a])) if rejected else ""
        rows.append(
            [
                f"{recipe}, {WORDS[partition]}",
                str(len({c.seed for c in screened})),
                figure(losses(cells, recipe, partition, "none", "screen=robust")),
                worst("fedavg"),
                worst(ALONE),
                f"{100 * mean(o.false_rejections for o in screened.values()):.1f}%",
                f"{100 * mean(rejected.get(most, [])):.1f}% ({most})",
                f"{doors['fedavg']:.0f}%",
                f"{doors['screen=robust']:.0f}%",
            ]
        )
    head = ["", "seeds", "nobody lies: lost", "worst attack: lost", "worst, against the honest alone"]
    head += ["honest replies rejected", "at most", "backdoor works: fedavg", "backdoor works: screen"]
    return table(head, rows)


def summary(cells: Cells) -> str:
    """The mean and the worst loss of every defence over all attacks."""
    rows = []
    for recipe, partition in product(RECIPES, PARTITIONS):
        row = [f"{recipe}, {WORDS[partition]}"]
        for defence in COLUMNS:
            found = [losses(cells, recipe, partition, a, defence) for a in ATTACKS if a != "none"]
            means = [mean(x) for x in found if x]
            row.append(f"{np.mean(means):.1f}, {max(means):.1f}" if len(means) == len(ATTACKS) - 1 else "")
        rows.append(row)
    seeds = [str(len({c.seed for c in cells if c.defence == d})) for d in COLUMNS]
    return table(["mean, worst", *COLUMNS], [*rows, ["seeds, at most", *seeds]])


def draw(cells: Cells, path: Path) -> None:
    """A heat map for each recipe and partition: points lost by attack and defence."""
    figure, axes = blank(13, 8.6, 2, 3, sharex=True, sharey=True)
    tried = list(ATTACKS)
    for (partition, recipe), place in zip(product(PARTITIONS, RECIPES), axes.ravel(), strict=True):
        values = np.array([[mean(losses(cells, recipe, partition, a, d)) for d in COLUMNS] for a in tried])
        shown = place.imshow(values, cmap="OrRd", vmin=0, vmax=FULL, aspect="auto")
        place.set_title(f"{recipe}, {WORDS[partition]}", color=INK, fontsize=11)
        place.set_xticks(range(len(COLUMNS)), COLUMNS, rotation=45, ha="right", fontsize=8.5, color=INK)
        place.set_yticks(range(len(tried)), tried, fontsize=8.5, color=INK)
        place.tick_params(length=0)
        for side in place.spines.values():
            side.set_visible(False)
        for (i, j), value in np.ndenumerate(values):
            if value == value:
                tone = "white" if value > 0.6 * FULL else INK
                place.text(j, i, f"{value:.0f}".replace("-0", "0"), ha="center", va="center", fontsize=7.5, color=tone)
    bar = figure.colorbar(shown, ax=axes, pad=0.01, shrink=0.6)
    bar.set_label("points lost (nobody lies, FedAvg: 0)", color=INK, fontsize=10)
    bar.outline.set_visible(False)
    save(figure, path)


def main() -> None:
    """Write the tables and the picture."""
    cells = load(Path(sys.argv[1]) / "cells.jsonl")
    details = [detail(cells, recipe, partition) for recipe, partition in product(RECIPES, PARTITIONS)]
    fill_page(PAGE, {"verdict": verdict(cells), "summary": summary(cells), "detail": "\n".join(details)})
    draw(cells, IMAGE)


if __name__ == "__main__":
    main()
