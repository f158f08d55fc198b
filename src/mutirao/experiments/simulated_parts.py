"""The parts of a flow, made from a configuration: fleet, selector, aggregator, filter, asynchronous rounds, patience.

Settings that need more clients than there are get refused before the first round.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mutirao.config import build
from mutirao.core.arrays import Arrays
from mutirao.core.exclusion import parse_names
from mutirao.core.fleet import Fleet
from mutirao.core.parts import AnyAggregator, AnyFilter, AnySelector, as_aggregator, with_defaults
from mutirao.core.records import Row
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.selection import how_many
from mutirao.simulation.asynchronous import AsynchronousFleet, RefillingSelector
from mutirao.simulation.availability import Churn
from mutirao.simulation.clock import TimedFleet
from mutirao.simulation.devices import DeviceModel
from mutirao.simulation.drift import DriftFleet


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run after `patience` rounds without a better one; `final_metrics` of the best model are its result.

    The test data are not used during the run: a round chosen by test data would flatter the model.
    """

    patience: int = 0  # 0: all rounds are made
    final_metrics: Callable[[Run, Arrays], dict[str, float]] | None = None

    def is_over(self, round: int, best: Row | None) -> bool:
        """Whether the run ends after this round."""
        return bool(self.patience) and best is not None and round - int(best["round"]) >= self.patience


def check_one_model(config: Any) -> None:
    """Refuse patience where there is no single model that could be the best."""
    if not config.patience:
        return
    for key in ("cluster", "personal"):
        name = getattr(config, key).name
        if name != "none":
            raise ConfigError(f"patience: with {key}={name} there are several models, each with a best round; use 0")


def simulate(fleet: Fleet, config: Any, run: Run) -> Fleet:
    """The fleet with simulated drift, devices and availability, if the configuration has any."""
    if config.drift.name != "none":
        fleet = DriftFleet(fleet, build("drift", config.drift), run)
    if config.devices.name != "none":
        fleet = TimedFleet(fleet, build("devices", config.devices), run, config.epochs, config.per_round)
    if config.available.name != "always":
        fleet = Churn(fleet, build("available", config.available), run)
    return fleet


def overcommit_of(config: Any) -> float:
    """How many times more clients are asked than are needed; 1 without simulated devices."""
    return with_defaults(build("devices", config.devices), DeviceModel).overcommit  # type: ignore[type-abstract]


def build_select(config: Any, classes: int | None) -> AnySelector:
    """The configured selector, for as many clients as a round sends requests to."""
    count = config.per_round
    over = overcommit_of(config)
    if over > 1:
        if "count" in config.select.settings:
            raise ConfigError("select.count cannot be set with devices.overcommit; set per_round instead")
        # The margin is for rounding: 100 * 1.1 is 110.00000000000001, which means 110 clients and not 111.
        count = min(1.0, count * over) if isinstance(count, float) else math.ceil(count * over - 1e-9)
    return build("select", config.select, count=count, classes=classes, rounds=config.rounds)  # type: ignore[no-any-return]


def build_aggregate(config: Any, task: Any, clients: int | None = None) -> AnyAggregator:
    """The configured aggregator, with what it cannot know by itself, such as the number of clients."""
    population = len(task.population) if clients is None else clients
    about = {"classes": task.classes, "population": population or None, "client_lr": config.lr, "sums": sums_of(config)}
    return build("aggregate", config.aggregate, **about)  # type: ignore[no-any-return]


def sums_of(config: Any) -> str:
    """What the server sees: single updates (`none`), sums (`exact`), or noised sums (`noised`)."""
    if config.privacy.name in ("central", "local"):
        return "noised"
    if config.secure.name != "none":
        return "exact"
    return "none"


def build_screen(config: Any, **context: Any) -> tuple[AnyFilter, ...]:
    """The configured filter, if any."""
    if config.screen.name != "none":
        return (build("screen", config.screen, **context),)
    return ()


def is_asynchronous(aggregate: AnyAggregator) -> bool:
    """Whether a method aggregates the replies that have arrived, instead of waiting for all clients of the round."""
    return "staleness" in as_aggregator(aggregate).needs.server


def make_asynchronous(
    fleet: Fleet, config: Any, run: Run, select: AnySelector, aggregate: AnyAggregator, clients: int, **context: Any
) -> tuple[Fleet, AnySelector]:
    """The fleet and the selector for an asynchronous method; for any other method they are returned unchanged.

    `per_round` is then the number of clients that train at a time; one that is done makes room for another.
    """
    if not is_asynchronous(aggregate):
        return fleet, select
    part = as_aggregator(aggregate)
    name = config.aggregate.name
    at_once = how_many(config.per_round, clients)
    buffer = part.buffer_of(at_once)
    if config.devices.name == "none" and not fleet.is_remote():
        raise ConfigError(
            f"aggregate={name} aggregates replies as they arrive, but clients without devices all reply at once; "
            "set devices=tifl, fedcs or table, which simulate a clock"
        )
    if buffer > at_once:
        raise ConfigError(f"aggregate.buffer is {buffer}, but per_round lets only {at_once} clients train at once")
    if config.min_replies > buffer:
        raise ConfigError(f"min_replies is {config.min_replies}, but aggregate={name} aggregates {buffer} replies")
    if overcommit_of(config) > 1:
        raise ConfigError(f"devices.overcommit: aggregate={name} already takes the first replies; use 1")
    if "count" in config.select.settings:
        raise ConfigError(f"select.count cannot be set with aggregate={name}; set per_round instead")
    rebases = "models" not in part.needs.server
    staggered = AsynchronousFleet(fleet, run, buffer, at_once, rebases=rebases, keeps=config.devices.name != "none")
    return staggered, RefillingSelector(lambda count: build("select", config.select, count=count, **context), staggered)


def check_synchronous(config: Any, aggregate: AnyAggregator, why: str) -> None:
    """Refuse an asynchronous method where rounds have to wait for all clients."""
    if is_asynchronous(aggregate):
        raise ConfigError(f"aggregate={config.aggregate.name} does not wait for all clients, but {why}; use fedavg")


def check_clients_per_round(config: Any, population: Collection[str]) -> None:
    """Refuse a number of clients a round above all clients, if it was set; a default means "at most that many".

    Excluded clients count, so that a run can be repeated without a client that withdrew and keep its settings.
    """
    clients = len(population) + len(parse_names(config.exclude))
    if config.centralised or not population:
        return
    usual = {f.name: f.default for f in dataclasses.fields(config)}["per_round"]
    wanted = {"select.count": config.select.settings.get("count", 0)}
    if config.per_round != usual:
        wanted["per_round"] = config.per_round
    for key, count in wanted.items():
        if isinstance(count, int) and count > clients:
            raise ConfigError(
                f"{key}: {count} clients a round, but there are {clients}; use {clients}, or a share such as 0.5"
            )


def check_min_clients(config: Any, aggregate: AnyAggregator, population: Collection[str]) -> None:
    """Refuse a method that needs more clients than a round has, such as Krum where all of them could be Byzantine."""
    asked = how_many(config.select.settings.get("count", config.per_round), len(population))
    fewest = as_aggregator(aggregate).fewest
    if not config.centralised and population and asked < fewest:
        part = ", ".join(f"{k}={v}" for k, v in config.aggregate.settings.items())
        how = f"aggregate={config.aggregate.name} with {part}"
        raise ConfigError(f"{how} needs {fewest} clients a round, but per_round selects {asked}")
