"""What passes between a run and its clients, by name: what they are asked, and what leaves them besides the model.

It follows from the parts of a run, from what the task's clients provide, and from what the recipe says of a flow of its
own (`Recipe.asks`). A site's policy is written from it, so that it allows that and nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from mutirao.core.agreement import AGREE
from mutirao.core.hyperparameters import BY_METHODS
from mutirao.core.parts import names_of
from mutirao.errors import ConfigError

# Metrics that clients tell if a part needs them.
ON_DEMAND = frozenset({"entropy", "rms_loss", "gradient_norm", "reach", "start_loss"})
COMPANION_EXTRAS = {"squared_errors": ("batch_sizes",)}  # extras that come with others


@dataclass(frozen=True)
class Disclosure:
    """Kinds of requests, extras that come with them, extras and metrics of the replies, and what a method tells clients
    to train by, `name=value`; all sorted.
    """

    requests: tuple[str, ...] = ()
    comes: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    told: tuple[str, ...] = ()

    def __or__(self, other: "Disclosure") -> "Disclosure":
        """Both."""
        return Disclosure(*(tuple(sorted({*getattr(self, f.name), *getattr(other, f.name)})) for f in fields(self)))


def ordinary_disclosure(task: Any, parts: Iterable[Any], judged: bool) -> Disclosure:
    """What the ordinary flow asks of a task's clients with these parts; `judged`: they judge the model, too."""
    needs = frozenset[str]().union(*(part.needs for part in parts))
    can = names_of(task.provides, "metrics")
    by_judges = (*task.metrics, *({"loss", "accuracy"} & can)) if judged else ()
    probed = names_of(needs, "probe")
    told = can - ON_DEMAND - (set(task.metrics) - {"loss", "accuracy"})
    extras = names_of(needs, "extras")
    asked = ["train", AGREE, *(["probe"] if probed else []), *(["evaluate"] if judged else [])]
    beside = [more for name in extras for more in COMPANION_EXTRAS.get(name, ())]
    metrics = {*told, *names_of(needs, "metrics"), *(probed & can), *by_judges}
    comes = tuple(names_of(needs, "comes"))
    tells = tuple(said for said in names_of(needs, "config") if said.partition("=")[0] in BY_METHODS)
    return Disclosure(tuple(asked), comes, (*extras, *beside), tuple(metrics), tells) | Disclosure()


def is_private(config: Any) -> bool:
    """Whether nothing may leave a client but noised updates, or what goes into a sum."""
    return config.privacy.name in ("local", "dpsgd") or config.secure.name != "none"


def privacy_guarantee(config: Any) -> str:
    """The setting that promises that nothing leaves a client in the clear but updates, if there is one."""
    set_to = [f"{key}={getattr(config, key).name}" for key in ("privacy", "secure")]
    return next((said for said in set_to if not said.endswith("=none")), "")


def check_validation_share(config: Any, share: str, private: bool) -> None:
    """Refuse `judge_by=vali` if clients keep nothing back by the setting `share`, or may not tell how they judge."""
    if config.judge_by != "vali":
        return
    if not getattr(config, share):
        raise ConfigError(
            f"judge_by=vali: clients judge by the share that they keep back, and {share}=0 keeps nothing; "
            f"use {share}=0.2"
        )
    if private:
        which = "secure" if config.secure.name != "none" else "privacy"
        raise ConfigError(
            f"judge_by=vali: clients judge by what they keep back, and with {which}={getattr(config, which).name} "
            f"they tell nothing but updates; use {which}=none"
        )
