"""Disclosure: the kinds of requests a run sends to its clients, and what leaves them besides model updates.

It is derived from the parts of a run, from what the task's clients provide, and from what a recipe declares for a flow
of its own (`Recipe.asks`). Sites' policies are written from it, so that they allow exactly that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from operator import or_
from typing import Any

from mutirao.core.agreement import AGREE
from mutirao.core.hyperparameters import BY_METHODS
from mutirao.core.needs import Needs
from mutirao.errors import ConfigError

# Metrics that clients report only if a part needs them.
ON_DEMAND = frozenset({"entropy", "rms_loss", "gradient_norm", "reach", "start_loss"})
COMPANION_EXTRAS = {"squared_errors": ("batch_sizes",)}  # extras that are always sent with others


@dataclass(frozen=True)
class Disclosure:
    """What a run exchanges with its clients, by name; each tuple is sorted.

    `requests` are kinds of requests, `request_extras` the arrays that come with them, `extras` and `metrics` those of
    the replies, and `hyperparameters` what a method sets at clients, as `name=value`.
    """

    requests: tuple[str, ...] = ()
    request_extras: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    hyperparameters: tuple[str, ...] = ()

    def __or__(self, other: "Disclosure") -> "Disclosure":
        """The union of both."""
        merged = {}
        for f in fields(self):
            merged[f.name] = tuple(sorted({*getattr(self, f.name), *getattr(other, f.name)}))
        return Disclosure(**merged)


def ordinary_disclosure(task: Any, parts: Iterable[Any], clients_evaluate: bool) -> Disclosure:
    """What the ordinary flow exchanges with a task's clients, given its parts."""
    needs = reduce(or_, (part.needs for part in parts), Needs())
    provided = frozenset(task.capabilities.metrics)
    probed = frozenset(needs.probes)
    requests = ["train", AGREE]
    # Every update may carry these metrics, whether or not a part of this run needs them.
    metrics = provided - ON_DEMAND - (set(task.metrics) - {"loss", "accuracy"})
    metrics |= {*needs.metrics, *(probed & provided)}
    if probed:
        requests.append("probe")
    if clients_evaluate:
        requests.append("evaluate")
        metrics |= {*task.metrics, *({"loss", "accuracy"} & provided)}
    extras = set(needs.extras)
    for name in tuple(extras):
        extras.update(COMPANION_EXTRAS.get(name, ()))
    hyperparameters = [f"{name}={needs.config[name]}" for name in needs.config if name in BY_METHODS]
    request_extras = tuple(needs.request_extras)
    found = Disclosure(tuple(requests), request_extras, tuple(extras), tuple(metrics), tuple(hyperparameters))
    return found | Disclosure()  # sorted


def is_private(config: Any) -> bool:
    """Whether nothing may leave a client except noised updates or shares of a secure sum."""
    return config.privacy.name in ("local", "dpsgd") or config.secure.name != "none"


def privacy_guarantee(config: Any) -> str:
    """The setting that guarantees that nothing but updates leaves a client in the clear, or an empty string."""
    for key in ("privacy", "secure"):
        name = getattr(config, key).name
        if name != "none":
            return f"{key}={name}"
    return ""


def check_validation_share(config: Any, share: str, private: bool) -> None:
    """Refuse `judge_by=vali` if clients hold out no samples (setting `share`), or may not report metrics."""
    if config.judge_by != "vali":
        return
    if not getattr(config, share):
        raise ConfigError(
            f"judge_by=vali: clients evaluate on the share that they hold out, and {share}=0 holds out nothing; "
            f"use {share}=0.2"
        )
    if private:
        which = "secure" if config.secure.name != "none" else "privacy"
        raise ConfigError(
            f"judge_by=vali: clients report metrics on the samples they hold out, and with "
            f"{which}={getattr(config, which).name} nothing but updates may leave them; use {which}=none"
        )
