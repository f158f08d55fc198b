"""Folders full of runs, for pages that list them: run folders whose curves are drawn, not trained.

`python -m benchmarks.shelves FOLDER --runs 5000 --rounds 50` writes them as a run would: configuration, history,
summary and a chained trail (without hashes of rows or models). The figures in them mean
nothing; what is measured is how many there are.
"""

import argparse
import datetime
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import dump, resolve
from mutirao.core.arrays import fingerprint
from mutirao.randomness import rng
from mutirao.runs.audit_trail import START
from mutirao.systems.quickstart import Config

HEAD = "round,seconds,selected,replied,failed,rejected,bytes_down,bytes_up,train_accuracy,train_loss,loss,accuracy"
WAYS = {"loss": "lower", "accuracy": "higher"}
GRID = {
    "aggregate": ("fedavg", "fedavgm", "fedadam", "fedmedian", "fedyogi"),
    "lr": (0.03, 0.1, 0.3, 1.0),
    "partition.alpha": (0.1, 0.3, 1.0, 10.0),
}
SEEDS = 5


def main() -> None:
    """Write a folder of runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shelves", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    fill(args.folder, args.runs, args.rounds)


def fill(folder: Path, runs: int, rounds: int, prefix: str = "run") -> None:
    """So many runs of so many rounds, each with settings of its own; every fiftieth failed, every fiftieth stopped."""
    texts: dict[tuple[Any, ...], str] = {}  # a configuration takes longer to resolve than a run to write
    for i, (seed, values) in zip(range(runs), settings(), strict=False):
        if values not in texts:
            table = {"rounds": rounds, **dict(zip(GRID, values, strict=True))}
            texts[values] = dump("quickstart", resolve(Config, {}, list(table.items())))
        text = texts[values].replace("seed = 0", f"seed = {seed}", 1)
        end = "failed" if i % 50 == 7 else "stopped" if i % 50 == 23 else "finished"
        write_run(folder / f"{prefix}-{i:04d}", text, rounds if end == "finished" else rounds * 2 // 3, seed, i, end)


def settings() -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Seeds and places of the grid without end."""
    for first in itertools.count(step=SEEDS):
        for values in itertools.product(*GRID.values()):
            yield from ((first + s, values) for s in range(SEEDS))


def write_run(folder: Path, config: str, rounds: int, seed: int, number: int, end: str) -> None:
    """One run folder; `end` is finished, failed or stopped."""
    folder.mkdir(parents=True)
    draw = rng(number, 0, "curve")
    accuracy = 0.95 - 0.8 * np.exp(-np.arange(1, rounds + 1) / (rounds * draw.uniform(0.1, 0.6)))
    accuracy += draw.normal(0, 0.02, rounds)
    loss, seconds = 2.3 * (1 - accuracy) + 0.1, draw.uniform(0.01, 0.03, rounds)
    rows = [
        f"{r},{s},10,10,0,0,192400,192640,{a - 0.01},{v + 0.1},{v},{a}"
        for r, s, a, v in zip(itertools.count(1), seconds.tolist(), accuracy.tolist(), loss.tolist(), strict=False)
    ]
    (folder / "config.toml").write_text(config)
    (folder / "history.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(minutes=number)
    took = float(seconds.sum())
    best, final = int(accuracy.argmax()), {"loss": float(loss[-1]), "accuracy": float(accuracy[-1])}
    summary = {
        "schema": 1,
        "recipe": "quickstart",
        "final": final,
        "best": {"loss": float(loss[best]), "accuracy": float(accuracy[best])},
        "best_round": best + 1,
        "judge": "accuracy",
        "directions": WAYS,
        "rounds": rounds,
        "seed": seed,
        "clients": 50,
        "seconds": took,
    }
    if end == "finished":
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    events: list[dict[str, Any]] = [{"event": "started", "config": fingerprint(config)}]
    events += [{"event": "round", "round": r + 1} for r in range(rounds)]
    events += [] if end == "stopped" else [{"event": end, "round": rounds, "reason": "too few replies"}]
    head, lines = START, []
    for seq, event in enumerate(events, start=1):
        time = began + datetime.timedelta(seconds=took * (seq - 1) / len(events))
        body = {"seq": seq, "time": time.isoformat(timespec="milliseconds"), **event, "prev": head}
        head = fingerprint(body)
        lines.append(json.dumps(body | {"hash": head}))
    (folder / "audit.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
