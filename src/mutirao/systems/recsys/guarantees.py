"""What settings of a recommender promise its users, what travels for it, and what would be no promise."""

from typing import Any

import numpy as np

from mutirao.config import build
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Fleet
from mutirao.core.parts import AnyHandler
from mutirao.core.sparse_rows import BLOCKS
from mutirao.errors import ConfigError
from mutirao.systems.recsys.fedrecon import ITEMS, FedRecon
from mutirao.systems.recsys.item_aggregation import TOUCHES, ByItem
from mutirao.systems.recsys.private_exchange import Discreet
from mutirao.systems.recsys.row_download import SlicedFleet

DOWNLOADS = ("touched", "blocks", "all")


def touch_of(config: Any, sums: str) -> float:
    """What users add to the count of each item they touch; 0: the server sees which they are, or need not know."""
    part = build("aggregate", config.aggregate, sums=sums)
    return part.touch if isinstance(part, ByItem) and part.counts else 0.0


def discreet(config: Any, method: Any, sums: str) -> tuple[AnyHandler, Arrays]:
    """What users do, the method itself if nothing else is asked of them; and what a model has besides the items.

    That are counts of those who touched each item, if there are any.
    """
    touch = touch_of(config, sums)
    if (config.download == "touched" and not touch) or not isinstance(method, FedRecon):
        return method, {}
    touches = {TOUCHES: np.zeros(method.items, np.float32)} if touch else {}
    return Discreet(method, config.download, config.block, touch), touches


def rows_asked(config: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What users are asked to know which rows they need, and the extra they answer with: their items, or blocks."""
    if config.centralised or config.download == "all":
        return (), ()
    return ("rows",), (ITEMS if config.download == "touched" else BLOCKS,)


def check(config: Any, groups: bool) -> None:
    """Refuse, before the first round, settings of which one undoes what another promises."""
    secure, local, how = config.secure.name != "none", config.privacy.name == "local", config.download
    if groups or config.method.name != "fedrecon":
        who = "cluster: in groups" if groups else f"method={config.method.name}: there"
        if secure or how not in ("touched", "all"):
            raise ConfigError(f"{who} users answer as FedRecon's of one model do not; use secure=none, touched")
        if config.privacy.name != "none" and config.aggregate.name == "by_item":
            raise ConfigError(f"{who} nobody counts who touched an item, by which by_item divides; use fedavg")
    if how == "touched" and (secure or local):
        keeps = "secure=secagg+ keeps from the server; use all or blocks"
        keeps = keeps if secure else "privacy=local keeps at home; use all"
        raise ConfigError(f"download=touched tells which items a user rated, which {keeps}")
    if how == "blocks" and not secure:
        raise ConfigError(
            "download=blocks hides which items a user rated, and the rows it sends back would tell them again; "
            "set secure=secagg+, where rows are masked, or use all"
        )


def slice_rows(fleet: Fleet, config: Any) -> Fleet:
    """The fleet that asks users for the rows they need, if they name any; a secure sum is made around it."""
    if config.centralised or config.download not in ("touched", "blocks"):
        return fleet
    return SlicedFleet(fleet, ITEMS, summed=config.secure.name != "none")
