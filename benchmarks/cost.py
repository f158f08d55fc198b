"""When stacking clients pays: `python -m benchmarks.cost` prints what a round of models of many sizes costs both ways.

Twenty clients, eight batches each, on one thread, in processor time: by the plain path one after the other, and
stacked. The engine's rule (`HEAVY_CALL` in `engine/cost.py`) follows from where the ratio falls below one.
"""

import itertools
import time

import numpy as np
from torch import nn

from benchmarks.models import Transformer
from mutirao import Request, Trainer
from mutirao.core.fleet import Site
from mutirao.training.engine.dispatch import HEAVY_CALL, count_calls
from mutirao.training.engine.jobs import plan_jobs
from mutirao.training.samples import virtual_clients

CLIENTS, BATCHES, ROUNDS, CLASSES = 20, 8, 6, 10


def dense(*widths: int) -> nn.Module:
    """Linear layers with tanh between them, which the kernel for dense networks leaves to others."""
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def convolutions(channels: int, side: int, kernel: int) -> nn.Module:
    """Two convolutions and two pools."""
    return nn.Sequential(
        nn.Conv2d(1, channels, kernel, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, kernel, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (side // 4) ** 2, CLASSES),
    )


CASES = [  # name, model, shape of a sample, batch size
    *(
        (f"dense {'-'.join(map(str, w))}", lambda w=w: dense(*w), w[:1], 32)
        for w in ((20, 16, 10), (784, 10), (784, 64, 10), (784, 256, 10), (784, 512, 256, 10))
    ),
    *(
        (f"transformer, {t} tokens, {w} wide", lambda t=t, w=w: Transformer(t, 16, CLASSES, w), (t, 16), b)
        for t, w, b in ((8, 16, 16), (16, 32, 16), (16, 32, 32), (32, 32, 32), (32, 64, 50))
    ),
    *(
        (f"convolutions {k}x{k}, {c} channels, {s}x{s}", lambda c=c, s=s, k=k: convolutions(c, s, k), (1, s, s), b)
        for c, s, k, b in ((4, 8, 3, 16), (4, 12, 3, 16), (8, 28, 3, 16), (8, 28, 3, 32), (12, 28, 3, 20))
    ),
]


def measure(model, shape: tuple[int, ...], batch: int) -> tuple[float, dict[str, float]]:
    """Operations a call, and the least processor time of a round each way; the two take turns."""
    draw, samples = np.random.default_rng(0), batch * BATCHES
    x = draw.standard_normal((CLIENTS * samples, *shape), dtype=np.float32)
    clients = virtual_clients(x, draw.integers(CLASSES, size=len(x)), np.split(np.arange(len(x)), CLIENTS))
    sites = {client: Site(client, clients[client]) for client in clients}
    trainers = {e: Trainer(model, lr=0.05, batch_size=batch, engine=e, workers=1) for e in ("plain", "stacked")}
    arrays = trainers["plain"].initial(0)
    seconds: dict[str, list[float]] = {engine: [] for engine in trainers}
    for number in range(1, ROUNDS + 1):
        requests = {client: Request("train", arrays, {"seed": 0, "round": number}) for client in sites}
        for engine, trainer in trainers.items():
            began = time.process_time()
            trainer.many(requests, sites)
            seconds[engine].append(time.process_time() - began)
    flops, calls = count_calls(trainers["plain"], plan_jobs(trainers["plain"], requests, sites)[0][0])
    return flops / calls, {engine: min(some[2:]) for engine, some in seconds.items()}


def main() -> None:
    print(f"from {HEAVY_CALL:,} operations a call on, clients are trained one by one\n")
    print("| model | batch | operations a call | plain | stacked | plain / stacked |\n|---|---:|---:|---:|---:|---:|")
    for name, model, shape, batch in CASES:
        size, spent = measure(model, shape, batch)
        plain, stacked = (f"{spent[e] * 1000:.0f} ms" for e in ("plain", "stacked"))
        ratio = spent["plain"] / spent["stacked"]
        print(f"| {name} | {batch} | {size / 1000:,.0f} k | {plain} | {stacked} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
