"""The methods of secure aggregation, none or SecAgg+, and the settings that they cannot be combined with."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from mutirao.config import build
from mutirao.core.fleet import Fleet
from mutirao.core.parts import AnyAggregator, AnyHandler, AnySelector, as_aggregator, as_selector
from mutirao.errors import ConfigError
from mutirao.privacy.secure_aggregation.settings import Settings


class Secure:
    """The interface of all methods; the base class lets the server see every update."""

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler for the client side."""
        return handler

    def at_server(self, fleet: Fleet, metrics: Iterable[str]) -> Fleet:
        """The fleet for the server side; `metrics` are those that clients report."""
        return fleet

    def check(self, config: Any, select: AnySelector, aggregate: AnyAggregator, clients: int) -> None:
        """Raise ConfigError before the first round for parts that need single clients' updates or metrics."""


@dataclass(frozen=True)
class NoSecureAggregation(Secure):
    """No secure aggregation: the server sees each update by itself.

    >>> from mutirao.config import Common, resolve
    >>> resolve(Common, {}).secure.name  # by default the server sees each update
    'none'
    """


@dataclass(frozen=True)
class SecAggPlus(Settings, Secure):
    """Masks that cancel in the sum: each client shares one with each of its `neighbours`, and adds one of its own.

    Bell, Bonawitz, Gascón, Lepoint and Raykova, 2020, after Bonawitz et al., 2017. A sum is made of at least `least`
    clients; of each client's neighbourhood a share of `threshold` must stay to the end. Before they are masked, updates
    are shortened to the length `clip` (0: any), numbers cut at `range` and rounded to `bits` bits, and samples counted
    up to `most_samples`: the server can do none of that. `sizes=public` reveals each client's number of samples.
    `noise` is what each client adds before, as a multiple of `clip`: then the server never sees the sum without noise.

    A client's update is in one sum with those of two others at least; settings that make no sum are refused:

    >>> SecAggPlus(least=3, clip=1.0).threshold
    0.6
    >>> SecAggPlus(threshold=0.1)
    Traceback (most recent call last):
        ...
    ValueError: threshold is 0.1, but must be from 0.5 to 1: a majority must agree
    """

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler that answers the four stages, and nothing that concerns this client alone."""
        require_flower()
        from mutirao.privacy.secure_aggregation.masking_handler import MaskingHandler  # late: it brings flwr

        return MaskingHandler(handler, self)

    def at_server(self, fleet: Fleet, metrics: Iterable[str]) -> Fleet:
        """A fleet in which every reply is the mean of all."""
        require_flower()
        from mutirao.privacy.secure_aggregation.summing_fleet import SecureFleet

        return SecureFleet(fleet, self, sorted({*metrics, "loss", "accuracy"}))

    def check(self, config: Any, select: AnySelector, aggregate: AnyAggregator, clients: int) -> None:
        """Raise ConfigError for parts that need single clients' updates or metrics, naming them."""
        require_flower()
        only = "secure=secagg+ shows the server nothing but sums"
        if not as_aggregator(aggregate).mean_only:
            raise ConfigError(f"aggregate={config.aggregate.name} compares single updates, and {only}; use fedavg")
        if config.screen.name != "none":
            raise ConfigError(f"screen={config.screen.name} compares single updates, and {only}; use none")
        for part in (as_selector(select), as_aggregator(aggregate)):
            if own := part.needs.of_single_clients():
                raise ConfigError(f"{part!r} uses the {own[0]} of single clients, and {only}")
        if config.clients_every > 0:
            raise ConfigError(f"clients_every evaluates single clients, and {only}; use 0")
        if config.devices.name != "none":
            raise ConfigError("devices: the time that the four stages take is not modelled; use none with secure")
        if config.privacy.name not in ("none", "central"):
            raise ConfigError(f"privacy={config.privacy.name} has each client report the privacy it spent, and {only}")
        if config.privacy.settings.get("clip_quantile"):
            raise ConfigError(f"privacy.clip_quantile uses the lengths of single updates, and {only}; use 0")
        if self.noise and config.privacy.name != "central":
            raise ConfigError("secure.noise is a share of the noise of privacy=central, which is not set")
        if config.centralised:
            raise ConfigError("centralised: there is one client, and the sum of one is its update; use secure=none")
        most = clients if isinstance(config.per_round, float) else min(clients, config.per_round)
        if most < self.least:
            raise ConfigError(f"secure=secagg+ sums at least {self.least} clients, and {most} take part in a round")


def secure_of(config: Any) -> Secure:
    """The configured method; with central privacy, each client counts once, within the clip."""
    secure: Secure = build("secure", config.secure)
    if isinstance(secure, SecAggPlus) and config.privacy.name == "central":
        clip = float(build("privacy", config.privacy).clip)
        if secure.clip:
            clip = min(clip, secure.clip)
        # The account assumes that a client moves the sum by at most the clip, so no client may count several times.
        return replace(secure, most_samples=1, clip=clip)
    return secure


def to_table(secure: Secure) -> dict[str, Any]:
    """A method with its settings, as passed between processes of one site."""
    if isinstance(secure, SecAggPlus):
        return {"name": "secagg+", **asdict(secure)}
    return {"name": "none"}


def from_table(table: Mapping[str, Any]) -> Secure:
    """The method that `to_table` was given."""
    if table["name"] == "secagg+":
        return SecAggPlus(**{k: v for k, v in table.items() if k != "name"})
    return NoSecureAggregation()


def require_flower() -> None:
    """ConfigError without Flower, which provides the cryptographic primitives."""
    if find_spec("flwr") is None:
        raise ConfigError("secure=secagg+ needs Flower's cryptography: install mutirao[flower]")
