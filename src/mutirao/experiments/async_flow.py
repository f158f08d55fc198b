"""Asynchronous methods in a flow: the fleet and the selector that they need, and what they cannot be combined with."""

from typing import Any

from mutirao.config import build
from mutirao.core.fleet import Fleet
from mutirao.core.parts import AnyAggregator, AnySelector, as_aggregator
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.simulated_parts import overcommit_of
from mutirao.selection import how_many
from mutirao.simulation.asynchronous import AsynchronousFleet, RefillingSelector


def is_asynchronous(aggregate: AnyAggregator) -> bool:
    """Whether a method aggregates the replies that have arrived, instead of waiting for all clients of the round."""
    return "replies:staleness" in as_aggregator(aggregate).needs


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
    rebases = "replies:models" not in part.needs
    staggered = AsynchronousFleet(fleet, run, buffer, at_once, rebases=rebases, keeps=config.devices.name != "none")
    return staggered, RefillingSelector(lambda count: build("select", config.select, count=count, **context), staggered)


def check_synchronous(config: Any, aggregate: AnyAggregator, why: str) -> None:
    """Refuse an asynchronous method where rounds have to wait for all clients."""
    if is_asynchronous(aggregate):
        raise ConfigError(f"aggregate={config.aggregate.name} does not wait for all clients, but {why}; use fedavg")
