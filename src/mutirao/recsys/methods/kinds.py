"""Methods by name, and what each takes of the recipe's settings."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mutirao.config import build
from mutirao.errors import ConfigError
from mutirao.recsys.methods.client import KeptUsers
from mutirao.recsys.methods.fcf import FCF
from mutirao.recsys.methods.fedrap import FedRAP
from mutirao.recsys.methods.fmf import FMF
from mutirao.recsys.methods.pfedrec import PFedRec
from mutirao.recsys.methods.work import Method
from mutirao.recsys.ratings import Ratings
from mutirao.schedules import schedule_of


@dataclass(frozen=True)
class Rebuilt:
    """FedRecon, whose users keep nothing; it is set by the recipe's own settings."""


NAMES = {"fedrecon": Rebuilt, "fmf": FMF, "fcf": FCF, "pfedrec": PFedRec, "fedrap": FedRAP}
# What FedRecon alone reads; others have rates and a form of their own.
OF_FEDRECON = (
    *("lr", "loss", "biases", "negative_weight", "weight_decay"),
    *("support", "support_by", "rebuild", "ridge", "ridge_bias", "passes", "rebuild_lr"),
)


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
        raise ConfigError(f"{called}: users judge themselves, and with privacy={config.privacy.name} they tell nothing")
    wanted = "leave_one_out" if method.implicit else "time"
    if config.split != wanted:
        raise ConfigError(f"{called} is judged by users who trained; set split={wanted}")
    return method  # type: ignore[no-any-return]


def users_of(config: Any, method: Method, ratings: Ratings) -> KeptUsers:
    """What a user does by that method, with the scale of the ratings, which everybody knows."""
    names = ("dimension", "negatives", "epochs", "samples")
    levels = tuple(float(v) for v in np.unique(ratings.values))
    given = {name: getattr(config, name) for name in names}
    return KeptUsers(method, len(ratings.catalogue), levels=levels, schedule=schedule_of(config), **given)
