"""How the item matrix begins: at random, from another catalogue's vectors, or from users who consent to be pooled.

A start is called as `(users, method, seed) -> (users left as clients, first model)`.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.recsys.catalogues import Catalogue
from mutirao.recsys.embeddings import Embeddings, has_biases, load_embeddings, transfer
from mutirao.recsys.fedrecon import ITEMS, FedRecon
from mutirao.recsys.matching import match
from mutirao.recsys.pretrain import Begin, Factorisation, pretrain
from mutirao.recsys.ratings import Ratings
from mutirao.recsys.review import pairs_between

log = logging.getLogger("mutirao")


@dataclass(frozen=True)
class Random:
    """Vectors from N(0, 0.1), biases 0: nothing is known."""

    def __call__(self, users: Ratings, method: FedRecon, seed: int) -> tuple[Ratings, Arrays]:
        return users, method.initial(seed)


@dataclass(frozen=True)
class Transfer:
    """Vectors of another catalogue's items, from the file `source`, for the items that are the same.

    Items are the same by id if the catalogues are one; else by the pairs of the table `matches`, which
    `mutirao catalogue match` writes; else by title. Of the pairs a `share` is used, the most popular or drawn.
    """

    source: str = ""
    share: float = 1.0
    share_by: Literal["popularity", "random"] = "popularity"
    matches: str = ""
    threshold: float = 75.0

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("name a file of item vectors, such as start.source=netflix.safetensors")
        check_share(self.share)

    def __call__(self, users: Ratings, method: FedRecon, seed: int) -> tuple[Ratings, Arrays]:
        source, target = load_embeddings(Path(self.source).expanduser()), users.catalogue
        if has_biases(source.card) != method.biases:
            have = "with" if has_biases(source.card) else "without"
            raise ConfigError(f"{self.source} was trained {have} biases; set biases={str(not method.biases).lower()}")
        pairs = self.pairs(target, source)
        log.info("%d of %d items are matched in %s", len(pairs), len(target), self.source)
        draw = rng(seed, 0, "transfer")
        items = transfer(
            target, source, pairs, dimension=method.dimension, rng=draw, share=self.share, by=self.share_by
        )
        return users, {ITEMS: items}

    def pairs(self, target: Catalogue, source: Embeddings) -> Sequence[tuple[str, str]]:
        """Ids that are the same item in both catalogues."""
        if self.matches:
            return pairs_between(Path(self.matches).expanduser(), target, source.catalogue)
        theirs = dict(zip(source.catalogue.ids, source.catalogue.titles, strict=True))
        if all(theirs.get(i) == title for i, title in zip(target.ids, target.titles, strict=True)):
            return [(i, i) for i in target.ids]
        return match(target, source.catalogue, self.threshold).pairs


@dataclass(frozen=True)
class Consent:
    """A share of the users lets their ratings be pooled and factorised; the others are served federatedly from that.

    `epochs` = 0 with `begin` = random leaves the same users with nothing: what transfer is compared with. Of the items
    the pooled users rated, a `share` is used, the most popular or drawn.
    """

    users: float = 0.2
    begin: Begin = "random"
    epochs: int = 25
    lr: float = 0.02
    decay: float = 0.1
    window: int = 5
    share: float = 1.0
    share_by: Literal["popularity", "random"] = "popularity"

    def __post_init__(self) -> None:
        if not 0 < self.users < 1:
            raise ValueError(f"users is {self.users}, but must be a share between 0 and 1")
        check_share(self.share)

    def __call__(self, users: Ratings, method: FedRecon, seed: int) -> tuple[Ratings, Arrays]:
        order = rng(seed, 0, "consent").permutation(len(users.users))
        many = max(1, round(self.users * len(order)))
        if many == len(order):
            raise ConfigError(f"all {len(order)} users consent; nobody is left to be served federatedly")
        pooled, others = (users.of_users(np.sort(rows)) for rows in (order[:many], order[many:]))
        how = Factorisation(method.dimension, self.begin, self.epochs, self.lr, self.decay, method.biases, self.window)
        source = pretrain(pooled, how, seed)
        pairs = [(i, i) for i, times in zip(source.catalogue.ids, source.catalogue.counts, strict=True) if times]
        draw = rng(seed, 0, "transfer")
        items = transfer(
            users.catalogue, source, pairs, dimension=method.dimension, rng=draw, share=self.share, by=self.share_by
        )
        return others, {ITEMS: items}


def check_share(share: float) -> None:
    """Refuse what is no share."""
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}, but must be from 0 to 1")


NAMES = {"random": Random, "transfer": Transfer, "consent": Consent}
