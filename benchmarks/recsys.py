"""What a recorded round of federated recommendation costs: `python -m benchmarks.recsys --data ~/ml-1m`.

Two measurements. MovieLens-1M, 50 users a round, with all that a run writes: the round, of it the arithmetic, and the
recording, for each of the `--losses squared,weighted,bpr`. Generated ratings of 100,000 users, 1,000 a round: the same,
and memory over the rounds. `--against SRC` runs either in turn with the sources in another folder (`git worktree add`),
and prints the ratio and whether the models are equal bit for bit. Times are of the processor, all threads together,
unless they are called wall: others may be at work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from mutirao.config import dump, resolve
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run
from mutirao.randomness import rng
from mutirao.runs.run_folder import Folder
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys import fedrecon, recipe
from mutirao.systems.recsys.ratings import plant

ROOT = Path(__file__).parents[1]
ITEMS = 2000  # of the generated ratings
WARM = 10  # rounds left out: kernels are compiled or loaded, and columns of tables appear
KEEP_BYTES = 2**26  # of checkpoints, so that many rounds fit on a small disk


def measure(settings: dict[str, Any], out: Path) -> dict[str, Any]:
    """Make the rounds of a run, record each, and tell what they cost by the median, in ms."""
    config = resolve(recipe.Config, settings)
    task = recipe.recipe.prepare(config)
    arithmetic = count_arithmetic()
    run, rows = Run(task.initial(), seed=config.seed), []
    with Folder.open(out) as folder:
        folder.keep_bytes = KEEP_BYTES
        folder.begin(run, dump("recsys", config))
        fleet = LocalFleet(task.handler, task.population)
        rounds = recipe.flow(fleet, config, replace(task, evaluate=None), run)
        while True:
            began, wall = time.process_time(), time.perf_counter()
            done = next(rounds, None)
            made = time.process_time()
            if done is None:
                break
            folder.commit(run, done, heads=fleet.heads())
            ended = time.process_time()
            rows.append(
                (ended - began, next(arithmetic), made - began, ended - made, time.perf_counter() - wall, rss())
            )
    table = np.array(rows)[WARM:]
    names = ("recorded_round", "arithmetic", "round", "recording", "recorded_round_wall")
    figures = {f"{name}_ms": 1e3 * float(np.median(table[:, k])) for k, name in enumerate(names)}
    tenth = max(1, len(table) // 10)
    figures |= {"rss_mb_first_tenth": table[:tenth, 5].mean(), "rss_mb_last_tenth": table[-tenth:, 5].mean()}
    figures |= {
        f"recorded_round_ms_{k}_tenth": 1e3 * float(np.median(part[:, 0]))
        for k, part in (("first", table[:tenth]), ("last", table[-tenth:]))
    }
    return {**{k: round(float(v), 3) for k, v in figures.items()}, "rounds": len(rows), "digest": digest(run.arrays)}


def count_arithmetic() -> Iterator[float]:
    """Processor seconds of the vectors and items since the last time it was asked."""
    spent = [0.0]

    def timed(inner: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            began = time.process_time()
            inner(*given)
            spent[0] += time.process_time() - began

        return call

    for name in ("rebuild_and_train", "rank_and_train"):  # by which the method calls them
        setattr(fedrecon, name, timed(getattr(fedrecon, name)))
    while True:
        now, spent[0] = spent[0], 0.0
        yield now


def rss() -> float:
    """Memory of this process now, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def once(job: str, args: argparse.Namespace) -> dict[str, Any]:
    """One measurement in this process."""
    settings: dict[str, Any] = {"rounds": args.rounds + WARM}
    if job != "generated":
        settings |= {"data": str(args.data.expanduser()), "loss": job.removeprefix("movielens-")}
    else:
        settings |= {"data": "generated", "per_round": args.per_round}
        ratings = plant(args.users, ITEMS, rng(0, 0, "generated"))
        recipe.load = lambda config: ratings.with_at_least(2)
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        return measure(settings, Path(folder) / "run")


def in_turn(job: str, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The measurement in processes of their own: with these sources and, if asked for, with others, in turn."""
    sources = {"this": ROOT / "src"} | ({"other": args.against.resolve()} if args.against else {})
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for _ in range(args.repetitions):
        for name, path in sources.items():
            command = [sys.executable, "-m", "benchmarks.recsys", *sys.argv[1:], "--once", job]
            env = os.environ | {"PYTHONPATH": str(path)}
            made = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True)
            found[name].append(json.loads(made.stdout.splitlines()[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of MovieLens-1M; without it, generated ratings alone")
    parser.add_argument("--users", type=int, default=100_000, help="of the generated ratings; 0: leave them out")
    parser.add_argument("--per-round", type=int, default=1000, help="of these users")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--against", type=Path, help="a `src` folder of other sources, measured in turn")
    parser.add_argument("--out", type=Path, help="where run folders are written and removed (default: the system's)")
    parser.add_argument("--losses", default="squared", help="on MovieLens-1M, such as squared,weighted,bpr")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(args.once, args)))
        return
    print(json.dumps(describe()))
    losses = [f"movielens-{loss}" for loss in args.losses.split(",")] if args.data else []
    for job in [*losses, *(["generated"] if args.users else [])]:
        found = in_turn(job, args)
        middle = {
            name: {k: round(statistics.median(r[k] for r in runs), 3) for k in runs[0] if k != "digest"}
            for name, runs in found.items()
        }
        print(json.dumps({job: middle}, indent=2))
        if "other" in found:
            pairs = zip(found["this"], found["other"], strict=True)
            ratio = statistics.median(b["recorded_round_ms"] / a["recorded_round_ms"] for a, b in pairs)
            same = len({r["digest"] for runs in found.values() for r in runs}) == 1
            print(f"{job}: the other takes {ratio:.2f} times as long; models equal bit for bit: {same}")
    print(json.dumps({"load_after": round(os.getloadavg()[0], 2)}))


if __name__ == "__main__":
    main()
