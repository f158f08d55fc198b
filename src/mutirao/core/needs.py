"""What parts of a round need of the clients, and what clients are capable of: two typed values in the same terms.

A selector, an aggregator or a filter declares its `needs` once; what clients are sent, asked for and measured by
follows from them. A handler declares its `capabilities`. A part fits a task if its clients have all that it needs.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mutirao.config import nearest, parse_value
from mutirao.core.fleet import Scalar
from mutirao.deprecation import REMOVED_IN
from mutirao.errors import ConfigError

USUAL = frozenset({"loss", "accuracy"})  # reported with every update without being requested
# What the server measures of replies itself, or hands over with them:
SERVER_FIGURES = frozenset(
    {
        "samples",  # as each client declared
        "since_improvement",  # rounds since a client improved
        "update_norm",  # |x_k - x|
        "dissimilarity",  # of an update to the mean of the others
        "sketch",  # each update as a short vector
        "rows",  # replies of long tables as they were sent, not made dense
        "staleness",  # how many models were made since a client began; rounds do not wait for all clients
        "models",  # such late replies as they were trained, not as if begun from the current model
        "memory",  # the selector or filter is also called with the run's memory
    }
)
# In the words of earlier versions, such as "metrics:entropy": the field that holds each kind now.
FORMER_KINDS = {"metrics": "metrics", "extras": "extras", "probe": "probes", "comes": "request_extras"}


def _freeze_names(value: Any) -> None:
    """Make every set of names of a value a frozenset; a text is one name and not a set of letters."""
    for each in fields(value):
        names = getattr(value, each.name)
        if isinstance(names, str):
            raise TypeError(f"{each.name}: expected a set of names, got {names!r}; write {{{names!r}}}")
        if not isinstance(names, Mapping):
            object.__setattr__(value, each.name, frozenset(names))


@dataclass(frozen=True)
class Needs:
    """What a part needs of the clients; `a | b` is what two parts need together.

    `metrics`: metrics that clients report with their update, such as `entropy`.
    `extras`: arrays that clients send beside the update, never averaged, such as `squared_errors`.
    `probes`: metrics that clients report when they are asked before the selection.
    `config`: hyperparameters that clients are sent and must support, such as `{"mu": 0.1}`.
    `request_extras`: arrays that are sent with the model, which clients must support.
    `server`: what the server measures of replies itself, one of `SERVER_FIGURES`.
    `biases`: output layers whose bias update the server keeps, each by its name or its number of entries.

    >>> sorted((Needs(metrics={"entropy"}) | Needs(metrics={"rms_loss"}, config={"mu": 0.1})).metrics)
    ['entropy', 'rms_loss']
    """

    metrics: Collection[str] = frozenset()
    extras: Collection[str] = frozenset()
    probes: Collection[str] = frozenset()
    config: Mapping[str, Scalar] = field(default_factory=dict)
    request_extras: Collection[str] = frozenset()
    server: Collection[str] = frozenset()
    biases: Collection[str] = frozenset()

    def __post_init__(self) -> None:
        _freeze_names(self)
        for name in sorted(self.server):
            if name not in SERVER_FIGURES:
                raise ConfigError(f"server: the server measures no {name!r}{nearest(name, SERVER_FIGURES)}")

    def __or__(self, other: "Needs") -> "Needs":
        for name in self.config.keys() & other.config.keys():
            # Clients get one value. Which of the two it would be is not to be decided by an order of parts.
            if self.config[name] != other.config[name]:
                values = f"{self.config[name]!r} and {other.config[name]!r}"
                raise ConfigError(
                    f"two parts send {name} to the clients, with the values {values}; give them one value"
                )
        sets = {f.name: {*getattr(self, f.name), *getattr(other, f.name)} for f in fields(self) if f.name != "config"}
        return Needs(**sets, config={**self.config, **other.config})

    def of_single_clients(self) -> list[str]:
        """The needs that an answer summed over clients cannot meet, in words."""
        named = {"metric": self.metrics, "probed metric": self.probes, "extra": self.extras, "figure": self.server}
        named["bias update of layer"] = self.biases
        return [f"{kind} {name!r}" for kind, names in named.items() for name in sorted(names)]

    def request_config(self, requested: Iterable[str] = ()) -> dict[str, Scalar]:
        """The config of a request: the settings needed, and as `extras` the metrics and extras to be reported."""
        config = {name: self.config[name] for name in sorted(self.config)}
        wanted = set(requested) - USUAL
        if wanted:
            config["extras"] = ",".join(sorted(wanted))
        return config


@dataclass(frozen=True)
class Capabilities:
    """What a handler can do, in the terms of `Needs`: `config` has the names of the hyperparameters that it supports.

    `requests`: requests besides `train` that it answers by itself, such as `evaluate`.

    >>> Capabilities(metrics={"loss"}).unmet(Needs(metrics={"entropy"}, config={"mu": 0.1}))
    ["the metric 'entropy'", "the hyperparameter 'mu'"]
    """

    metrics: Collection[str] = frozenset()
    extras: Collection[str] = frozenset()
    config: Collection[str] = frozenset()
    request_extras: Collection[str] = frozenset()
    requests: Collection[str] = frozenset()

    def __post_init__(self) -> None:
        _freeze_names(self)

    def __or__(self, other: "Capabilities") -> "Capabilities":
        return Capabilities(*({*getattr(self, f.name), *getattr(other, f.name)} for f in fields(self)))

    def __sub__(self, other: "Capabilities") -> "Capabilities":
        return Capabilities(*({*getattr(self, f.name)} - {*getattr(other, f.name)} for f in fields(self)))

    def __str__(self) -> str:
        listed = []
        for each in fields(self):
            if names := getattr(self, each.name):
                listed.append(f"{each.name.replace('_', ' ')} {', '.join(sorted(names))}")
        return "; ".join(listed) or "nothing"

    def unmet(self, needs: Needs) -> list[str]:
        """The needs that are not met, in words; hyperparameters come last."""
        # A metric that is reported with an update can also be reported in a probe.
        lacking = [f"the metric {name!r}" for name in sorted({*needs.metrics, *needs.probes} - {*self.metrics})]
        lacking += [f"the extra {name!r}" for name in sorted({*needs.extras} - {*self.extras})]
        arrays = {*needs.request_extras} - {*self.request_extras}
        lacking += [f"the request's array {name!r}" for name in sorted(arrays)]
        lacking += [f"the hyperparameter {name!r}" for name in sorted(needs.config.keys() - {*self.config})]
        return lacking


def as_needs(given: Needs | Collection[str]) -> Needs:
    """Needs as they are; words of earlier versions, such as `{"metrics:entropy"}`, are read, with a warning.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True):
    ...     as_needs({"config:mu=0.5", "replies:bias=10"}) == Needs(config={"mu": 0.5}, biases={"10"})
    True
    """
    if isinstance(given, Needs):
        return given
    warn_of_words("needs", "Needs", given)
    sets: dict[str, set[str]] = {}
    config: dict[str, Scalar] = {}
    for word in given:
        kind, _, name = word.partition(":")
        if kind == "config":
            setting, _, value = name.partition("=")
            config[setting] = parse_value(value)
        elif kind == "replies" and name.startswith("bias="):
            sets.setdefault("biases", set()).add(name.removeprefix("bias="))
        elif kind == "replies":
            sets.setdefault("server", set()).add(name)
        else:
            sets.setdefault(field_of(word, "needs"), set()).add(name)
    return Needs(**sets, config=config)


def former_capabilities(handler: Any) -> Capabilities:
    """Those of a handler that declares `provides` in the words of earlier versions; with a warning. None otherwise."""
    given = getattr(handler, "provides", None)
    if given is None:
        return Capabilities()
    warn_of_words("provides", "capabilities = Capabilities", given)
    sets: dict[str, set[str]] = {}
    for word in given:
        kind, _, name = word.partition(":")
        if not name:
            sets.setdefault("requests", set()).add(word)
        else:
            sets.setdefault("config" if kind == "config" else field_of(word, "provides"), set()).add(name)
    return Capabilities(**sets)


def field_of(word: str, attribute: str) -> str:
    """The field for a word of earlier versions."""
    kind = word.partition(":")[0]
    if kind not in FORMER_KINDS:
        raise ConfigError(f"{attribute}: {word!r} is unknown{nearest(kind, FORMER_KINDS)}")
    return FORMER_KINDS[kind]


def warn_of_words(attribute: str, successor: str, given: Collection[str]) -> None:
    """Warn of needs or capabilities in the words of earlier versions."""
    example = ", ".join(sorted(given)[:1])
    text = f"{attribute} in words such as {example!r} goes with {REMOVED_IN}; write {successor}(...)"
    warnings.warn(text, DeprecationWarning, stacklevel=4)
