"""Many clients with a state each, as SCAFFOLD has them: `python -m benchmarks.states` prints what a round costs.

    python -m benchmarks.states                 # 10,000 clients, a model and a state of 100 kB each, 100 a round
    python -m benchmarks.states --way whole     # all states in memory, and in every checkpoint

First everybody comes once, in turn. Then `--rounds` more are made, into a run folder that goes when all is measured,
and the run is taken up again from its last round. A client does next to nothing: this is about keeping its state.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import peak_mb, resident_mb, written
from mutirao.aggregation import FedAvg
from mutirao.core.arrays import digest
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Run, train
from mutirao.runs.run_folder import Folder
from mutirao.selection import RoundRobin, Uniform
from mutirao.simulation.local_fleet import LocalFleet


def remember(request: Request, site: Site) -> Reply:
    """The state moves towards the model, and the model away from the state."""
    before = site.state.get("control", np.zeros_like(request.arrays["w"]))
    site.state["control"] = before + np.float32(0.1) * (request.arrays["w"] - before) + np.float32(site.data)
    return Reply({"w": request.arrays["w"] - np.float32(0.01) * site.state["control"]}, n=1)


def main() -> None:
    """Make the rounds, and print what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--kilobytes", type=int, default=100, help="of a state, and of the model")
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--way", choices=["files", "whole"], default="files")
    args = parser.parse_args()
    people = {f"c{i:06d}": 1e-6 * i for i in range(args.clients)}
    run, fleet = Run({"w": np.ones(args.kilobytes * 250, np.float32)}), LocalFleet(remember, people)
    turns = -(-args.clients // args.per_round)
    path = Path(tempfile.mkdtemp(prefix="states-"))
    seconds: list[float] = []
    busy: list[float] = []
    sizes: list[int] = []
    try:
        with Folder.open(path) as folder:
            folder.keep_bytes = 0  # the last three checkpoints
            if args.way == "files":
                fleet.use_state_store(folder.sites.states)
            folder.begin(run, 'recipe = "states"\n')
            start = time.perf_counter()
            for done in train(run, fleet, rounds=turns, select=RoundRobin(args.per_round), aggregate=FedAvg()):
                if args.way == "files":  # the other way would write a gigabyte here every time
                    folder.commit(run, done)
            filled = time.perf_counter() - start
            print(f"everybody came once, in {filled:.1f} s", file=sys.stderr, flush=True)
            rounds, start, worked, before = run.round + args.rounds, time.perf_counter(), time.process_time(), written()
            for done in train(run, fleet, rounds=rounds, select=Uniform(args.per_round), aggregate=FedAvg()):
                folder.commit(run, done)
                seconds.append(time.perf_counter() - start)
                busy.append(time.process_time() - worked)
                sizes.append(written() - before)
                start, worked, before = time.perf_counter(), time.process_time(), written()
            figures = {
                "way": args.way,
                "filling_s": round(filled, 1),
                "round_s": round(float(np.median(seconds)), 3),
                "processor_s": round(float(np.median(busy)), 3),
                "slowest_s": round(max(seconds), 3),
                "written_mb_a_round": round(float(np.median(sizes)) / 1e6, 1),
                "resident_mb": round(resident_mb()),
                "peak_mb": round(peak_mb()),
                "on_disk_mb": round(sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) / 1e6),
                "digest": digest(run.arrays)[:16],
            }
        start, worked = time.perf_counter(), time.process_time()
        with Folder.open(path) as folder:
            again = folder.resume('recipe = "states"\n')
        figures["resume_s"] = round(time.perf_counter() - start, 1)
        figures["resume_processor_s"] = round(time.process_time() - worked, 1)
        figures["resumed_as_it_was"] = again is not None and digest(again.arrays) == digest(run.arrays)
    finally:
        shutil.rmtree(path)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
