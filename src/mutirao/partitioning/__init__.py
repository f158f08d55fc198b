"""How the samples of one data set are divided among clients: from i.i.d. to each client its own classes.

A partition is a list of sorted index arrays, one for each client. Every sample is in exactly one of them; only equal
sizes that do not use up the set, rare classes, and users that are not selected leave some out. All randomness comes
from the generator that is passed.
"""

import heapq
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.deprecation import former_names
from mutirao.errors import ConfigError
from mutirao.partitioning.base import (
    Counts,
    Indices,
    check_labels,
    check_least,
    count_of,
    order_by_class,
    rows_by_owner,
)
from mutirao.partitioning.feature_skew import noise as noise
from mutirao.partitioning.flwr_partitioners import adapt as adapt
from mutirao.partitioning.heterogeneity import PartitionSummary as PartitionSummary
from mutirao.partitioning.heterogeneity import describe as describe
from mutirao.partitioning.quantity_skew import quantity as quantity
from mutirao.randomness import rng as stream

DRAWS = 100  # tries before a Dirichlet partition is called impossible
LARGEST_ALPHA = 1e100  # a larger alpha overflows, and gives the same: all clients have the same distribution


def iid(labels: npt.ArrayLike, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Assign shuffled samples evenly: all clients have the same distribution, and sizes differ by at most one.

    >>> [len(p) for p in iid([0, 0, 0, 1, 1, 1, 1], 3, np.random.default_rng(0))]
    [3, 2, 2]
    """
    y = check_labels(labels, clients)
    if clients > len(y):
        raise ConfigError(
            f"partition=iid: {len(y)} samples are not enough for {clients} clients; take at most {len(y)}"
        )
    return rows_by_owner(rng.permutation(len(y)), np.arange(len(y)) % clients, clients)


def dirichlet(
    labels: npt.ArrayLike,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    min_size: int = 1,
    size: int | None = None,
    balance: bool = False,
) -> list[Indices]:
    """Skew the labels by a Dirichlet distribution: small `alpha`, few classes a client; large `alpha`, i.i.d.

    Class c is split by p_c ~ Dir(alpha 1_K) over the K clients (Yurochkin et al., "Bayesian Nonparametric
    Federated Learning of Neural Networks", ICML 2019; Li et al., "Federated Learning on Non-IID Data Silos",
    ICDE 2022), sampled again while a client has fewer than `min_size` samples. With `balance`, as in the code of both,
    a client that has n / K of the n samples gets none of the classes that come after, and p_c is renormalised.

    With `size` each client has exactly so many: client k samples them without replacement by its own
    q_k ~ Dir(alpha C p), where p are the shares of the C classes, so alpha 1_C if these are equal; a class that
    runs out is left out and the others renormalised (Hsu et al., "Measuring the Effects of Non-Identical Data
    Distribution", 2019, where the concentration alpha C has the name alpha). Samples left over belong to no client.

    >>> y = np.repeat(np.arange(10), 100)
    >>> parts = dirichlet(y, 20, 0.5, np.random.default_rng(0))
    >>> len(parts), sum(map(len, parts))
    (20, 1000)
    >>> {len(p) for p in dirichlet(y, 20, 0.1, np.random.default_rng(0), size=40)}
    {40}
    """
    y = check_labels(labels, clients)
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"partition.alpha: {alpha!r} is not a number above 0")
    check_least("partition.min_size", min_size, 0)
    need = min_size if size is None else size
    if size is not None:
        check_least("partition.size", size, max(1, min_size))
    if clients * need > len(y):
        raise ConfigError(
            f"partition=dirichlet: {clients} clients of {need} samples need {clients * need} samples, there are "
            f"{len(y)}; take at most {len(y) // need} clients or {len(y) // clients} samples a client"
        )
    order, per_class = order_by_class(y, rng)
    if size is not None:
        return _draw_equal_sizes(order, per_class, clients, min(alpha, LARGEST_ALPHA), rng, size)
    split = _split_classes
    if balance:
        split = _balance_classes
    for _ in range(DRAWS):
        counts = split(per_class, clients, min(alpha, LARGEST_ALPHA), rng)
        if counts.sum(0).min() >= min_size:
            return rows_by_owner(order, np.repeat(np.tile(np.arange(clients), len(per_class)), counts.ravel()), clients)
    raise ConfigError(
        f"partition=dirichlet: in {DRAWS} draws with alpha={alpha:g} some of the {clients} clients always had fewer "
        f"than {min_size} samples; take a larger alpha, fewer clients, min_size=0, or equal sizes by "
        f"size={len(y) // clients}"
    )


def shards(labels: npt.ArrayLike, clients: int, rng: np.random.Generator, per_client: int = 2) -> list[Indices]:
    """Sort by label, cut into `clients` x `per_client` shards and give each client `per_client` of them at random.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017:
    with two shards most clients see two classes. Shards differ by one sample at most.

    >>> parts = shards(np.repeat(np.arange(10), 60), 100, np.random.default_rng(0))
    >>> {len(p) for p in parts}
    {6}
    """
    y = check_labels(labels, clients)
    check_least("partition.per_client", per_client, 1)
    total = clients * per_client
    if total > len(y):
        raise ConfigError(
            f"partition=shards: {clients} clients x {per_client} shards need {total} samples, there are {len(y)}; "
            f"take fewer clients or a smaller per_client"
        )
    order, _ = order_by_class(y, rng)
    shard = np.arange(len(y)) * total // len(y)
    return rows_by_owner(order, (rng.permutation(total) // per_client)[shard], clients)


def by_class(
    labels: npt.ArrayLike,
    clients: int,
    rng: np.random.Generator,
    classes: int = 2,
    order: Literal["drawn", "sorted"] = "drawn",
    sets: int = 0,
) -> list[Indices]:
    """Divide the classes into `sets` sets of `classes` (0: as few as hold all), each shared by equally many clients.

    Ten classes in pairs and ten clients: five pairs, two clients each. Clients with one set have the same
    distribution and clients with different sets have nothing in common: the clearest groups there can be
    (the pathological case of McMahan et al., AISTATS 2017, made exact). Which classes make a set, and which clients
    share it, is random (`drawn`); or they are `sorted`: classes 0 and 1 to the first two clients, and so on.

    Sets that hold more than all classes together overlap, as evenly as can be: of C classes in a ring, set s holds
    `classes` in a row from floor(s C / sets) on. The samples of a class are then shared by the clients of all sets that
    it is in, and clients with one set still have the same distribution: these are the true groups.

    >>> y = np.repeat(np.arange(10), 60)
    >>> summary = describe(y, by_class(y, 10, np.random.default_rng(0)))
    >>> summary.classes_per_client.tolist() == [2] * 10, summary.sizes.tolist() == [60] * 10
    (True, True)
    """
    y = check_labels(labels, clients)
    rows, per_class = order_by_class(y, rng)
    total = len(per_class)
    if not 1 <= classes <= total:
        raise ConfigError(f"partition.classes: {classes!r} is not between 1 and {total}, the number of classes")
    least = -(-total // classes)
    if sets and not least <= sets <= total:
        raise ConfigError(
            f"partition.sets: {sets} sets of {classes} cannot hold {total} classes and all differ; "
            f"right would be {least} to {total}"
        )
    sets = sets or least
    if clients % sets:
        near = max(1, clients // sets) * sets
        raise ConfigError(
            f"partition=by_class: {sets} sets of {classes} classes cannot be shared by {clients} clients evenly; "
            f"take a multiple of {sets} clients, such as {near}"
        )
    rank = np.arange(total)
    sharing = np.arange(clients)
    if order != "sorted":
        rank = rng.permutation(total)
        sharing = rng.permutation(clients)
    members = sharing.reshape(sets, -1)
    first = np.arange(sets) * total // sets  # the rank that a set begins with
    owners = [members[(rank[c] - first) % total < classes].ravel() for c in range(total)]
    return _split_among_owners("by_class", y, rows, per_class, owners, clients)


def k_classes(labels: npt.ArrayLike, clients: int, rng: np.random.Generator, classes: int = 2) -> list[Indices]:
    """Give each client a random set of `classes` classes; the samples of a class are shared evenly by its owners.

    Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022 (there #C = k). Sets overlap at
    random; every class has an owner, so no sample is left out.

    >>> y = np.repeat(np.arange(10), 60)
    >>> np.unique(describe(y, k_classes(y, 30, np.random.default_rng(0), classes=3)).classes_per_client)
    array([3])
    """
    y = check_labels(labels, clients)
    order, per_class = order_by_class(y, rng)
    total = len(per_class)
    if not 1 <= classes <= total:
        raise ConfigError(f"partition.classes: {classes!r} is not between 1 and {total}, the number of classes")
    if clients * classes < total:
        raise ConfigError(
            f"partition=k_classes: {clients} clients of {classes} classes cannot own all {total} classes; "
            f"take at least {-(-total // classes)} clients or classes={-(-total // clients)}"
        )
    has = np.zeros((clients, total), bool)
    np.put_along_axis(has, rng.permuted(np.tile(np.arange(total), (clients, 1)), axis=1)[:, :classes], True, axis=1)
    for orphan in np.flatnonzero(~has.any(0)):  # a class without an owner replaces one that has several
        client, spare = rng.choice(np.argwhere(has & (has.sum(0) > 1)))
        has[client, spare] = False
        has[client, orphan] = True
    owners = [rng.permutation(np.flatnonzero(has[:, c])) for c in range(total)]
    return _split_among_owners("k_classes", y, order, per_class, owners, clients)


def rare(
    labels: npt.ArrayLike,
    clients: int,
    rng: np.random.Generator,
    classes: int = 2,
    holders: int = 3,
    alpha: float = 0.5,
) -> list[Indices]:
    """Give each of `classes` random classes to `holders` clients only, which have no other class.

    Such a client has n // `clients` of the n samples, or an even share of its class if that is less. The other clients
    get the other classes by `dirichlet` with equal sizes. Samples left over, most of the rare classes, belong to none.

    >>> y = np.repeat(np.arange(10), 100)
    >>> summary = describe(y, rare(y, 20, np.random.default_rng(0)))
    >>> np.sort((summary.counts > 0).sum(0)).tolist()[:2], int(summary.sizes.min()), int(summary.sizes.max())
    ([3, 3], 33, 50)
    """
    y = check_labels(labels, clients)
    names = np.unique(y)
    for name, value in (("classes", classes), ("holders", holders)):
        check_least(f"partition.{name}", value, 1)
    if classes >= len(names) or classes * holders >= clients:
        raise ConfigError(
            f"partition=rare: {classes} of {len(names)} classes with {count_of(holders, 'holder')} each among "
            f"{count_of(clients, 'client')} leave no other class or no other client"
        )
    size = len(y) // clients
    order = rng.permutation(clients)
    rare_classes = rng.permutation(names)[:classes]
    rest = np.flatnonzero(~np.isin(y, rare_classes))
    others = order[classes * holders :].tolist()
    parts: dict[int, Indices] = {}
    for i, name in enumerate(rare_classes):
        rows = rng.permutation(np.flatnonzero(y == name))[: holders * size]
        parts |= zip(order[i * holders : (i + 1) * holders].tolist(), np.array_split(rows, holders), strict=True)
    size = min(size, len(rest) // len(others))
    if not size or not all(map(len, parts.values())):
        raise ConfigError(
            f"partition=rare: {count_of(len(y), 'sample')} are not enough for {count_of(clients, 'client')}, of whom "
            f"{holders} have one class; take fewer"
        )
    parts |= zip(others, (rest[part] for part in dirichlet(y[rest], len(others), alpha, rng, size=size)), strict=True)
    return [np.sort(parts[i]) for i in range(clients)]


def by_key(keys: npt.ArrayLike, clients: int | None = None, rng: np.random.Generator | None = None) -> list[Indices]:
    """Make each distinct key (a hospital, a slide, a user) a client, in the order of the sorted keys.

    With fewer `clients` than keys, whole keys are assigned, the largest first, each to the client with the fewest
    samples so far; `rng` decides between keys of equal size.

    >>> by_key(["rio", "sul", "rio", "ana"])
    [array([3]), array([0, 2]), array([1])]
    >>> by_key(["rio", "sul", "rio", "ana"], clients=2)
    [array([0, 2]), array([1, 3])]
    """
    values = check_labels(keys, 1 if clients is None else clients, "keys")
    names, key = np.unique(values, return_inverse=True)
    if clients is None or clients == len(names):
        return rows_by_owner(np.arange(len(key)), key, len(names))
    if clients > len(names):
        right = f"take at most {len(names)} clients"
        raise ConfigError(f"partition=by_key: {clients} clients cannot share {len(names)} distinct keys; {right}")
    sizes = np.bincount(key, minlength=len(names))
    shuffled = np.arange(len(names))
    if rng is not None:
        shuffled = rng.permutation(len(names))
    owner = np.empty(len(names), np.intp)
    loads = [(0, client) for client in range(clients)]
    for k in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        load, client = loads[0]
        owner[k] = client
        heapq.heapreplace(loads, (load + int(sizes[k]), client))
    return rows_by_owner(np.arange(len(key)), owner[key], clients)


def natural(owners: npt.ArrayLike, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Make each user a client, in the order of their sorted names; `clients` of them at random if there are more.

    >>> natural(["rosa", "ana", "rosa"], 2, np.random.default_rng(0))
    [array([1]), array([0, 2])]
    """
    parts = by_key(check_labels(owners, clients, "owners"))
    if (n := len(parts)) > clients:
        logging.getLogger("mutirao").warning("natural: %d of %d users are sampled; clients=%d takes all", clients, n, n)
    return [parts[i] for i in np.sort(rng.permutation(len(parts))[:clients])]


def sample_like(labels: npt.NDArray[Any], mine: npt.NDArray[Any], most: int, rng: np.random.Generator) -> Indices:
    """At most `most` of the samples with `labels`, with the class shares of `mine`.

    >>> labels = np.repeat([0, 1, 2], 4)
    >>> labels[sample_like(labels, np.array([0, 0, 0, 2]), 4, np.random.default_rng(0))]
    array([0, 0, 0, 2])
    """
    if not len(mine):
        return np.zeros(0, np.intp)
    classes, counts = np.unique(mine, return_counts=True)
    wanted = np.round(most * counts / counts.sum()).astype(int)
    # However small `most` is, a client with samples is evaluated on at least one.
    wanted[counts.argmax()] = max(1, wanted[counts.argmax()])
    found = [rng.permutation(np.flatnonzero(labels == c))[:k] for c, k in zip(classes, wanted, strict=True)]
    return np.sort(np.concatenate(found))


def largest_similar_size(labels: npt.NDArray[Any], mine: npt.NDArray[Any], most: int) -> int:
    """The largest number of samples with `labels`, up to `most`, that can have the class shares of `mine`.

    A class with share s of which there are a allows a / s; one that is not among `labels` at all does not count.

    >>> largest_similar_size(np.repeat([0, 1], [6, 40]), np.array([0, 0, 0, 1]), 100)
    8
    """
    classes, counts = np.unique(mine, return_counts=True)
    there = np.array([np.count_nonzero(labels == c) for c in classes])
    kept = counts[there > 0]
    there = there[there > 0]
    return max(1, int(min([float(most), *(there * kept.sum() / kept)])))


def split_test_set(
    labels: npt.NDArray[Any], parts: Sequence[Indices], tests: npt.NDArray[Any], seed: int, most: int = 100
) -> list[Indices]:
    """Rows of a test set with labels `tests` for each client, with its own class shares; rows may be shared.

    >>> labels, tests = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    >>> split_test_set(labels, [np.array([0, 1]), np.array([2, 3])], tests, seed=0)  # a client's own classes
    [array([0, 2]), array([1, 3])]
    """
    return [sample_like(tests, labels[part], most, stream(seed, 0, "own test", str(i))) for i, part in enumerate(parts)]


NAMES: dict[str, Callable[..., list[Indices]]] = {
    "iid": iid,
    "dirichlet": partial(dirichlet, alpha=0.5),
    "shards": shards,
    "by_class": by_class,
    "k_classes": k_classes,
    "rare": rare,
    "by_key": by_key,
    "natural": natural,
    "quantity": quantity,
    "noise": noise,
}


def _split_classes(per_class: Counts, clients: int, alpha: float, rng: np.random.Generator) -> Counts:
    """How many samples of each class (row) each client (column) gets."""
    shares = rng.dirichlet(np.full(clients, alpha), size=len(per_class))
    # 1e-9: rounding may leave a sum that is a whole number just below it, and `floor` would lose a sample.
    cuts = np.floor(np.cumsum(shares, axis=1) * per_class[:, None] + 1e-9).astype(np.int64)
    cuts[:, -1] = per_class
    counts = np.diff(cuts, axis=1, prepend=0)
    # Rounding at the cuts favours some places in the row; shuffled rows favour no client.
    return np.asarray(rng.permuted(counts, axis=1))


def _balance_classes(per_class: Counts, clients: int, alpha: float, rng: np.random.Generator) -> Counts:
    """The same, but a client with an even share of all samples gets no more."""
    shares = rng.dirichlet(np.full(clients, alpha), size=len(per_class))
    counts = np.zeros(shares.shape, np.int64)
    for c, many in enumerate(per_class):
        open_ = counts.sum(0) * clients < per_class.sum()
        mine = np.where(open_, shares[c], 0.0)
        if not mine.sum() > 0:  # all clients with a share have enough samples
            mine = open_.astype(np.float64)
        cuts = np.floor(np.cumsum(mine / mine.sum()) * many + 1e-9).astype(np.int64)
        cuts[-1] = many
        counts[c] = np.diff(np.minimum(cuts, many), prepend=0)
    return counts


def _draw_equal_sizes(
    order: Indices, per_class: Counts, clients: int, alpha: float, rng: np.random.Generator, size: int
) -> list[Indices]:
    """Each client in turn, in random order, samples `size` rows by a label distribution of its own."""
    shares = rng.dirichlet(alpha * len(per_class) * per_class / per_class.sum(), size=clients)
    left = per_class.copy()
    owner = np.full(len(order), -1, np.intp)
    ends = np.cumsum(per_class)
    for client in rng.permutation(clients):
        need = size
        before = left.copy()
        while need:
            open_ = np.where(left > 0, shares[client], 0.0)
            if not open_.sum() > 0:  # all its classes ran out: the rest comes from all classes that are left
                open_ = left / left.sum()
            sampled = np.minimum(rng.multinomial(need, open_ / open_.sum()), left)
            left -= sampled
            need -= int(sampled.sum())
        for c in np.flatnonzero(before > left):
            owner[ends[c] - before[c] : ends[c] - left[c]] = client
    return rows_by_owner(order, owner, clients)


def _split_among_owners(
    name: str, y: npt.NDArray[Any], order: Indices, per_class: Counts, owners: Sequence[Indices], clients: int
) -> list[Indices]:
    """Split the samples of each class evenly among its owners; each owner gets at least one."""
    assigned: list[Indices] = []
    # Clients that have had more than an even share so far come last for the next odd sample.
    spare = np.zeros(clients, np.int64)
    for many, who, first in zip(per_class, owners, np.cumsum(per_class) - per_class, strict=True):
        if many < len(who):
            raise ConfigError(
                f"partition={name}: class {y[order[first]]} has {count_of(int(many), 'sample')} for {len(who)} "
                f"clients; take fewer clients"
            )
        turn = who[np.argsort(spare[who], kind="stable")]
        assigned.append(turn[np.arange(many) % len(who)])
        spare[turn[: many % len(who)]] += 1
    return rows_by_owner(order, np.concatenate(assigned), clients)


if not TYPE_CHECKING:  # a module-level __getattr__ would let every misspelt name pass
    __getattr__ = former_names(
        __name__,
        {
            "deal_tests": "split_test_set",
            "like": "sample_like",
            "most_alike": "largest_similar_size",
        },
    )
