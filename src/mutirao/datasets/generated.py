"""Synthetic sets as published, made on the spot with their own users: FCube and Synthetic(alpha, beta)."""

import math
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.randomness import rng

FCUBE = "fcube"
PAIR, CUBE_TEST = 1000, 1000  # samples of each pair of octants, and of the test set
USERS, MOST_USERS = 30, 1000
WIDTH, CLASSES = 60, 10
LEAST, LOG_MEAN, LOG_DEVIATION = 50, 4.0, 2.0  # of the samples of a user
HELD_OUT = 0.1
FORM = re.compile(r"synthetic-(?:(iid)|(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?))(?:-(\d{1,6}))?")

Floats = npt.NDArray[np.float32]
Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Names = npt.NDArray[np.str_]


class Made(NamedTuple):
    """A set with a test part, its classes' names, and whose each sample is."""

    x_train: Floats
    y_train: Labels
    x_test: Floats
    y_test: Labels
    names: tuple[str, ...]
    users: Names
    test_users: Names


def is_generated(data: str) -> bool:
    """Whether that is the name of a set made here."""
    return data == FCUBE or FORM.fullmatch(data) is not None


def generate(data: str, seed: int) -> Made:
    """The set of that name: `fcube`, `synthetic-ALPHA-BETA` or `synthetic-iid`, perhaps with `-USERS`.

    >>> cube = generate("fcube", seed=0)
    >>> cube.x_train.shape, sorted(set(cube.users.tolist()))
    ((4000, 3), ['u0', 'u1', 'u2', 'u3'])
    """
    if data == FCUBE:
        return make_fcube(seed)
    found = FORM.fullmatch(data)
    if found is None:
        raise ConfigError(f"data: {data!r} is none of fcube, synthetic-iid, and synthetic-1-1 or other numbers")
    iid, alpha, beta, users = found.groups()
    count = int(users or USERS)
    if not 1 <= count <= MOST_USERS:
        raise ConfigError(f"data: {data!r} has {count} users; from 1 to {MOST_USERS:,} can be made")
    return make_synthetic(float(alpha or 0), float(beta or 0), count, seed, bool(iid))


def make_fcube(seed: int) -> Made:
    """Points of the cube [-1, 1]^3 with class 0 where x_1 > 0, else 1; four users with two opposite octants each.

    Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos", ICDE 2022. User u has the octants of the
    signs (+, s_2, s_3) and (-, -s_2, -s_3), where s_2 is - for u > 1 and s_3 for odd u: 500 points of each, so that
    classes are balanced and inputs have nothing in common. The test set is the whole cube.
    """
    draw = rng(seed, 0, "fcube train")
    users = np.repeat(np.arange(4), PAIR)
    signs = np.stack([np.ones(4 * PAIR), np.where(users > 1, -1, 1), np.where(users % 2, -1, 1)], 1)
    mirrored = np.where(np.arange(4 * PAIR) % 2, -1, 1)[:, None]
    x = ((1 - draw.random((4 * PAIR, 3))) * signs * mirrored).astype(np.float32)  # above 0 before it has a sign
    test = rng(seed, 0, "fcube test").uniform(-1, 1, (CUBE_TEST, 3)).astype(np.float32)
    y, y_test = ((points[:, 0] <= 0).astype(np.int64) for points in (x, test))
    toward = test * np.where(test[:, :1] > 0, 1, -1)  # as if the first number were above 0
    theirs = 2 * (toward[:, 1] < 0) + (toward[:, 2] < 0)
    return Made(x, y, test, y_test, ("x1 > 0", "x1 < 0"), named(users, 4), named(theirs, 4))


def make_synthetic(alpha: float, beta: float, users: int, seed: int, iid: bool = False) -> Made:
    """Synthetic(alpha, beta): y = argmax(W_k x + b_k), where users differ in models by alpha and in inputs by beta.

    Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, after Shamir, Srebro and Zhang, ICML
    2014: W_k, b_k ~ N(u_k, 1), u_k ~ N(0, alpha); x ~ N(v_k, S), S_jj = j^-1.2, v_kj ~ N(B_k, 1), B_k ~ N(0, beta),
    60 numbers, 10 classes, lognormal(4, 2) + 50 samples. Alpha and beta are deviations, as in the paper's code. `iid`:
    one W, b ~ N(0, 1) for all, and v_k = 0. A tenth of each user's samples is held out. As published, u_k moves the
    scores of all classes alike, so that alpha changes no label: it is the draws of W_k that make users differ.
    """
    common = rng(seed, 0, "synthetic users")
    sizes = common.lognormal(LOG_MEAN, LOG_DEVIATION, users).astype(np.int64) + LEAST
    models, inputs = common.normal(0, alpha, users), common.normal(0, beta, users)
    one = common.normal(0, 1, (WIDTH, CLASSES)), common.normal(0, 1, CLASSES)
    deviation = np.arange(1, WIDTH + 1) ** -0.6
    xs, ys = [], []
    for k in range(users):
        draw = rng(seed, 0, "synthetic user", str(k))
        weights, bias = draw.normal(models[k], 1, (WIDTH, CLASSES)), draw.normal(models[k], 1, CLASSES)
        middle = draw.normal(inputs[k], 1, WIDTH)
        if iid:
            (weights, bias), middle = one, np.zeros(WIDTH)
        x = middle + deviation * draw.standard_normal((sizes[k], WIDTH))
        xs.append(x.astype(np.float32))
        ys.append((x @ weights + bias).argmax(1))
    owner, held = np.repeat(np.arange(users), sizes), np.concatenate([np.arange(n) >= n - cut(n) for n in sizes])
    x_all, y_all = np.concatenate(xs), np.concatenate(ys).astype(np.int64)
    whose = named(owner, users)
    names = tuple(map(str, range(CLASSES)))
    return Made(x_all[~held], y_all[~held], x_all[held], y_all[held], names, whose[~held], whose[held])


def cut(samples: int) -> int:
    """How many of a user's samples are held out: what is left of nine tenths, rounded down."""
    return samples - math.floor((1 - HELD_OUT) * samples)


def named(users: npt.NDArray[np.integer], count: int) -> Names:
    """Users' names, which sort as their numbers do."""
    width = len(str(count - 1))
    return np.asarray(np.array([f"u{k:0{width}d}" for k in range(count)])[users], np.str_)


def check_generated(path: Path | str | None) -> list[str]:
    """These sets need no files, so a path can only be a mistake."""
    if path is not None:
        raise ConfigError(f"generated sets read no files; leave {str(path)!r} out, and use data=fcube or synthetic-1-1")
    lines = []
    for name in (FCUBE, "synthetic-1-1"):
        made = generate(name, 0)
        count = f"{len(made.y_train):,} samples to train on, {len(made.y_test):,} to judge by (seed 0)"
        lines.append(f"{name}: {count}, of {len(np.unique(made.users))} users: partition=natural makes each a client")
    return lines


# ---- textures of CIFAR-10's shape ------------------------------------------------------------------


@cache
def _patterns() -> npt.NDArray[np.float32]:
    """Ten smooth coloured textures, 3 x 32 x 32 with deviation 1, that wrap around at the edges."""
    draw = rng(0, 0, "cifar10 patterns")  # the same for everybody, so that two calls belong together
    fy, fx = np.meshgrid(np.fft.fftfreq(32) * 32, np.fft.fftfreq(32) * 32, indexing="ij")
    out = np.empty((10, 3, 32, 32), np.float32)
    for c in range(10):
        angle, waves = np.pi * (c % 5) / 5, (3.0, 5.5)[c // 5]  # five directions, coarse and fine
        near = [(fx - s * waves * np.cos(angle)) ** 2 + (fy - s * waves * np.sin(angle)) ** 2 for s in (1, -1)]
        band = np.exp(-near[0] / 1.6) + np.exp(-near[1] / 1.6)
        grey, *tints = np.fft.ifft2(np.fft.fft2(draw.standard_normal((4, 32, 32))) * band).real
        coloured = np.stack([grey + 0.4 * tint for tint in tints])
        out[c] = coloured / coloured.std()
    return out


def synthetic(samples: int, draw: np.random.Generator) -> tuple[Images, Labels]:
    """Generated pictures of CIFAR-10's shape: ten textures, equally often, no two the same.

    A picture is the texture of its class, moved anywhere and in changed colours, mixed with a fainter one of
    another class, over a smooth background and under noise. Since a texture may lie anywhere, the average
    pictures of the classes hardly differ: a linear model gets a quarter right, a small convolutional network
    80% after a few epochs of a few thousand, and none all of them.

    >>> x, y = synthetic(6, np.random.default_rng(0))
    >>> x.shape, x.dtype, y.dtype
    ((6, 3, 32, 32), dtype('uint8'), dtype('int64'))
    """
    if samples < 1:
        raise ConfigError(f"synthetic: {samples!r} samples are too few, at least 1 is needed")
    y = draw.permutation(np.arange(samples) % 10).astype(np.int64)
    x = np.empty((samples, 3, 32, 32), np.uint8)
    for start in range(0, samples, 500):  # in blocks: as floats the set would take several times its size
        here = y[start : start + 500]
        other = (here + draw.integers(1, 10, len(here))) % 10
        mixed = _moved(here, draw) + _uniform(draw, 0, 1, (len(here), 1, 1, 1)) * _moved(other, draw)
        mixed *= _uniform(draw, 0.6, 1, (len(here), 1, 1, 1))
        mixed += _background(len(here), draw)
        mixed += 0.6 * draw.standard_normal(mixed.shape, np.float32)
        x[start : start + 500] = np.clip(118 + 36 * mixed, 0, 255).astype(np.uint8)
    return x, y


def _uniform(draw: np.random.Generator, low: float, high: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return draw.uniform(low, high, shape).astype(np.float32)


def _moved(labels: Labels, draw: np.random.Generator) -> npt.NDArray[np.float32]:
    """The texture of each label, moved by any number of pixels, each channel stronger or weaker."""
    twice = np.tile(_patterns(), (1, 1, 2, 2))
    windows = np.moveaxis(np.lib.stride_tricks.sliding_window_view(twice, (32, 32), axis=(2, 3)), 1, 3)
    down, across = draw.integers(0, 32, (2, len(labels)))
    moved: npt.NDArray[np.float32] = windows[labels, down, across]
    moved *= _uniform(draw, 0.6, 1.4, (len(labels), 3, 1, 1))
    return moved


def _background(n: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
    """A colour in each corner, and between them what lies between."""
    along = np.linspace(0, 1, 32, dtype=np.float32)
    ends = np.stack([1 - along, along])
    weights = (ends[:, None, :, None] * ends[None, :, None, :]).reshape(4, 32 * 32)
    return ((0.6 * draw.standard_normal((n * 3, 4), np.float32)) @ weights).reshape(n, 3, 32, 32)
