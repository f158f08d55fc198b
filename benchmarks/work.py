"""The work every contender does: the same first model, the same local epoch, the same judge."""

import json
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.jobs import Data, Job
from benchmarks.models import MODELS

State = dict[str, Tensor]


def build(job: Job) -> nn.Module:
    """The model of a job, freshly initialised."""
    return MODELS[job.model](job.shape, job.classes)


def initial(job: Job) -> nn.Module:
    """The first global model, the same for every contender."""
    torch.manual_seed(job.seed)
    return build(job)


def fit(model: nn.Module, x: Tensor, y: Tensor, job: Job) -> None:
    """One epoch of SGD in shuffled mini-batches, for contenders that leave the local loop to their user."""
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr)
    for batch in torch.randperm(len(y)).split(job.batch_size):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.inference_mode()
def accuracy(state: State, data: Data) -> float:
    """Share of the common test set that a model gets right."""
    model = build(data.job).eval()
    model.load_state_dict(state)
    x, y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(100), y.split(100), strict=True))
    return right / len(y)


class Clock:
    """Notes when rounds end, on the clock that all processes of the machine share."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.samples: list[int] = []

    def tick(self, samples: int) -> None:
        """A round in which so many samples were trained on has ended."""
        self.ends.append(time.monotonic())
        self.samples.append(samples)


def report(clock: Clock, state: State, data: Data, *packages: str) -> None:
    """Print what the harness reads: one line of JSON, the last of the output."""
    torch.set_num_threads(1)  # whatever the contender used: the judge costs all of them the same
    finite = all(np.isfinite(v.numpy()).all() for v in state.values())
    result = {
        "ends": clock.ends,
        "samples": clock.samples,
        "accuracy": accuracy(state, data) if finite else None,
        "versions": {name: version(name) for name in (*packages, "torch", "numpy")},
    }
    print(json.dumps(result), flush=True)
    sys.stdout.flush()
