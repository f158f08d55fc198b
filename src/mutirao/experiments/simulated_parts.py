"""Builds the parts of a flow from a configuration: simulated fleet, selector, aggregator, filter."""

import math
from typing import Any

from mutirao.config import build
from mutirao.core.fleet import Fleet
from mutirao.core.parts import AnyAggregator, AnyFilter, AnySelector, with_defaults
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.simulation.availability import Churn
from mutirao.simulation.clock import TimedFleet
from mutirao.simulation.devices import DeviceModel
from mutirao.simulation.drift import DriftFleet


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
    """The configured selector, for as many clients as a round asks."""
    count = config.per_round
    over = overcommit_of(config)
    if over > 1:
        if "count" in config.select.settings:
            raise ConfigError("select.count cannot be set with devices.overcommit; set per_round instead")
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
