"""Where age or entropy helps: policies against random selection in eleven regimes, as tables and one picture.

    python -m research.regimes runs/regimes --seeds 20           # makes what is not there yet, then tables and picture
    python -m research.regimes runs/regimes --only rare --only sizes --read

A regime is a study file and some settings more. What is compared, and how: `research.gains`.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mutirao.config import parse_assignment
from mutirao.runs.participation import participation_in
from mutirao.runs.reader import Record
from mutirao.stats import Comparison, interval
from mutirao.studies.comparison import markdown_table as markdown
from mutirao.studies.study import read_study, results, run_study
from mutirao.studies.targets import dominance
from research.gains import BASELINE, Field, Gains, compare_all, draw_gains, figures_of, shown_of, swing_of
from research.pages import fill_page

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/reproductions/selection-regimes.md"
PICTURE = ROOT / "docs/images/selection-regimes.png"
BASE, SLOW = "selection-regimes.toml", "selection-slow.toml"


@dataclass(frozen=True)
class Regime:
    """A study file, the settings that make it this case, and what to call it."""

    title: str
    sets: tuple[str, ...] = ()
    file: str = BASE


REGIMES = {
    "ordinary": Regime("ordinary: Dirichlet 0.5"),
    "labels": Regime("labels: Dirichlet 0.1", ("partition.alpha=0.1",)),
    "sizes": Regime(
        "sizes: a tenth has 40%", ("partition=quantity", "partition.beta=0.5", "clients=40", "per_round=4")
    ),
    "rare": Regime("rare classes", ("partition=rare", "partition.classes=2", "partition.holders=3")),
    "late": Regime(
        "classes that come late",
        (
            "partition=by_class",
            "partition.classes=1",
            "partition.order=sorted",
            "available=schedule",
            "available.file=studies/late-classes.csv",
        ),
    ),
    "churn": Regime("churn: a fifth is there", ("available=markov", "available.leave=0.2", "available.come=0.05")),
    "daily": Regime("day and night", ("available=daily", "available.share=0.3", "available.spread=0.5")),
    "drift": Regime("drift: data change hands", ("drift=swap", "drift.at=30", "drift.share=1.0", "drift.over=50")),
    "few": Regime("2 of 100 a round", ("per_round=2",)),
    "many": Regime("30 of 100 a round", ("per_round=30",)),
    "slow": Regime("slow devices, by time", (), SLOW),
}
FIGURES = {
    "final": ("accuracy, last ten rounds (points)", "+.1f", 4.0),
    "worst": ("worst decile of clients (points)", "+.1f", 8.0),
    "sooner": ("rounds or seconds saved (%)", "+.0f", 40.0),
}
Runs = dict[str, dict[int, Record]]  # by policy and seed


def make(regime: Regime, out: Path, seeds: int, sets: Sequence[str], read: bool = False) -> Runs:
    """Make the runs that are missing, unless it is only to `read`, and read all that are finished."""
    told = [parse_assignment(text) for text in (*regime.sets, *sets, f"seeds={seeds}")]
    study = read_study(ROOT / "studies" / regime.file, told)
    for problem in () if read else run_study(study, out, start="here"):
        print(f"not finished: {problem}")
    runs: Runs = {method: {} for method in study.methods}
    for cell, record in results(study, out):
        runs[cell.method][dict(cell.place)["seed"]] = record
    return {method: found for method, found in runs.items() if found}


def draw(made: Mapping[str, Runs], all_gains: Gains, path: Path) -> None:
    """The picture: what each policy gains where; without those that run in one regime alone."""
    count = Counter(m for runs in made.values() for m in runs if m != BASELINE)
    policies = [m for m, many in count.items() if many > 1 or len(made) == 1]
    fields = []
    for name, (title, form, most) in FIGURES.items():
        of = all_gains[name]
        fields.append(Field(title, {k: 100 * c.difference.mean for k, c in of.items()}, shown_of(of), form, most))
    draw_gains({name: REGIMES[name].title for name in made}, policies, fields, path)


def table_of(name: str, runs: Runs, all_gains: Gains) -> str:
    """One regime: what random selection reaches, and what each policy gains over it, with 95% intervals."""
    shown = {figure: shown_of(found) for figure, found in all_gains.items()}
    rows = [("policy", "seeds", "accuracy", "worst decile", "saved", "swing", "change", "Gini", "leads")]
    all_seeds = {m: of for m, of in runs.items() if {*of} == {*runs[BASELINE]}}  # who leads is asked among these
    each = [dominance({m: [of[s]] for m, of in all_seeds.items()}, "accuracy") for s in runs[BASELINE]]
    own = figures_of(runs)
    for method, of in runs.items():
        cells = [f"{np.mean(list(own[f][method].values())):.3f}" for f in ("final", "worst")] + [""]
        if method != BASELINE:
            cells = [tell(all_gains[f][name, method], f, (name, method) in shown[f]) for f in FIGURES]
        swings = np.mean([swing_of(record, "accuracy") for record in of.values()], axis=0)
        gini = np.mean([participation_in(record).gini for record in of.values()])
        leads = interval([shares[method] for shares in each]) if method in all_seeds else None
        told = "" if leads is None else f"{leads.mean:.0%} ± {leads.half:.0%}"
        tail = (f"{swings[0]:.4f}", f"{swings[1]:.4f}", f"{gini:.2f}", told)
        rows.append((method, str(len(of)), *cells, *tail))
    return markdown(rows)


def tell(found: Comparison, figure: str, shown: bool) -> str:
    """A gain with its interval, bold where it is shown."""
    digits = 0 if figure == "sooner" else 1
    text = f"{100 * found.difference.mean:+.{digits}f} ± {100 * found.difference.half:.{digits}f}"
    return f"**{text}**" if shown else text


def main() -> None:
    """Make, compare, write."""
    told = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    told.add_argument("folder", type=Path)
    told.add_argument("--seeds", type=int, default=20)
    told.add_argument("--only", action="append", choices=REGIMES, help="one regime (may be given again)")
    told.add_argument("--set", action="append", default=[], help="a setting for all runs, such as rounds=50")
    told.add_argument("--into", default="", help="the name of the marks on the page, for runs on other data")
    told.add_argument("--read", action="store_true", help="make no run: tables and picture of what is there")
    given = told.parse_args()
    made = {n: make(REGIMES[n], given.folder / n, given.seeds, given.set, given.read) for n in given.only or REGIMES}
    made = {name: runs for name, runs in made.items() if len(runs) > 1}
    found = compare_all(made)
    tables = {name: table_of(name, runs, found) for name, runs in made.items()}
    if given.into:
        fill_page(PAGE, {f"{given.into} {name}": table for name, table in tables.items()})
    elif not given.only:
        draw(made, found, PICTURE)
        fill_page(PAGE, tables)
    for name, table in tables.items():
        print(f"{REGIMES[name].title}\n\n{table}")


if __name__ == "__main__":
    main()
