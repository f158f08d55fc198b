"""A million virtual clients: `python -m benchmarks.million` prints what rounds of some of them cost.

    python -m benchmarks.million                                              # a hundred a round by lot, nothing kept
    python -m benchmarks.million --select aoiu --per-round 1000 --rounds 1000 --record

With `--record` a run folder is kept, and reading it (report, verify, going on) is measured, too, each in a process of
its own. Synthetic: 20 samples of 16 features each; the labels come from a linear rule that differs a little between
clients.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from benchmarks.machine import peak_mb, resident_mb, written
from mutirao.aggregation import FedAvg
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run, train
from mutirao.runs.run_folder import Folder
from mutirao.selection import AoIU, Uniform
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import VirtualClients
from mutirao.training.trainer import Trainer

SAMPLES, FEATURES, CLASSES = 20, 16, 4
SHOWN = {1, 10, 100, 1000, 10_000}  # rounds that are printed
WINDOW = 10  # rounds up to one that is printed: its figures are their medians
READERS = {
    "report": "from mutirao.report import write_report; write_report(path)",
    "verify": "from mutirao.runs.verify import verify; assert not verify(path)[1]",
    "go on": "from mutirao.runs.run_folder import Folder; assert Folder(path).newest().round",
}


def population(clients: int) -> VirtualClients:
    """All samples in one storage, client by client."""
    draw = np.random.default_rng(0)
    x = draw.random((clients * SAMPLES, FEATURES), dtype=np.float32)
    x -= 0.5
    scores = x @ draw.standard_normal((FEATURES, CLASSES), dtype=np.float32)
    scores += np.repeat(draw.random((clients, CLASSES), dtype=np.float32), SAMPLES, axis=0)
    rows = np.arange(clients * SAMPLES)
    return VirtualClients(x, scores.argmax(1), rows, np.arange(clients + 1, dtype=np.int64) * SAMPLES)


@contextlib.contextmanager
def folder_for(args: argparse.Namespace) -> Iterator[Folder | None]:
    """The run folder, if one is kept; without a name it goes when all is measured."""
    if args.record is None:
        yield None
        return
    path = Path(args.record or tempfile.mkdtemp(prefix="million-"))
    try:
        with Folder.open(path) as folder:
            yield folder
    finally:
        if not args.record:
            shutil.rmtree(path)


def read_again(path: Path) -> dict[str, dict[str, float]]:
    """Seconds of processor time and peak memory of all that reads the folder, a process each."""
    script = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); {}; import time; "
    script += "print(time.process_time(), *open('/proc/self/status').read().split('VmHWM:')[1].split()[:1])"
    found = {}
    for name, work in READERS.items():
        done = subprocess.run(
            [sys.executable, "-c", script.format(work), str(path)], check=True, capture_output=True, text=True
        )
        seconds, peak = map(float, done.stdout.split()[-2:])
        found[name] = {"seconds": round(seconds, 2), "peak_mb": round(peak / 1024)}
    return found


def main() -> None:
    """Make the rounds, and print what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--select", choices=["uniform", "aoiu"], default="uniform")
    parser.add_argument("--record", nargs="?", const="", metavar="FOLDER", help="keep a run folder")
    args = parser.parse_args()

    began = time.perf_counter()
    clients = population(args.clients)
    made = time.perf_counter()
    trainer = Trainer(lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES)), batch_size=10)
    fleet, run = LocalFleet(trainer, clients), Run(trainer.initial(0))
    select = AoIU(args.per_round, classes=CLASSES) if args.select == "aoiu" else Uniform(args.per_round)
    lines: list[dict[str, float]] = []
    shown: dict[int, dict[str, float]] = {}
    with folder_for(args) as folder:
        if folder is not None:
            folder.begin(run, f'recipe = "million"\nrounds = {args.rounds}\nclients = {args.clients}\n')
        started = time.perf_counter()
        before = (started, time.process_time(), written())
        for done in train(run, fleet, rounds=args.rounds, select=select, aggregate=FedAvg()):
            if folder is not None:
                folder.commit(run, done)
            now = (time.perf_counter(), time.process_time(), written())
            seconds, processor, size = (b - a for a, b in zip(before, now, strict=True))
            lines.append({"seconds": seconds, "processor_s": processor, "bytes": size})
            if run.round in SHOWN or run.round == args.rounds:
                last = lines[-WINDOW:] if run.round >= WINDOW else lines[-1:]
                line = {k: float(np.median([one[k] for one in last])) for k in last[0]}
                line["most_bytes"] = max(one["bytes"] for one in last)
                line |= {"resident_mb": resident_mb(), "peak_mb": peak_mb()}
                shown[run.round] = line
                print(f"round {run.round}: {told(line)}", file=sys.stderr, flush=True)
            before = (time.perf_counter(), time.process_time(), written())
        finished = time.perf_counter()
        figures: dict[str, Any] = {
            "data_s": made - began,
            "rounds_s": finished - started,
            "rounds": {number: told(line) for number, line in shown.items()},
            "train_loss_first": run.history[0]["train_loss"],
            "train_loss_last": run.history[-1]["train_loss"],
            "digest": digest(run.arrays),
        }
        if folder is not None:
            figures["bytes_in_all"] = sum(line["bytes"] for line in lines)
            summary = {"final": {}, "rounds": run.round, "digest": digest(run.arrays), "clients": len(run.roster)}
            folder.finish(run, summary)
            figures["files_mb"] = {
                f.name: round(f.stat().st_size / 1e6, 2) for f in sorted(folder.path.iterdir()) if f.is_file()
            }
            kept = [f.stat().st_size for f in folder.checkpoints.iterdir()]
            figures["files_mb"]["checkpoints"] = round(sum(kept) / 1e6, 2)
            figures["reading"] = read_again(folder.path)
    print(json.dumps(figures, indent=2))


def told(line: dict[str, float]) -> dict[str, float]:
    """Figures with as many digits as mean anything."""
    return {k: round(v, 4) if v < 10 else round(v) for k, v in line.items()}


if __name__ == "__main__":
    main()
