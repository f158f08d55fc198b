"""A loop of one's own beside the Trainer's plain way: `python -m benchmarks.loops` prints seconds a round, and a ratio.

The same job, model, batches and optimiser, by a handler that a user could have written and by the Trainer with
engine="plain", both over `LocalFleet`, a round of one after a round of the other. What counts is the time of the
processor, so that other work on the machine does not. `--many-threads` gives the handler all of torch's threads, as if
nobody saw to it.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.nn import functional

from benchmarks import jobs, machine, work
from mutirao import LocalFleet, Reply, Request, Run, Trainer, train
from mutirao.aggregation import FedAvg
from mutirao.core.fleet import Site
from mutirao.randomness import rng
from mutirao.selection import Uniform


def own_loop(job: jobs.Job, threads: int = 0):
    """A handler as a user writes it: torch's optimiser over shuffled batches."""
    model = work.build(job)

    def handler(request: Request, site: Site) -> Reply:
        if threads:
            torch.set_num_threads(threads)
        x, y = (torch.from_numpy(part) for part in site.data)
        model.load_state_dict({name: torch.from_numpy(array) for name, array in request.arrays.items()})
        optimizer, total = torch.optim.SGD(model.parameters(), lr=job.lr), 0.0
        order = rng(request.config["seed"], request.config["round"], "batches", site.id).permutation(len(y))
        for rows in torch.from_numpy(order).split(job.batch_size):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        trained = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        return Reply(trained, metrics={"loss": total / len(y)}, n=len(y))

    return handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=["M", "C"], default="M")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--many-threads", action="store_true", help="the handler takes all of torch's threads")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        jobs.write(jobs.JOBS[args.job], Path(folder))
        data = jobs.read(folder)
    job = data.job
    population = {f"c{i:02d}": tuple(map(np.ascontiguousarray, data.client(i))) for i in range(job.clients)}
    trainer = Trainer(partial(work.build, job), lr=job.lr, batch_size=job.batch_size, engine="plain")
    handlers = {"own": own_loop(job, machine.cores() if args.many_threads else 0), "plain": trainer}
    parts = {"select": Uniform(job.per_round), "aggregate": FedAvg(), "rounds": args.rounds + 1}
    runs = {name: Run(trainer.initial(0)) for name in handlers}
    rounds = {name: train(runs[name], LocalFleet(handler, population), **parts) for name, handler in handlers.items()}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in handlers}
    for number in range(args.rounds + 1):
        for name in [*handlers][:: 1 if number % 2 else -1]:  # each goes first in turn
            began = time.process_time(), time.perf_counter()
            next(rounds[name])
            spent[name].append((time.process_time() - began[0], time.perf_counter() - began[1]))
    figures = {
        name: {"cpu_s": median(c for c, _ in s[1:]), "wall_s": median(w for _, w in s[1:])} for name, s in spent.items()
    }
    ratios = {k: round(figures["own"][k] / figures["plain"][k], 3) for k in ("cpu_s", "wall_s")}
    far = max(float(np.abs(runs["own"].arrays[k] - v).max()) for k, v in runs["plain"].arrays.items())
    print(
        json.dumps({"job": job.name, "rounds": args.rounds, **figures, "own_to_plain": ratios, "models_differ_by": far})
    )


if __name__ == "__main__":
    main()
