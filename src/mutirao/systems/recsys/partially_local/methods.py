"""Methods by name, and the recipe's settings that each uses."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mutirao.config import build
from mutirao.errors import ConfigError
from mutirao.systems.recsys.fedrecon import FedRecon
from mutirao.systems.recsys.partially_local.base import Method
from mutirao.systems.recsys.partially_local.client import PartiallyLocal
from mutirao.systems.recsys.partially_local.fcf import FCF
from mutirao.systems.recsys.partially_local.fedrap import FedRAP
from mutirao.systems.recsys.partially_local.fmf import FMF
from mutirao.systems.recsys.partially_local.pfedrec import PFedRec
from mutirao.systems.recsys.ratings import Ratings
from mutirao.training.lr_schedules import schedule_of


@dataclass(frozen=True)
class Rebuilt:
    """FedRecon, in which users keep nothing. It uses the recipe's own settings.

    >>> from mutirao.config import Part, build
    >>> build("method", Part("fedrecon", home="mutirao.systems.recsys.partially_local.methods"))
    Rebuilt()
    """


NAMES = {"fedrecon": Rebuilt, "fmf": FMF, "fcf": FCF, "pfedrec": PFedRec, "fedrap": FedRAP}
# Settings of FedRecon alone: other methods have settings of their own.
FEDRECON_SETTINGS = (
    "lr",
    "loss",
    "biases",
    "negative_weight",
    "weight_decay",
    "others",
    "rebuild_weight",
    "half_life",
    "support",
    "support_by",
    "rebuild",
    "ridge",
    "ridge_bias",
    "passes",
    "rebuild_lr",
)
SHARED_SETTINGS = ("dimension", "negatives", "epochs", "samples")  # used by all methods


def partially_local_method(config: Any) -> Method | None:
    """The configured method in which users keep personal parameters; None for FedRecon.

    Raises ConfigError if other settings do not fit it.
    """
    method: Any = build("method", config.method)
    if isinstance(method, Rebuilt):
        return None
    name = f"method={config.method.name}"
    defaults = {f.name: f.default for f in fields(config)}
    for key in FEDRECON_SETTINGS:
        if getattr(config, key) != defaults[key]:
            instead = f"{name} has no such setting"
            if hasattr(method, key):
                instead = f"{name} has method.{key}"
            raise ConfigError(f"{key}: it is a setting of FedRecon; {instead}")
    if config.centralised:
        raise ConfigError(f"centralised: {name} has personal parameters; the pooled reference is for fedrecon")
    if config.privacy.name not in ("none", "central"):
        raise ConfigError(
            f"{name}: users evaluate the model themselves and report nothing with privacy={config.privacy.name}"
        )
    split = "leave_one_out" if method.implicit else "time"
    if config.split != split:
        raise ConfigError(f"{name} is evaluated by users who trained; set split={split}")
    return method  # type: ignore[no-any-return]


def is_implicit(config: Any) -> bool:
    """Whether the data is implicit feedback: which items users took, without ratings."""
    method = partially_local_method(config)
    if method is None:
        return bool(config.loss != "squared")
    return bool(method.implicit)


def method_of(config: Any, ratings: Ratings) -> FedRecon | PartiallyLocal:
    """The clients' handler, with the rating scale."""
    for name, default in (("optimizer", "sgd"), ("momentum", 0.0), ("clip", 0.0), ("batch_size", 32)):
        if getattr(config, name) != default:
            raise ConfigError(f"{name}: users of recsys train by plain SGD, a rating a step; leave it at {default!r}")
    if config.clients_every > 0:
        raise ConfigError(
            "clients_every: users of recsys train on all their ratings, others are evaluated on; leave it at 0"
        )
    if config.partition.name != "dirichlet":
        raise ConfigError("partition: every client of recsys is a user with its own ratings; leave it at dirichlet")
    if config.others == "all" and config.download != "all":
        raise ConfigError("others=all rebuilds vectors against all items, so clients need them all: set download=all")
    method = partially_local_method(config)
    facts: dict[str, Any] = {
        "items": len(ratings.catalogue),
        "levels": tuple(float(v) for v in np.unique(ratings.values)),
        "schedule": schedule_of(config),
    }
    if method is not None:
        return PartiallyLocal(method, **{name: getattr(config, name) for name in SHARED_SETTINGS}, **facts)
    settings = {k: getattr(config, k) for k in FedRecon.__dataclass_fields__ if hasattr(config, k)}
    return FedRecon(**settings | facts, compiled=config.engine != "plain")
