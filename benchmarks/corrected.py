"""What a correction of the local steps costs: rounds of Job M with FedAvg and other methods, in turn.

    python -m benchmarks.corrected

One process, the fused way, the same clients: a round of each method after the other, so that a noisy machine is as
noisy for all. Least and median times of a round, and the ratio of each method's to FedAvg's.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import jobs, machine, work
from mutirao import LocalFleet, Run, Trainer, train, virtual_clients
from mutirao.aggregation import FedAvg, FedDyn, FedNova, FedProx, Scaffold
from mutirao.selection import Uniform


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=60)
    ask.add_argument("--engine", default="fused")
    given = ask.parse_args()
    job = jobs.JOBS["M"]
    methods = [FedAvg(), FedProx(), FedNova(), Scaffold(population=job.clients), FedDyn(population=job.clients)]
    with tempfile.TemporaryDirectory() as folder:
        jobs.write(job, Path(folder))
        data = jobs.read(folder)
        parts = [np.arange(*data.offsets[i : i + 2]) for i in range(job.clients)]
        clients = virtual_clients(data.x, data.y, parts)
        start = {k: v.numpy().copy() for k, v in work.initial(job).state_dict().items()}
        going = {}
        for method in methods:
            trainer = Trainer(partial(work.build, job), lr=job.lr, batch_size=job.batch_size, engine=given.engine)
            run, fleet = Run(dict(start), seed=job.seed), LocalFleet(trainer, clients)
            going[method] = train(run, fleet, rounds=given.rounds, select=Uniform(job.per_round), aggregate=method)
        seconds: dict[object, list[float]] = {method: [] for method in methods}
        for number in range(given.rounds):
            shift = number % len(methods)
            for method in methods[shift:] + methods[:shift]:
                began = time.perf_counter()
                next(going[method])
                if number >= 10:  # by then nearly every client has been there, and has a state
                    seconds[method].append(time.perf_counter() - began)
    print(machine.describe())
    print("| method | least | median | of FedAvg's, least | median |\n|---|---|---|---|---|")
    least, middle = min(seconds[methods[0]]), median(seconds[methods[0]])
    for method, each in seconds.items():
        one, two = min(each), median(each)
        name = type(method).__name__
        print(f"| {name} | {1e3 * one:.2f} ms | {1e3 * two:.2f} ms | {one / least:.2f} | {two / middle:.2f} |")


if __name__ == "__main__":
    main()
