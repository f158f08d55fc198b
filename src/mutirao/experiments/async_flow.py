"""What a flow does for a method that does not wait for all clients of a round, and what that does not go with."""

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
    """Whether a method wants the replies that are in, and not those of all who were asked."""
    return "replies:staleness" in as_aggregator(aggregate).needs


def make_asynchronous(
    fleet: Fleet, config: Any, run: Run, select: AnySelector, aggregate: AnyAggregator, clients: int, **offers: Any
) -> tuple[Fleet, AnySelector]:
    """The fleet and the selector as an asynchronous method has them; for any other they stay as they are.

    `per_round` is then how many clients are at work at once; who is done makes room for another.
    """
    if not is_asynchronous(aggregate):
        return fleet, select
    part, name = as_aggregator(aggregate), config.aggregate.name
    at_once = how_many(config.per_round, clients)
    buffer = part.buffer_of(at_once)
    if config.devices.name == "none" and not fleet.is_remote():
        raise ConfigError(
            f"aggregate={name} takes replies as they come in, and clients of this process answer all at once; "
            "set devices=tifl, fedcs or table, which give them a simulated clock"
        )
    if buffer > at_once:
        raise ConfigError(f"aggregate.buffer is {buffer}, but per_round lets only {at_once} clients train at once")
    if config.min_replies > buffer:
        raise ConfigError(f"min_replies is {config.min_replies}, but aggregate={name} makes a model of {buffer}")
    if overcommit_of(config) > 1:
        raise ConfigError(f"devices.overcommit: aggregate={name} takes the first replies by itself; use 1")
    if "count" in config.select.settings:
        raise ConfigError(f"select.count cannot be set with aggregate={name}, which goes by per_round")
    rebases = "replies:models" not in part.needs
    staggered = AsynchronousFleet(fleet, run, buffer, at_once, rebases=rebases, keeps=config.devices.name != "none")
    return staggered, RefillingSelector(lambda count: build("select", config.select, count=count, **offers), staggered)


def check_synchronous(config: Any, aggregate: AnyAggregator, who: str) -> None:
    """Refuse an asynchronous method where all clients are waited for."""
    if is_asynchronous(aggregate):
        raise ConfigError(f"aggregate={config.aggregate.name} does not wait for all clients, and {who}; use fedavg")
