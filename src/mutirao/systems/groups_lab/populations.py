"""Hidden populations for simulations: populations differ in their labels, the meaning of labels, or inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.partitioning import iid, largest_similar_size, sample_like
from mutirao.randomness import rng
from mutirao.training.samples import ClientData, Samples

Indices = npt.NDArray[np.intp]
Array = npt.NDArray[Any]

OWN = 0.8  # part of a skewed population's samples that are of its own classes


def draw_populations(clients: int, populations: int, draw: np.random.Generator) -> npt.NDArray[np.intp]:
    """The population of each client, all of the same size up to one."""
    if not 1 <= populations <= clients:
        raise ConfigError(f"populations: {clients} clients cannot form {populations} populations")
    return draw.permutation(np.arange(clients) % populations)


def partition_populations(
    kind: str, labels: Array, population: npt.NDArray[np.intp], draw: np.random.Generator, own: float = OWN
) -> list[Indices]:
    """Partition samples: IID, or skewed so that each population has mostly classes of its own.

    Each class is assigned to one population; of a class, `own` goes to the clients of its population and the
    rest to all others, evenly.
    """
    clients = len(population)
    if kind != "skewed":
        return iid(labels, clients, draw)
    kinds = np.unique(labels)
    count = int(population.max()) + 1
    if len(kinds) < count:
        raise ConfigError(f"populations: {len(kinds)} classes cannot be assigned to {count} populations")
    home = dict(zip(draw.permutation(kinds).tolist(), (np.arange(len(kinds)) % count).tolist(), strict=True))
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for c in kinds:
        samples = draw.permutation(np.flatnonzero(labels == c))
        mine = np.flatnonzero(population == home[c])
        others = np.flatnonzero(population != home[c])
        cut = len(samples)
        # With a single population there are no others to give the rest to.
        if len(others):
            cut = round(own * len(samples))
        for who, some in ((mine, samples[:cut]), (others, samples[cut:])):
            for client, share in zip(draw.permutation(who), np.array_split(some, max(1, len(who))), strict=False):
                parts[client].append(share)
    return [np.sort(np.concatenate(p)) for p in parts]


def view(kind: str, x: Array, y: Array, population: int, populations: int, renaming: Indices) -> tuple[Array, Array]:
    """The samples of a population: with permuted classes, or rotated pictures; those of the first are unchanged.

    Population g of G rotates its pictures by 360 g / G degrees about their centre.
    """
    if kind == "permuted" and population:
        return x, renaming[y]
    if kind == "rotated" and population:
        return turn(x, 360.0 * population / populations), y
    return x, y


def turn(x: Array, degrees: float) -> Array:
    """Pictures rotated about their centre; the corners are filled by reflection."""
    from scipy.ndimage import rotate

    side = round(x.shape[1] ** 0.5)
    if x.ndim == 2 and side * side != x.shape[1]:
        raise ConfigError(f"hidden=rotated: rows of {x.shape[1]} numbers are not square pictures")
    square = x if x.ndim > 2 else x.reshape(len(x), side, side)
    out = rotate(square, degrees, axes=(-2, -1), reshape=False, order=1, mode="reflect")
    return np.asarray(out.reshape(x.shape), x.dtype)


def true_groups(parts: Sequence[Indices], labels: Array) -> list[int]:
    """Groups by the sets of classes that clients have: clients with the same set are one group."""
    sets = [tuple(np.unique(labels[p]).tolist()) for p in parts]
    order = {s: i for i, s in enumerate(sorted(set(sets)))}
    return [order[s] for s in sets]


def make_clients(
    kind: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    parts: Sequence[Indices],
    truth: Sequence[int],
    seed: int,
    most: int = 0,
    most_tests: int = 500,
    with_noise_of: Callable[[int, Array], Array] = lambda i, x: x,
) -> dict[ClientId, ClientData]:
    """The data of each client: at most `most` samples of its part, and at most `most_tests` test samples.

    A client's test samples have its own class distribution. Its population changes training and test samples equally.
    `with_noise_of(i, x)` are test inputs with the noise of client i, if the partition has noise.
    """
    x, y = train
    x_test, y_test = test
    populations = max(truth) + 1
    changes = kind in ("permuted", "rotated")
    x_all = x
    y_all = y
    # Clients write their changed samples into the arrays that all of them share, so these must not be the data set's.
    if changes:
        x_all = x.copy()
        y_all = y.copy()
    renamings = [rng(seed, 0, "renaming", str(g)).permutation(int(y.max()) + 1) for g in range(populations)]
    rows = {}
    tests = {}
    for i, (part, group) in enumerate(zip(parts, truth, strict=True)):
        name = f"c{i:0{len(str(len(parts) - 1))}d}"
        draw = rng(seed, 0, "samples", name)
        mine = part
        if most:
            mine = np.sort(draw.permutation(part)[:most])
        rows[name] = mine
        kept = sample_like(y_test, y[mine], largest_similar_size(y_test, y[mine], most_tests), draw)
        seen = group, populations, renamings[group]
        if changes:
            x_all[mine], y_all[mine] = view(kind, x[mine], y[mine], *seen)
        tests[name] = Samples(*view(kind, with_noise_of(i, x_test[kept]), y_test[kept], *seen))
    whole = Samples(x_all, y_all)
    return {c: ClientData(Samples(whole.x, whole.y, index), tests[c]) for c, index in rows.items()}
