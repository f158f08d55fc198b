"""Generated data sets: FCube and Synthetic(alpha, beta) with their users, as published, and textures like CIFAR-10."""

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
PAIR = 1000  # samples of each pair of octants
CUBE_TEST = 1000
USERS = 30
MAX_USERS = 1000
WIDTH = 60
CLASSES = 10
# The number of a user's samples is 50 + lognormal(4, 2).
MIN_SAMPLES = 50
LOG_MEAN = 4.0
LOG_DEVIATION = 2.0
HELD_OUT = 0.1
FORM = re.compile(r"synthetic-(?:(iid)|(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?))(?:-(\d{1,6}))?")

Floats = npt.NDArray[np.float32]
Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Names = npt.NDArray[np.str_]


class GeneratedData(NamedTuple):
    """Training and test samples, class names, and the user of each sample."""

    x_train: Floats
    y_train: Labels
    x_test: Floats
    y_test: Labels
    names: tuple[str, ...]
    users: Names
    test_users: Names


def is_generated(data: str) -> bool:
    """Whether `data` is the name of a generated set with users."""
    return data == FCUBE or FORM.fullmatch(data) is not None


def generate(data: str, seed: int) -> GeneratedData:
    """Generate the set of that name: `fcube`, `synthetic-ALPHA-BETA` or `synthetic-iid`, perhaps with `-USERS`.

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
    if not 1 <= count <= MAX_USERS:
        raise ConfigError(f"data: {data!r} has {count} users; from 1 to {MAX_USERS:,} can be generated")
    return make_synthetic(float(alpha or 0), float(beta or 0), count, seed, bool(iid))


def make_fcube(seed: int) -> GeneratedData:
    """Points of the cube [-1, 1]^3 with class 0 where x_1 > 0, else 1; four users with two opposite octants each.

    Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos", ICDE 2022. User u has the octants of the
    signs (+, s_2, s_3) and (-, -s_2, -s_3), where s_2 is - for u > 1 and s_3 for odd u: 500 points of each, so that
    classes are balanced and inputs have nothing in common. The test set is the whole cube.
    """
    draw = rng(seed, 0, "fcube train")
    users = np.repeat(np.arange(4), PAIR)
    signs = np.stack([np.ones(4 * PAIR), np.where(users > 1, -1, 1), np.where(users % 2, -1, 1)], 1)
    mirrored = np.where(np.arange(4 * PAIR) % 2, -1, 1)[:, None]
    # 1 - random() is above 0, so that with its sign every number lies inside of its octant.
    x = ((1 - draw.random((4 * PAIR, 3))) * signs * mirrored).astype(np.float32)
    test = rng(seed, 0, "fcube test").uniform(-1, 1, (CUBE_TEST, 3)).astype(np.float32)
    y = (x[:, 0] <= 0).astype(np.int64)
    y_test = (test[:, 0] <= 0).astype(np.int64)
    # Opposite octants have the same user, so all points are mirrored to the side of x_1 > 0.
    mirrored_test = test * np.where(test[:, :1] > 0, 1, -1)
    test_users = 2 * (mirrored_test[:, 1] < 0) + (mirrored_test[:, 2] < 0)
    return GeneratedData(x, y, test, y_test, ("x1 > 0", "x1 < 0"), user_names(users, 4), user_names(test_users, 4))


def make_synthetic(alpha: float, beta: float, users: int, seed: int, iid: bool = False) -> GeneratedData:
    """Synthetic(alpha, beta): y = argmax(W_k x + b_k), where users differ in models by alpha and in inputs by beta.

    Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, after Shamir, Srebro and Zhang, ICML
    2014: W_k, b_k ~ N(u_k, 1), u_k ~ N(0, alpha); x ~ N(v_k, S), S_jj = j^-1.2, v_kj ~ N(B_k, 1), B_k ~ N(0, beta),
    60 numbers, 10 classes, lognormal(4, 2) + 50 samples. Alpha and beta are deviations, as in the paper's code. `iid`:
    one W, b ~ N(0, 1) for all, and v_k = 0. A tenth of each user's samples is held out. As published, u_k moves the
    scores of all classes by the same amount, so alpha changes no label: users differ by their samples of W_k.
    """
    common = rng(seed, 0, "synthetic users")
    sizes = common.lognormal(LOG_MEAN, LOG_DEVIATION, users).astype(np.int64) + MIN_SAMPLES
    models = common.normal(0, alpha, users)
    inputs = common.normal(0, beta, users)
    shared_weights = common.normal(0, 1, (WIDTH, CLASSES))
    shared_bias = common.normal(0, 1, CLASSES)
    deviation = np.arange(1, WIDTH + 1) ** -0.6
    xs = []
    ys = []
    for k in range(users):
        draw = rng(seed, 0, "synthetic user", str(k))
        weights = draw.normal(models[k], 1, (WIDTH, CLASSES))
        bias = draw.normal(models[k], 1, CLASSES)
        mean = draw.normal(inputs[k], 1, WIDTH)
        if iid:
            weights = shared_weights
            bias = shared_bias
            mean = np.zeros(WIDTH)
        x = mean + deviation * draw.standard_normal((sizes[k], WIDTH))
        xs.append(x.astype(np.float32))
        ys.append((x @ weights + bias).argmax(1))
    x_all = np.concatenate(xs)
    y_all = np.concatenate(ys).astype(np.int64)
    owners = user_names(np.repeat(np.arange(users), sizes), users)
    test = np.concatenate([np.arange(n) >= n - test_size(n) for n in sizes])
    names = tuple(map(str, range(CLASSES)))
    return GeneratedData(x_all[~test], y_all[~test], x_all[test], y_all[test], names, owners[~test], owners[test])


def test_size(samples: int) -> int:
    """How many of a user's samples are held out: all but nine tenths, rounded down."""
    return samples - math.floor((1 - HELD_OUT) * samples)


def user_names(users: npt.NDArray[np.integer], count: int) -> Names:
    """The users' names, zero-padded so that they sort by number."""
    width = len(str(count - 1))
    return np.asarray(np.array([f"u{k:0{width}d}" for k in range(count)])[users], np.str_)


def check_generated(path: Path | str | None) -> list[str]:
    """Describe generated sets; ConfigError if a path is given, since they are not read from one."""
    if path is not None:
        raise ConfigError(f"generated sets read no files; leave {str(path)!r} out, and use data=fcube or synthetic-1-1")
    lines = []
    for name in (FCUBE, "synthetic-1-1"):
        data = generate(name, 0)
        count = f"{len(data.y_train):,} training samples, {len(data.y_test):,} test samples (seed 0)"
        lines.append(f"{name}: {count}, of {len(np.unique(data.users))} users: partition=natural makes each a client")
    return lines


# ---- textures of CIFAR-10's shape ------------------------------------------------------------------


@cache
def _patterns() -> npt.NDArray[np.float32]:
    """Ten smooth coloured textures, 3 x 32 x 32 with deviation 1, that wrap around at the edges."""
    # Always the same seed, so that training and test set have the same textures.
    draw = rng(0, 0, "cifar10 patterns")
    fy, fx = np.meshgrid(np.fft.fftfreq(32) * 32, np.fft.fftfreq(32) * 32, indexing="ij")
    out = np.empty((10, 3, 32, 32), np.float32)
    for c in range(10):
        angle = np.pi * (c % 5) / 5  # five directions,
        waves = (3.0, 5.5)[c // 5]  # coarse and fine
        near = [(fx - s * waves * np.cos(angle)) ** 2 + (fy - s * waves * np.sin(angle)) ** 2 for s in (1, -1)]
        band = np.exp(-near[0] / 1.6) + np.exp(-near[1] / 1.6)
        grey, *tints = np.fft.ifft2(np.fft.fft2(draw.standard_normal((4, 32, 32))) * band).real
        coloured = np.stack([grey + 0.4 * tint for tint in tints])
        out[c] = coloured / coloured.std()
    return out


def synthetic(samples: int, draw: np.random.Generator) -> tuple[Images, Labels]:
    """Generate images of CIFAR-10's shape: ten textures, equally often, no two images the same.

    An image is the texture of its class, shifted and in changed colours, mixed with a fainter one of another class,
    over a smooth background and under noise. Since textures are shifted, the mean images of the classes hardly
    differ: a linear model gets a quarter right, a small convolutional network 80% after a few epochs of a few
    thousand images, and no model all of them.

    >>> x, y = synthetic(6, np.random.default_rng(0))
    >>> x.shape, x.dtype, y.dtype
    ((6, 3, 32, 32), dtype('uint8'), dtype('int64'))
    """
    if samples < 1:
        raise ConfigError(f"synthetic: {samples!r} samples are too few, at least 1 is needed")
    y = draw.permutation(np.arange(samples) % 10).astype(np.int64)
    x = np.empty((samples, 3, 32, 32), np.uint8)
    # In blocks: as floats the set would take several times its size.
    for start in range(0, samples, 500):
        here = y[start : start + 500]
        other = (here + draw.integers(1, 10, len(here))) % 10
        mixed = _shifted(here, draw) + _uniform(draw, 0, 1, (len(here), 1, 1, 1)) * _shifted(other, draw)
        mixed *= _uniform(draw, 0.6, 1, (len(here), 1, 1, 1))
        mixed += _background(len(here), draw)
        mixed += 0.6 * draw.standard_normal(mixed.shape, np.float32)
        x[start : start + 500] = np.clip(118 + 36 * mixed, 0, 255).astype(np.uint8)
    return x, y


def _uniform(draw: np.random.Generator, low: float, high: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    return draw.uniform(low, high, shape).astype(np.float32)


def _shifted(labels: Labels, draw: np.random.Generator) -> npt.NDArray[np.float32]:
    """The texture of each label, shifted at random, each channel scaled at random."""
    # Textures wrap around, so a shifted one is a window of two by two copies.
    twice = np.tile(_patterns(), (1, 1, 2, 2))
    windows = np.moveaxis(np.lib.stride_tricks.sliding_window_view(twice, (32, 32), axis=(2, 3)), 1, 3)
    down, across = draw.integers(0, 32, (2, len(labels)))
    shifted: npt.NDArray[np.float32] = windows[labels, down, across]
    shifted *= _uniform(draw, 0.6, 1.4, (len(labels), 3, 1, 1))
    return shifted


def _background(n: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
    """A random colour in each corner, interpolated between them."""
    along = np.linspace(0, 1, 32, dtype=np.float32)
    ends = np.stack([1 - along, along])
    weights = (ends[:, None, :, None] * ends[None, :, None, :]).reshape(4, 32 * 32)
    return ((0.6 * draw.standard_normal((n * 3, 4), np.float32)) @ weights).reshape(n, 3, 32, 32)
