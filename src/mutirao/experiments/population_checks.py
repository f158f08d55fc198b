"""Checks before the first round that there are as many clients as the configuration needs."""

import dataclasses
from collections.abc import Collection
from typing import Any

from mutirao.core.exclusion import parse_names
from mutirao.core.parts import AnyAggregator, as_aggregator
from mutirao.errors import ConfigError
from mutirao.selection import how_many


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
