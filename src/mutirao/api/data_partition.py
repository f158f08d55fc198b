"""Who holds what: data that are dealt by a partition, or that come dealt, and what the model is judged by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mutirao.api.input_data import Given, own_labels
from mutirao.config import build
from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.partitioning import PartitionSummary, describe, split_test_set
from mutirao.randomness import derive_seed, rng
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import ClientData, Index, Samples, virtual_clients

Labels = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Deal:
    """Clients with their data, the samples that judge the model, and who has how many of which class."""

    population: Mapping[ClientId, Any]
    test: Samples
    about: PartitionSummary | None


def deal(given: Given, config: Any, share: float) -> Deal:
    """The clients of a run; without a common test set, a `share` of the samples is kept back for it."""
    return deal_out(given, given.whole, config, share) if given.whole is not None else hand_out(given, config, share)


def deal_out(given: Given, whole: Samples, config: Any, share: float) -> Deal:
    """One set dealt by the configuration's partition; clients judge by test samples of their own classes."""
    rows, test = rows_of(whole), given.test
    if test is None:
        rows, kept = hold_back(rows, share, rng(config.seed, 0, "test"))
        test = Samples(whole.x, whole.y, kept)
    y = whole.y.numpy()[rows]
    by = config.partition.name
    if not given.classes and by != "iid" and ":" not in by:
        raise ConfigError(f"partition={by}: it deals by class, and these labels are no classes; use iid")
    labels = y if y.ndim == 1 else np.zeros(len(y), np.int64)
    parts = build("partition", config.partition)(labels, clients=config.clients, rng=rng(config.seed, 0, "partition"))
    own = split_test_set(y, parts, own_labels(test), config.seed) if given.classes else []
    if not given.classes and len(test) >= len(parts):  # numbers have no classes to be alike in: each gets its share
        own = np.array_split(rng(config.seed, 0, "own test").permutation(len(test)), len(parts))
    places, storage = rows_of(test), Samples(test.x, test.y)
    clients: Mapping[ClientId, Any] = virtual_clients(
        whole.x,
        whole.y,
        [rows[part] for part in parts],
        config.samples,
        derive_seed(config.seed, 0, "samples"),
        storage if own else None,
        [places[part] for part in own],
    )
    if config.centralised:
        clients = pool([Samples.of(clients[name]) for name in clients], test)
    return Deal(clients, test, describe(y, parts) if given.classes else None)


def hand_out(given: Given, config: Any, share: float) -> Deal:
    """Sets that come dealt; who has no test samples keeps a share of its own back, if there is no common test set."""
    clients: dict[ClientId, Samples | ClientData] = {}
    for name in sorted(given.sets):
        train, own = given.sets[name]
        if own is None and given.test is None and len(train) > 1:
            rows, kept = hold_back(rows_of(train), share, rng(config.seed, 0, "test", name))
            train, own = Samples(train.x, train.y, rows), Samples(train.x, train.y, kept)
        if config.samples and len(train) > config.samples:
            drawn = rng(config.seed, 0, "samples", name).choice(len(train), config.samples, replace=False)
            train = Samples(train.x, train.y, rows_of(train)[np.sort(drawn)])
        clients[name] = train if own is None else ClientData(train, own)
    tests = [c.test for c in clients.values() if isinstance(c, ClientData)]
    test = given.test or join(tests, "tests of clients")
    trained = [Samples.of(c) for c in clients.values()]
    about = describe_sets([own_labels(samples) for samples in trained]) if given.classes else None
    return Deal(pool(trained, test) if config.centralised else clients, test, about)


def rows_of(samples: Samples) -> Index:
    """Where the samples lie in their storage."""
    return np.arange(len(samples.y)) if samples.index is None else samples.index


def pool(trained: Sequence[Samples], test: Samples) -> dict[ClientId, ClientData]:
    """One client with all that the others have: the centralised reference."""
    return {"pooled": ClientData(join(trained, "samples of clients"), test)}


def hold_back(rows: Index, share: float, rng: np.random.Generator) -> tuple[Index, Index]:
    """The rows to train on and a share of them to judge by, one of each at least."""
    if len(rows) < 2:
        raise ConfigError("test: one sample cannot be parted into some to train on and some to judge by")
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    kept = np.zeros(len(rows), bool)
    kept[rng.permutation(len(rows))[:count]] = True
    return rows[~kept], rows[kept]


def join(sets: Sequence[Samples], what: str) -> Samples:
    """Several sets as one, without a copy if they share a storage."""
    if not sets:
        raise ConfigError("test: no client has samples to judge by; give test= a data set")
    first = sets[0]
    if all(one.y is first.y for one in sets) and all(one.index is not None for one in sets):
        return Samples(first.x, first.y, np.concatenate([one.index for one in sets if one.index is not None]))
    if any(isinstance(one.x, LazyInputs) for one in sets):
        raise ConfigError(f"data: {what} that do not fit in memory cannot be put together; give test= a set of its own")
    if any(one.kind != first.kind for one in sets):
        raise ConfigError(f"data: {what} differ in shape or type: {first.kind} and others")
    batches = [one.batch(slice(0, len(one))) for one in sets]
    x, y = batches[0][0], torch.cat([labels for _, labels in batches])
    if isinstance(x, dict):
        return Samples({name: torch.cat([b[name] for b, _ in batches]) for name in x}, y)
    if isinstance(x, tuple):
        return Samples(tuple(torch.cat(parts) for parts in zip(*(b for b, _ in batches), strict=True)), y)
    return Samples(torch.cat([b for b, _ in batches]), y)


def describe_sets(labels: Sequence[Labels]) -> PartitionSummary:
    """Who has how many of which class, of sets that come dealt."""
    ends = np.cumsum([len(y) for y in labels])
    return describe(np.concatenate(labels), [np.arange(end - len(y), end) for y, end in zip(labels, ends, strict=True)])
