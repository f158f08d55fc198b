"""Runs where slow clients alone hold two classes, and the tables and the picture of docs/asynchronous.md.

`python -m research.asynchronous_page runs/asynchronous` expects the study's folders `tifl`, `fedcs` and `equal` there.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mutirao.config import resolve
from mutirao.experiments.task import find
from mutirao.io import write_whole
from mutirao.report import execute
from mutirao.report.plots import BRIGHT, INK, add_legend, blank, save, tidy
from mutirao.runs.reader import Record
from mutirao.studies.comparison import markdown_table as markdown
from mutirao.studies.targets import best_so_far, cost_to, runs_by_method, values
from research.pages import fill_page

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs/asynchronous.md", ROOT / "docs/images/asynchronous.png"
TARGETS = (0.85, 0.9, 0.93)
SEEDS = range(3)
APART = {
    "fedavg": {"aggregate": "fedavg", "rounds": 40},
    "fedbuff-5": {"aggregate": "fedbuff", "aggregate.buffer": 5, "rounds": 400},
}
Methods = Mapping[str, Sequence[Record]]


def run_apart(folder: Path) -> Methods:
    """Ten of fifty clients have two of the classes to themselves, and a twentieth of the others' speed."""
    config = find("quickstart").config
    made: dict[str, list[Record]] = {name: [] for name in APART}
    for seed in SEEDS:
        common = {"seed": seed, "partition": "by_class"}
        dealt = find("quickstart").task(resolve(config, common)).population
        labels = {client: data.train.batch(slice(0, len(data)))[1].numpy() for client, data in dealt.items()}
        held = {client: frozenset(y.tolist()) for client, y in labels.items()}
        assert sum(classes == held["c00"] for classes in held.values()) == 10
        lines = [f"{client},{2.5 if classes == held['c00'] else 50},20,20" for client, classes in held.items()]
        write_whole(folder / f"{seed}.csv", "\n".join(["client,speed,down,up", *lines]) + "\n")
        for name, settings in APART.items():
            out = folder / name / f"seed{seed}"
            devices = {"devices": "table", "devices.file": str(folder / f"{seed}.csv")}
            execute("quickstart", resolve(config, common | devices | settings), out, resume=out.exists())
            made[name].append(Record.begun(out))
    return made


def clock(run: Record) -> np.ndarray:
    """The simulated time at the end of each round."""
    return np.cumsum([float(row["sim_seconds"]) for row in run.rows])


def at(run: Record, seconds: float) -> float:
    """The mean accuracy of the models made in the last third of so many simulated seconds, at least of the last one."""
    passed = clock(run)
    until = np.searchsorted(passed, seconds, "right")
    begin = min(until - 1, np.searchsorted(passed, 2 / 3 * seconds, "right"))
    return float(np.mean(values(run, "accuracy")[begin:until]))


def times(methods: Methods) -> str:
    """Simulated seconds and megabytes to each target, medians over the seeds with the least and the most."""
    rows = [("method", *(f"seconds to {t:g}" for t in TARGETS), "MB to 0.9", "best accuracy")]
    for name, runs in methods.items():
        cells = []
        for target in TARGETS:
            spent = [cost["sim_seconds"] if (cost := cost_to(run, "accuracy", target)) else np.inf for run in runs]
            cells.append(f"{np.median(spent):.0f} ({min(spent):.0f} to {max(spent):.0f})")
        sent = [cost["bytes"] / 1e6 if (cost := cost_to(run, "accuracy", 0.9)) else np.inf for run in runs]
        best = np.mean([best_so_far(run, "accuracy")[-1] for run in runs])
        rows.append((name, *cells, f"{np.median(sent):.1f}", f"{best:.3f}"))
    return markdown(rows)


def ends(methods: Methods, seconds: Sequence[float]) -> str:
    """The accuracy at some times, means over the seeds with the least and the most."""
    rows = [("method", *(f"after {s:g} s" for s in seconds))]
    for name, runs in methods.items():
        found = [[at(run, s) for run in runs] for s in seconds]
        rows.append((name, *(f"{np.mean(f):.3f} ({min(f):.3f} to {max(f):.3f})" for f in found)))
    return markdown(rows)


def draw(methods: Methods, path: Path) -> None:
    """The best accuracy so far by simulated time: a line a seed."""
    figure, axes = blank(7.6, 4.2)
    for target in TARGETS:
        axes.axhline(target, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    for (name, runs), colour in zip(methods.items(), BRIGHT, strict=False):
        for i, run in enumerate(runs):
            label = name if i == 0 else None
            axes.plot(clock(run), best_so_far(run, "accuracy"), color=colour, linewidth=1.2, alpha=0.8, label=label)
    axes.set(xscale="log", xlabel="simulated seconds", ylabel="best accuracy so far", xlim=(2, 2000), ylim=(0.2, 1))
    add_legend(axes, loc="lower right")
    tidy(axes, grid="both")
    save(figure, path)


def main(folder: Path) -> None:
    """Write tables and picture."""
    found = {name: runs_by_method(folder / name) for name in ("tifl", "fedcs", "equal")}
    made = {name: times(methods) for name, methods in found.items()}
    made["apart"] = ends(run_apart(folder / "apart"), (300, 600, 1000))
    draw(found["tifl"], PICTURE)
    fill_page(PAGE, made)
    print(f"written: {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
