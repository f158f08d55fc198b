"""The jobs: how much work there is, and the data it is done on, written once and mapped by every contender."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

SIGMA = 0.366  # the largest of 100 log-normal clients then holds 2.4 times the mean


@dataclass(frozen=True)
class Job:
    """FedAvg on `clients`, `per_round` of them a round, each making one epoch of SGD over its samples."""

    name: str
    about: str
    model: str
    shape: tuple[int, ...]
    classes: int
    samples: int
    batch_size: int
    lr: float
    signal: float
    rounds: int
    repetitions: int
    unequal: bool = False
    clients: int = 100
    per_round: int = 10
    test: int = 2000
    seed: int = 0
    method: str = "fedavg"  # another one is for ours alone

    def sizes(self) -> list[int]:
        """How many samples each client holds; `samples` is their mean."""
        if not self.unequal:
            return [self.samples] * self.clients
        spread = [NormalDist(0, SIGMA).inv_cdf((i + 0.5) / self.clients) for i in range(self.clients)]
        raw = np.exp(np.random.default_rng(self.seed).permutation(spread))
        return [max(1, round(size)) for size in raw / raw.mean() * self.samples]


MLP = {"model": "mlp", "shape": (136,), "classes": 5, "samples": 2400, "batch_size": 32, "lr": 0.05, "signal": 0.2}
CNN = {"model": "cnn", "shape": (3, 32, 32), "classes": 10, "samples": 500, "batch_size": 50, "lr": 0.05, "signal": 0.6}
WIDE = {"model": "wide", "shape": (784,), "classes": 10, "samples": 600, "batch_size": 32, "lr": 0.05, "signal": 0.1}
HAND = {"model": "femnist", "shape": (1, 28, 28), "classes": 62, "samples": 200, "batch_size": 20, "lr": 0.05}
TEXT = {"shape": (32, 24), "classes": 10, "samples": 500, "batch_size": 50, "signal": 0.3}
PHOTO = {"shape": (3, 32, 32), "classes": 10, "samples": 200, "batch_size": 50, "lr": 0.05, "signal": 0.6}
JOBS = {
    job.name: job
    for job in (
        Job("M", "small dense model, 136-64-5", **MLP, rounds=50, repetitions=5),
        Job("M-unequal", "the same with clients of unequal sizes", **MLP, rounds=50, repetitions=5, unequal=True),
        Job("S", "Job M with SCAFFOLD's correction", **MLP, rounds=50, repetitions=5, method="scaffold"),
        Job("C", "convolutional network on 3x32x32 images", **CNN, rounds=5, repetitions=3, test=500),
        Job("W", "dense model 784-512-256-10 with dropout", **WIDE, rounds=20, repetitions=3),
        Job("T", "transformer, two layers of 64", model="transformer", **TEXT, lr=0.05, rounds=10, repetitions=3),
        Job("F", "FEMNIST's convolutional network", **HAND, signal=0.8, rounds=8, repetitions=3, test=500),
        Job("L", "LSTM, two layers of 100", model="lstm", **TEXT, lr=0.5, rounds=8, repetitions=3),
        Job("B", "ResNet-14, batch normalisation", model="resnet-batch", **PHOTO, rounds=6, repetitions=3, test=500),
        Job("G", "ResNet-14, group normalisation", model="resnet-group", **PHOTO, rounds=6, repetitions=3, test=500),
    )
}


@dataclass(frozen=True)
class Data:
    """A job and its samples: those of client i lie at offsets[i]:offsets[i + 1]."""

    job: Job
    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    def client(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of one client, without copying them."""
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.x[rows], self.y[rows]


def write(job: Job, folder: Path) -> None:
    """Draw the samples of a job from its seed: a pattern for each class, drowned in noise."""
    rng = np.random.default_rng([job.seed, 1])
    offsets = np.concatenate([[0], np.cumsum(job.sizes())])
    patterns = job.signal * rng.standard_normal((job.classes, *job.shape))
    if len(job.shape) == 3:  # blocks of 8x8 equal pixels, which a convolution can see
        patterns = patterns[..., ::8, ::8].repeat(8, -1).repeat(8, -2)[..., : job.shape[1], : job.shape[2]]
    for prefix, total in (("", int(offsets[-1])), ("test_", job.test)):
        y = rng.integers(job.classes, size=total)
        x = np.lib.format.open_memmap(folder / f"{prefix}x.npy", "w+", np.float32, (total, *job.shape))
        for start in range(0, total, 1000):
            part = y[start : start + 1000]
            x[start : start + 1000] = patterns[part] + rng.standard_normal((len(part), *job.shape), np.float32)
        np.save(folder / f"{prefix}y.npy", y)
    np.save(folder / "offsets.npy", offsets)
    (folder / "job.json").write_text(json.dumps(asdict(job)))


def read(folder: Path | str) -> Data:
    """Map what `write` wrote: pages are shared between processes and read when first used, whoever the contender."""
    folder = Path(folder)
    settings: dict[str, Any] = json.loads((folder / "job.json").read_text())
    job = Job(**settings | {"shape": tuple(settings["shape"])})
    return Data(job, *(np.load(folder / f"{k}.npy", mmap_mode="c") for k in ("x", "y", "offsets", "test_x", "test_y")))
