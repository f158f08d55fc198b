"""This project, through its public names only."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import jobs, work
from benchmarks.contenders import options
from mutirao import LocalFleet, Round, Run, Trainer, train, virtual_clients
from mutirao.aggregation import FedAvg, Scaffold
from mutirao.selection import Uniform


def recorded(run: Run, rounds: Iterator[Round], path: Path) -> Iterator[Round]:
    """The same rounds, each written to a run folder before it counts as done."""
    from mutirao.runs.run_folder import Folder

    with Folder.open(path) as folder:
        folder.begin(run, 'recipe = "benchmark"\n')
        for done in rounds:
            folder.commit(run, done)
            yield done


if __name__ == "__main__":
    args = options()
    data = jobs.read(args.data)
    job, clock = data.job, work.Clock()
    trainer = Trainer(partial(work.build, job), lr=job.lr, batch_size=job.batch_size, engine=args.engine)
    parts = [np.arange(*data.offsets[i : i + 2]) for i in range(job.clients)]
    fleet = LocalFleet(trainer, virtual_clients(data.x, data.y, parts))
    run = Run({k: v.numpy().copy() for k, v in work.initial(job).state_dict().items()}, seed=job.seed)
    method = FedAvg() if job.method == "fedavg" else Scaffold(population=job.clients)
    rounds = train(run, fleet, rounds=args.rounds, select=Uniform(job.per_round), aggregate=method)
    for done in recorded(run, rounds, args.scratch / "run") if args.record else rounds:
        clock.tick(sum(row["n"] for row in done.clients))
    work.report(clock, {k: torch.from_numpy(v) for k, v in run.arrays.items()}, data, "mutirao")
