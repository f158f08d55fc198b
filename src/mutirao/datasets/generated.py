"""Synthetic sets as published, made on the spot with their own users: FCube and Synthetic(alpha, beta)."""

import math
import re
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
