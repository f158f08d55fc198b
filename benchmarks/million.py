"""A million virtual clients, a hundred a round: `python -m benchmarks.million` prints what it costs.

Synthetic: 20 samples of 16 features each; the labels come from a linear rule that differs a little between clients.
"""

import argparse
import json
import resource
import time

import numpy as np
from torch import nn

from mutirao.aggregation import FedAvg
from mutirao.core.rounds import Run, train
from mutirao.fleets.local import LocalFleet
from mutirao.selection import Uniform
from mutirao.training.samples import VirtualClients
from mutirao.training.trainer import Trainer

SAMPLES, FEATURES, CLASSES = 20, 16, 4


def population(clients: int) -> VirtualClients:
    """All samples in one storage, client by client."""
    draw = np.random.default_rng(0)
    x = draw.random((clients * SAMPLES, FEATURES), dtype=np.float32)
    x -= 0.5
    scores = x @ draw.standard_normal((FEATURES, CLASSES), dtype=np.float32)
    scores += np.repeat(draw.random((clients, CLASSES), dtype=np.float32), SAMPLES, axis=0)
    rows = np.arange(clients * SAMPLES)
    return VirtualClients(x, scores.argmax(1), rows, np.arange(clients + 1, dtype=np.int64) * SAMPLES)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()

    began = time.perf_counter()
    clients = population(args.clients)
    made = time.perf_counter()
    trainer = Trainer(lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES)), batch_size=10)
    fleet, run = LocalFleet(trainer, clients), Run(trainer.initial(0))
    seconds, peaks = [], []
    started = time.perf_counter()
    for done in train(run, fleet, rounds=args.rounds, select=Uniform(args.per_round), aggregate=FedAvg()):
        seconds.append(done.row["seconds"])
        peaks.append(peak_mb())
    finished = time.perf_counter()
    figures = {
        "data_s": made - began,
        "start_s": finished - made - sum(seconds),  # the fleet, its roster, and what lies between rounds
        "first_round_s": seconds[0],
        "round_s": float(np.median(seconds[1:])) if len(seconds) > 1 else seconds[0],
        "rounds_s": finished - started,
        "peak_mb_first_round": peaks[0],
        "peak_mb_last_round": peaks[-1],
        "train_loss_first": run.history[0]["train_loss"],
        "train_loss_last": run.history[-1]["train_loss"],
    }
    print(json.dumps({k: round(v, 4) for k, v in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
