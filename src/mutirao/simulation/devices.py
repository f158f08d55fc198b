"""Simulated devices of clients: speed, bandwidth, power and dropout of each.

Nothing here is measured; `simulation/clock.py` derives the times of rounds from it.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.io import read_csv

Floats = npt.NDArray[np.float64]
MBIT = 1e6 / 8  # bytes
# Of FedCS's cell, as published: samples a second of its slowest and fastest phones, Mbit/s of its links on average and
# at most. Other devices can be listed in a file (`devices=table`).
SLOWEST = 10.0
FASTEST = 100.0
MEAN_MBITS = 1.4
MOST_MBITS = 8.6


@dataclass(frozen=True)
class Devices:
    """One array for each property, with one entry for each client.

    >>> devices = FedCSDevices()(["ana", "bia", "caio"], np.random.default_rng(0))
    >>> devices.speed.round()  # samples a second
    array([67., 34., 14.])
    """

    speed: Floats  # samples a second, training
    down: Floats  # bytes a second
    up: Floats
    watts: Floats
    radio_watts: Floats
    dropout: Floats  # probability that a client does not reply in a round


SampleDevices = Callable[[Sequence[ClientId], np.random.Generator], Devices]


class DeviceModel(Protocol):
    """Samples the devices of clients, and defines how long a round waits for them."""

    @property
    def deadline(self) -> float:
        """After so many seconds a reply is late (0: never)."""
        return 0.0

    @property
    def jitter(self) -> float:
        """The standard deviation of the logarithm of how long a round takes a client."""
        return 0.0

    @property
    def overcommit(self) -> float:
        """How many times more clients are asked than are needed; the first replies make the round."""
        return 1.0

    def __call__(self, names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
        """The devices of these clients."""
        ...


def none(names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
    """Devices that cost no time and no energy; a recipe with these does not record any.

    >>> none(["ana", "bia"], np.random.default_rng(0)).speed
    array([inf, inf])
    """
    fast = np.full(len(names), np.inf)
    free = np.zeros(len(names))
    return Devices(fast, fast, fast, free, free, free)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Settings that all simulated devices share.

    With `overcommit` (1 to 2; FedScale and production: 1.3) that many times `per_round` clients are asked, and the
    first `per_round` replies make the round: Bonawitz et al., "Towards Federated Learning at Scale", MLSys 2019.
    """

    overcommit: float = 1.0
    jitter: float = 0.1
    deadline: float = 0.0
    dropout: float = 0.0
    watts: float = 3.0
    radio_watts: float = 1.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class FedCSDevices(Simulated):
    """Phones in a cell, as in FedCS: 10 to 100 samples a second, links of 1.4 Mbit/s on average and 8.6 at most.

    Nishio and Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge", ICC
    2019. They simulate the radio; here throughputs are exponential, cut at the maximum. Power is not in the paper.

    >>> devices = FedCSDevices()([f"c{i}" for i in range(1000)], np.random.default_rng(0))
    >>> bool(devices.speed.min() >= 10), bool(devices.speed.max() <= 100)
    (True, True)
    """

    retired_settings: ClassVar[Mapping[str, float]] = {
        "slowest": SLOWEST,
        "fastest": FASTEST,
        "mbits": MEAN_MBITS,
        "most_mbits": MOST_MBITS,
    }

    def __call__(self, names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
        n = len(names)
        speed = rng.uniform(SLOWEST, FASTEST, n)
        link = np.clip(rng.exponential(MEAN_MBITS, n), MEAN_MBITS / 100, MOST_MBITS) * MBIT
        return Devices(speed, link, link, *(np.full(n, x) for x in (self.watts, self.radio_watts, self.dropout)))


@dataclass(frozen=True)
class TiFLDevices(Simulated):
    """Five equal groups of clients with 4, 2, 1, 1/2 and 1/10 of a core, as in TiFL's experiments on CIFAR-10.

    Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020. The speeds of core and link are our choice.

    >>> devices = TiFLDevices(speed=50.0)([f"c{i}" for i in range(10)], np.random.default_rng(0))
    >>> sorted(devices.speed.tolist())
    [5.0, 5.0, 25.0, 25.0, 50.0, 50.0, 100.0, 100.0, 200.0, 200.0]
    """

    speed: float = 50.0  # samples a second of one core
    mbits: float = 20.0

    def __call__(self, names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
        n = len(names)
        cores = rng.permutation(np.resize([4.0, 2.0, 1.0, 0.5, 0.1], n))
        link = np.full(n, self.mbits * MBIT)
        radio_watts = np.full(n, self.radio_watts)
        dropout = np.full(n, self.dropout)
        return Devices(cores * self.speed, link, link, self.watts * cores, radio_watts, dropout)


@dataclass(frozen=True)
class DeviceTable:
    r"""From a CSV file with one line for each client: `client,speed,down,up,watts,radio_watts,dropout`.

    Speed in samples a second, links in Mbit/s. Only the first four columns are required; a client that is not
    in the file gets a random line of it.

    >>> from pathlib import Path
    >>> _ = Path("phones.csv").write_text("client,speed,down,up\nana,50,20,5\nbia,10,4,1\n")
    >>> DeviceTable("phones.csv")(["ana", "bia"], np.random.default_rng(0)).speed
    array([50., 10.])
    """

    file: str
    jitter: float = 0.0
    deadline: float = 0.0
    overcommit: float = 1.0

    def __post_init__(self) -> None:
        check(self)

    def __call__(self, names: Sequence[ClientId], rng: np.random.Generator) -> Devices:
        known, values = device_lines(self.file)
        speed, down, up, watts, radio, dropout = values[rows_by_name(names, known, rng)].T
        return Devices(speed, down * MBIT, up * MBIT, watts, radio, dropout)


NAMES = {"none": none, "fedcs": FedCSDevices, "tifl": TiFLDevices, "table": DeviceTable}


def rows_by_name(
    names: Sequence[ClientId], known: Sequence[ClientId], rng: np.random.Generator
) -> npt.NDArray[np.intp]:
    """The row of each client in a file, or a random one."""
    place = {c: i for i, c in enumerate(known)}
    # One for each client, needed or not: a client's row does not depend on which others are in the file.
    spare = rng.integers(0, len(known), len(names))
    return np.array([place.get(c, i) for c, i in zip(names, spare.tolist(), strict=True)], np.intp)


def check(model: Simulated | DeviceTable) -> None:
    """Refuse negative figures and speeds of zero."""
    for f in fields(model):
        value = getattr(model, f.name)
        if f.name == "dropout" and not 0 <= value < 1:
            raise ValueError(f"dropout is {value!r}, but must be at least 0 and below 1")
        if f.name == "overcommit" and not 1 <= value <= 2:
            raise ValueError(f"overcommit is {value!r}, but must be between 1 and 2")
        free = f.name in ("deadline", "jitter", "watts", "radio_watts", "dropout", "file")
        if not free and not value > 0:
            raise ValueError(f"{f.name} is {value!r}, but must be above 0")
        if isinstance(value, float) and not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{f.name} is {value!r}, but must be at least 0")


def device_lines(file: str) -> tuple[list[ClientId], Floats]:
    """The clients of a device table and their figures."""
    names: list[ClientId] = []
    rows: list[list[float]] = []
    lines = read_csv(Path(file).expanduser())
    try:
        for row in lines:
            names.append(row["client"])
            given = [float(row[k]) for k in ("speed", "down", "up")]
            rows.append([*given, *(float(row.get(k) or d) for k, d in DEFAULTS.items())])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"devices.file: {file} must have numbers in the columns client, speed, down, up") from error
    values = np.array(rows, np.float64).reshape(-1, 6)
    good = len(names) and np.isfinite(values).all() and (values >= 0).all()
    if not (good and (values[:, :3] > 0).all() and (values[:, 5] < 1).all()):
        raise ConfigError(f"devices.file: {file} must have positive speeds and links, and dropouts below 1")
    return names, values


DEFAULTS = {"watts": 3.0, "radio_watts": 1.0, "dropout": 0.0}
