"""The parts of a flow, made as a configuration asks for them."""

from typing import Any

from mutirao.config import build
from mutirao.core.fleet import Fleet
from mutirao.core.parts import AnyAggregator, AnyFilter
from mutirao.core.rounds import Run
from mutirao.fleets.churn import Churn
from mutirao.fleets.timed import Timed
from mutirao.training.drift import Dated


def simulate(fleet: Fleet, config: Any, run: Run) -> Fleet:
    """The fleet with the clients' drift, devices and coming and going, if the configuration models any."""
    if config.drift.name != "none":
        fleet = Dated(fleet, build("drift", config.drift), run)
    if config.devices.name != "none":
        fleet = Timed(fleet, build("devices", config.devices), run, config.epochs)
    if config.available.name != "always":
        fleet = Churn(fleet, build("available", config.available), run)
    return fleet


def build_aggregate(config: Any, task: Any, clients: int | None = None) -> AnyAggregator:
    """The aggregator that the configuration asks for, told what it cannot know, such as how many clients there are."""
    population = len(task.population) if clients is None else clients
    about = {"classes": task.classes, "population": population or None, "client_lr": config.lr, "sums": sums_of(config)}
    return build("aggregate", config.aggregate, **about)  # type: ignore[no-any-return]


def sums_of(config: Any) -> str:
    """What the server may look at: each update by itself (`none`), sums (`exact`), or sums with noise (`noised`)."""
    if config.privacy.name in ("central", "local"):
        return "noised"
    return "exact" if config.secure.name != "none" else "none"


def build_screen(config: Any, **offers: Any) -> tuple[AnyFilter, ...]:
    """The filter that the configuration asks for, if any."""
    return (build("screen", config.screen, **offers),) if config.screen.name != "none" else ()
