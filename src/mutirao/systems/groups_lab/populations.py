"""Hidden populations for simulations: clients of one are alike, those of two differ in labels, meanings or inputs."""

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
        raise ConfigError(f"populations: {clients} clients cannot be of {populations} populations")
    return draw.permutation(np.arange(clients) % populations)


def partition_populations(
    kind: str, labels: Array, population: npt.NDArray[np.intp], draw: np.random.Generator, own: float = OWN
) -> list[Indices]:
    """Samples dealt to clients: alike, or skewed so that each population has mostly classes of its own.

    The classes are dealt into one set a population; of a class, `own` goes to the clients of its population and the
    rest to all others, evenly.
    """
    clients = len(population)
    if kind != "skewed":
        return iid(labels, clients, draw)
    kinds = np.unique(labels)
    count = int(population.max()) + 1
    if len(kinds) < count:
        raise ConfigError(f"populations: {len(kinds)} classes cannot be dealt to {count} populations")
    home = dict(zip(draw.permutation(kinds).tolist(), (np.arange(len(kinds)) % count).tolist(), strict=True))
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for c in kinds:
        samples = draw.permutation(np.flatnonzero(labels == c))
        mine, others = np.flatnonzero(population == home[c]), np.flatnonzero(population != home[c])
        cut = round(own * len(samples)) if len(others) else len(samples)
        for who, some in ((mine, samples[:cut]), (others, samples[cut:])):
            for client, share in zip(draw.permutation(who), np.array_split(some, max(1, len(who))), strict=False):
                parts[client].append(share)
    return [np.sort(np.concatenate(p)) for p in parts]


def view(kind: str, x: Array, y: Array, population: int, populations: int, renaming: Indices) -> tuple[Array, Array]:
    """The samples as a population sees them: its classes by other names, or its pictures turned; the first as they are.

    Population g of G turns its pictures by 360 g / G degrees about their middle.
    """
    if kind == "permuted" and population:
        return x, renaming[y]
    if kind == "rotated" and population:
        return turn(x, 360.0 * population / populations), y
    return x, y


def turn(x: Array, degrees: float) -> Array:
    """Pictures turned about their middle; what comes in at the corners is the picture mirrored."""
    from scipy.ndimage import rotate

    side = round(x.shape[1] ** 0.5)
    if x.ndim == 2 and side * side != x.shape[1]:
        raise ConfigError(f"hidden=rotated: rows of {x.shape[1]} numbers are not square pictures")
    square = x if x.ndim > 2 else x.reshape(len(x), side, side)
    out = rotate(square, degrees, axes=(-2, -1), reshape=False, order=1, mode="reflect")
    return np.asarray(out.reshape(x.shape), x.dtype)


def true_groups(parts: Sequence[Indices], labels: Array) -> list[int]:
    """The partition by the sets of classes clients hold: clients with the same set belong together."""
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
    judge: int = 500,
    sees: Callable[[int, Array], Array] = lambda i, x: x,
) -> dict[ClientId, ClientData]:
    """What each client holds: its part of the training set, at most `most` of it, and at most `judge` test samples.

    A client's test samples have its own mix of classes, and what is changed for its population is changed for both.
    `sees(i, x)` are test inputs as client i has them, where those that it trains on look different.
    """
    (x, y), (x_test, y_test), populations = train, test, max(truth) + 1
    held, named = (x.copy(), y.copy()) if kind in ("permuted", "rotated") else (x, y)
    renamings = [rng(seed, 0, "renaming", str(g)).permutation(int(y.max()) + 1) for g in range(populations)]
    rows, judges = {}, {}
    for i, (part, group) in enumerate(zip(parts, truth, strict=True)):
        name = f"c{i:0{len(str(len(parts) - 1))}d}"
        draw = rng(seed, 0, "samples", name)
        rows[name] = mine = np.sort(draw.permutation(part)[:most]) if most else part
        kept = sample_like(y_test, y[mine], largest_similar_size(y_test, y[mine], judge), draw)
        seen = group, populations, renamings[group]
        if held is not x:
            held[mine], named[mine] = view(kind, x[mine], y[mine], *seen)
        judges[name] = Samples(*view(kind, sees(i, x_test[kept]), y_test[kept], *seen))
    whole = Samples(held, named)
    return {c: ClientData(Samples(whole.x, whole.y, index), judges[c]) for c, index in rows.items()}
