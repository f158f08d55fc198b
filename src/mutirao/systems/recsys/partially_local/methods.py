"""Methods by name, and what each takes of the recipe's settings."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mutirao.config import build
from mutirao.errors import ConfigError
from mutirao.systems.recsys.fedrecon import FedRecon
from mutirao.systems.recsys.partially_local.base import Method
from mutirao.systems.recsys.partially_local.client import KeptUsers
from mutirao.systems.recsys.partially_local.fcf import FCF
from mutirao.systems.recsys.partially_local.fedrap import FedRAP
from mutirao.systems.recsys.partially_local.fmf import FMF
from mutirao.systems.recsys.partially_local.pfedrec import PFedRec
from mutirao.systems.recsys.ratings import Ratings
from mutirao.training.lr_schedules import schedule_of


@dataclass(frozen=True)
class Rebuilt:
    """FedRecon, whose users keep nothing; it is set by the recipe's own settings.

    >>> from mutirao.config import Part, build
    >>> build("method", Part("fedrecon", home="mutirao.systems.recsys.partially_local.methods"))
    Rebuilt()
    """


NAMES = {"fedrecon": Rebuilt, "fmf": FMF, "fcf": FCF, "pfedrec": PFedRec, "fedrap": FedRAP}
# What FedRecon alone reads; others have rates and a form of their own.
OF_FEDRECON = (
    *("lr", "loss", "biases", "negative_weight", "weight_decay"),
    *(
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
    ),
)

TAKEN_UP = ("dimension", "negatives", "epochs", "samples")  # what all read


def kept_method(config: Any) -> Method | None:
    """The method whose users keep a part of the model, if the configuration asks for one and for what it goes with."""
    method: Any = build("method", config.method)
    if isinstance(method, Rebuilt):
        return None
    called = f"method={config.method.name}"
    plain = {f.name: f.default for f in fields(config)}
    for name in OF_FEDRECON:
        if getattr(config, name) != plain[name]:
            own = f"{called} has method.{name}" if hasattr(method, name) else f"{called} has no such thing"
            raise ConfigError(f"{name}: it is FedRecon's; {own}")
    if config.centralised:
        raise ConfigError(f"centralised: {called} has a part of each user's own; the pooled reference is fedrecon's")
    if config.privacy.name not in ("none", "central"):
        raise ConfigError(f"{called}: users evaluate themselves, and report nothing with privacy={config.privacy.name}")
    wanted = "leave_one_out" if method.implicit else "time"
    if config.split != wanted:
        raise ConfigError(f"{called} is evaluated by users who trained; set split={wanted}")
    return method  # type: ignore[no-any-return]


def is_implicit(config: Any) -> bool:
    """Whether what counts is that an item was taken, not how it was rated."""
    method = kept_method(config)
    return bool(config.loss != "squared" if method is None else method.implicit)


def method_of(config: Any, ratings: Ratings) -> FedRecon | KeptUsers:
    """What a client does, with the scale of the ratings, which everybody knows."""
    for name, plain in (("optimizer", "sgd"), ("momentum", 0.0), ("clip", 0.0), ("batch_size", 32)):
        if getattr(config, name) != plain:
            raise ConfigError(f"{name}: users of recsys train by plain SGD, a rating a step; leave it at {plain!r}")
    if config.clients_every > 0:
        raise ConfigError(
            "clients_every: users of recsys train on all their ratings, others are evaluated on; leave it at 0"
        )
    if config.partition.name != "dirichlet":
        raise ConfigError("partition: every client of recsys is a user with its own ratings; there is nothing to deal")
    if config.others == "all" and config.download != "all":
        raise ConfigError("others=all rebuilds vectors against all items, which clients need then: set download=all")
    levels, method = tuple(float(v) for v in np.unique(ratings.values)), kept_method(config)
    about: dict[str, Any] = {"items": len(ratings.catalogue), "levels": levels, "schedule": schedule_of(config)}
    if method is not None:
        return KeptUsers(method, **{k: getattr(config, k) for k in TAKEN_UP}, **about)
    shared = {k: getattr(config, k) for k in FedRecon.__dataclass_fields__ if hasattr(config, k)}
    return FedRecon(**shared | about, compiled=config.engine != "plain")
