"""Why SCAFFOLD collapses to 10.0% with 100 parties in NIID-Bench's table, and what does not.

    python -m research.collapse --data DIR/cifar-10-batches-bin --rounds 20

A plain loop of SCAFFOLD as that benchmark had it when its table was made: simple-cnn, ten of 100 parties, batch 64, ten
local epochs, SGD 0.01 with momentum 0.9, control variates that begin as a random network's weights, corrections behind
the optimiser's step, and c moved by the mean change of those *picked*. (Since August 2022 its code divides by all
parties.) Then one thing is changed at a time. Each line is a round: test accuracy, the largest number in the model, in
c, and in the correction c - c_k of a party.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.aggregation.base import effective_steps
from mutirao.datasets.labelled import load_labelled
from mutirao.partitioning import dirichlet
from mutirao.randomness import rng
from mutirao.systems.images.networks import make_network

PARTIES, PICKED, EPOCHS, BATCH, LR, MOMENTUM = 100, 10, 10, 64, 0.01, 0.9
# What each arm has: where c and c_k begin, where the correction goes, what x - y is divided by, and what the changes of
# the c_k are: the papers' algorithm has all parties.
ARMS: dict[str, tuple[str, str, str, str]] = {
    "as the table was made": ("random", "behind", "steps", "picked"),
    "c moves by a share of all parties": ("random", "behind", "steps", "all"),
    "and begins at 0": ("zero", "behind", "steps", "all"),
    "ours": ("zero", "inside", "reach", "all"),
    "ours, but c moves by those picked": ("zero", "inside", "reach", "picked"),
}


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def local(model: nn.Module, x: Tensor, y: Tensor, draw: Any, gap: list[Tensor], where: str, epochs: int) -> int:
    """One party's training; how many steps it made."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=1e-5)
    steps = 0
    for _ in range(epochs):
        for rows in np.array_split(draw.permutation(len(y)), -(-len(y) // BATCH)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            if where == "inside":
                for p, b in zip(model.parameters(), gap, strict=True):
                    p.grad.add_(b)
            optimizer.step()
            if where == "behind":
                with torch.no_grad():
                    for p, b in zip(model.parameters(), gap, strict=True):
                        p.sub_(LR * b)
            steps += 1
    return steps


def most(tensors: Any) -> float:
    return max(float(t.abs().max()) for t in tensors)


def follow(data: Any, parts: list[Any], arm: str, rounds: int, seed: int, epochs: int) -> list[dict[str, float]]:
    start, where, divide, shared = ARMS[arm]
    torch.manual_seed(seed)
    model, other = (make_network("small", (3, 32, 32), 64, 10) for _ in range(2))
    x = weights_of(model)
    c = weights_of(other) if start == "random" else [torch.zeros_like(p) for p in x]
    own = [[t.clone() for t in c] for _ in range(PARTIES)]
    images, labels = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    test = torch.from_numpy(data.x_test[:2000]), torch.from_numpy(data.y_test[:2000])
    lines = []
    for number in range(1, rounds + 1):
        draw = rng(seed, number, "collapse")
        ends, change, widest = [], [torch.zeros_like(p) for p in x], 0.0
        picked = draw.permutation(PARTIES)[:PICKED]
        total = sum(len(parts[k]) for k in picked)
        for k in picked:
            with torch.no_grad():
                for p, value in zip(model.parameters(), x, strict=True):
                    p.copy_(value)
            gap = [a - b for a, b in zip(c, own[k], strict=True)]
            widest = max(widest, most(gap))
            steps = local(model, images[parts[k]], labels[parts[k]], draw, gap, where, epochs)
            far = LR * steps if divide == "steps" else effective_steps(LR, MOMENTUM, 0.0, steps)
            end = weights_of(model)
            new = [mine - all_ + (a - b) / far for mine, all_, a, b in zip(own[k], c, x, end, strict=True)]
            for delta, old, now in zip(change, own[k], new, strict=True):
                delta += (now - old) / (PARTIES if shared == "all" else PICKED)
            own[k] = new
            ends.append((len(parts[k]) / total, end))
        x = [sum(share * end[i] for share, end in ends) for i in range(len(x))]
        c = [a + b for a, b in zip(c, change, strict=True)]
        with torch.no_grad():
            for p, value in zip(model.parameters(), x, strict=True):
                p.copy_(value)
            right = (model(test[0]).argmax(1) == test[1]).float().mean()
        line = {"round": number, "accuracy": float(right), "model": most(x), "c": most(c), "correction": widest}
        lines.append(line)
        print(arm, " ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)
        if not np.isfinite(line["model"]):
            break
    return lines


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--data", required=True)
    ask.add_argument("--rounds", type=int, default=20)
    ask.add_argument("--epochs", type=int, default=EPOCHS)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--arms", default=",".join(map(str, range(len(ARMS)))), help="numbers of the arms, from 0")
    ask.add_argument("--out", default="")
    given = ask.parse_args()
    torch.set_num_threads(1)
    data = load_labelled(given.data, given.seed)
    parts = dirichlet(data.y_train, PARTIES, 0.5, rng(given.seed, 0, "partition"), min_size=10)
    names = list(itertools.compress(ARMS, [str(i) in given.arms.split(",") for i in range(len(ARMS))]))
    found = {arm: follow(data, parts, arm, given.rounds, given.seed, given.epochs) for arm in names}
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print("| arm | rounds | accuracy | largest weight |\n|---|---|---|---|")
    for arm, lines in found.items():
        print(f"| {arm} | {len(lines)} | {lines[-1]['accuracy']:.3f} | {lines[-1]['model']:.3g} |")


if __name__ == "__main__":
    sys.exit(main())
