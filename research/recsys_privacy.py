"""What privacy costs a recommender, and what is left to read: `python -m research.recsys_privacy run ml-1m OUT`.

Every line of OUT/cells.jsonl is one run: its settings, RMSE or HR@10 at the end, epsilon, and which share of a round's
ratings the attack on sums reads, right to the star, in what the server sees of 1,000 users (the sum of their clipped
updates, with the noise of that epsilon). Cells that are there already are not run again. `page OUT DRILL` fills
docs/recsys-privacy.md with them and with the figures of `mutirao drill ratings`, and draws both.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import resolve
from mutirao.core.fleet import Request, Site
from mutirao.core.rounds import Run
from mutirao.core.sparse_rows import ROWS
from mutirao.experiments.task import find
from mutirao.privacy import build_privacy
from mutirao.privacy.central_noise import clip_update
from mutirao.report.plots import BRIGHT, INK, add_legend, blank, save, tidy
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.studies.comparison import markdown_table as markdown
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS
from mutirao.systems.recsys.rating_attack import Attacker, read_sum
from research.pages import fill_page

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs/recsys-privacy.md", ROOT / "docs/images/recsys-privacy.png"
CLIP, LOOKED_AT = 1.5, 1000
COMMON = {"rounds": 50, "per_round": LOOKED_AT, "evaluate_every": 50, "aggregate.shrinkage": 30.0, "download": "all"}
TASKS: dict[str, dict[str, Any]] = {
    "rmse": {"dimension": 2},
    "hr@10": {"dimension": 8, "loss": "weighted", "ridge": 1.0, "lr": 0.4},
}
EPSILONS = (0.0, 8.0, 4.0, 2.0, 1.0)  # 0: no noise
SEEDS = (1, 2, 3)


def settings_of(metric: str, epsilon: float, seed: int, data: str) -> dict[str, Any]:
    """The settings of a cell."""
    private = {"privacy": "central", "privacy.epsilon": epsilon, "privacy.clip": CLIP} if epsilon else {}
    return {"data": data, "seed": seed, **COMMON, **TASKS[metric], **private}


def run_cell(metric: str, epsilon: float, seed: int, data: str) -> dict[str, Any]:
    """Train, judge, and read one more round as the server sees it."""
    recipe = find("recsys")
    config = resolve(recipe.config, {}, list(settings_of(metric, epsilon, seed, data).items()))
    task = recipe.prepare(config)
    run = Run(task.initial(), seed=seed)
    rows = [done.row for done in recipe.flow(LocalFleet(task.handler, task.population), config, task, run)]
    noise = float(build_privacy(config).found(config, len(task.population)).get("noise", 0.0)) if epsilon else 0.0
    cell = {"metric": metric, "epsilon": epsilon, "seed": seed, "noise": noise, "value": rows[-1][metric]}
    return cell | {"spent": rows[-1].get("epsilon", 0.0), "read": read_round(task, run, noise, bool(epsilon), seed)}


def read_round(task: Any, run: Run, noise: float, clips: bool, seed: int) -> float:
    """The share of a round's ratings that are read rightly in the sum of the updates."""
    draw = np.random.default_rng(seed)
    method = getattr(task.handler, "method", task.handler)
    users = draw.choice(sorted(task.population), min(LOOKED_AT, len(task.population)), replace=False)
    sent, total, truth = {ITEMS: run.arrays[ITEMS]}, np.zeros(run.arrays[ITEMS].shape), dict[int, list[float]]()
    for user in users:
        data = task.population[user]
        reply = method(Request("train", sent, {"seed": seed, "round": 999}), Site(user, data)).arrays
        update, _ = clip_update(sent, reply, CLIP if clips else np.inf)
        total[reply[ITEM_ROWS]] += update[ITEMS]
        work = method.with_negatives([method.examples(data, user, seed, 999)])[0]
        known = dict(zip(work.rows.tolist(), work.y.tolist(), strict=True))
        for item in reply[ITEMS + ROWS].tolist():
            truth.setdefault(item, []).append(known[item])
    total += draw.normal(0, noise * CLIP, total.shape) if noise else 0.0
    found = [read.ratings() for read in read_sum(Attacker(method), sent, total)]
    return sum(truth.get(i) == [v] for one in found for i, v in one.items()) / sum(map(len, truth.values()))


def run_all(data: str, out: Path) -> None:
    """All cells that are not there yet, those of the first seed first."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "cells.jsonl"
    done = {(c["metric"], c["epsilon"], c["seed"]) for c in cells_in(out)}
    for seed in SEEDS:
        for metric in TASKS:
            for epsilon in EPSILONS:
                if (metric, epsilon, seed) not in done:
                    with file.open("a") as lines:
                        lines.write(json.dumps(run_cell(metric, epsilon, seed, data)) + "\n")


def cells_in(out: Path) -> list[dict[str, Any]]:
    """What was run."""
    file = out / "cells.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def mean(cells: list[dict[str, Any]], metric: str, epsilon: float, what: str = "value") -> tuple[float, float, int]:
    """Mean and deviation over the seeds, and how many there are."""
    found = [c[what] for c in cells if (c["metric"], c["epsilon"]) == (metric, epsilon)]
    if not found:
        return np.nan, 0.0, 0  # not run
    return float(np.mean(found)), float(np.std(found, ddof=1)) if len(found) > 1 else 0.0, len(found)


def write_page(out: Path, drill: Path) -> None:
    """Both tables and the picture of costs."""
    cells, told = cells_in(out), json.loads((drill / "ratings.json").read_text())["told"]
    rows = [("epsilon", "noise", "RMSE", "HR@10", "ratings read in the sum, explicit", "and taken")]
    for epsilon in EPSILONS:
        texts = []
        for metric in TASKS:
            value, spread, count = mean(cells, metric, epsilon)
            texts.append(f"{value:.3f} ± {spread:.3f}" if count > 1 else f"{value:.3f}")
        read = [f"{100 * mean(cells, metric, epsilon, 'read')[0]:.2f}%" for metric in TASKS]
        noise = mean(cells, "rmse", epsilon, "noise")[0]
        rows.append((f"{epsilon:g}" if epsilon else "none", f"{noise:.3g}" if noise else "", *texts, *read))
    heads = ("setting", "epsilon of one update", "ratings read", "user's mean", "usual", "items: precision", "recall")
    lines = [heads]
    for t in told:
        cost = f"{t['epsilon']:.3g}" if t["epsilon"] else ""
        shares = (f"{100 * t[k]:.1f}%" for k in ("read", "guessed", "usual", "precision", "recall"))
        lines.append((f"**{t['rule']}**" if t["private"] else t["rule"], cost, *shares))
    fill_page(PAGE, {"cost": markdown(rows), "drill": markdown(lines)})
    draw(cells)


def draw(cells: list[dict[str, Any]]) -> None:
    """What is left of the model against epsilon."""
    figure, sides = blank(9.5, 3.4, 1, 2)
    for axes, metric, colour in zip(sides, TASKS, BRIGHT, strict=False):
        plain, _, _ = mean(cells, metric, 0.0)
        points = [(e, *mean(cells, metric, e)[:2]) for e in sorted(EPSILONS) if e]
        x, y, half = zip(*points, strict=True)
        axes.axhline(plain, color="#999999", linestyle="--", label="no noise")
        axes.errorbar(x, y, yerr=half, color=colour, marker="o", markersize=5, capsize=4, label="central, mean by item")
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{e:g}" for e in x])
        name = "RMSE (less is better)" if metric == "rmse" else "HR@10 (more is better)"
        axes.set(xlabel="epsilon (delta 1e-5)", ylabel=name)
        axes.yaxis.label.set_color(INK)
        add_legend(axes)
        tidy(axes, "y")
    save(figure, PICTURE)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run_all(sys.argv[2], Path(sys.argv[3]))
    else:
        write_page(Path(sys.argv[2]), Path(sys.argv[3]))
