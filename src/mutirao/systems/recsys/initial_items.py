"""How the item matrix begins: at random, from another catalogue's vectors, or from users who consent to be pooled.

A start is called as `(users, method, seed, everyone, withdrawn) -> Begun`: `users` train, `everyone` has ratings, and
of those who have `withdrawn` nothing may be in the first model.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.consent import read_names
from mutirao.systems.recsys.embeddings import Embeddings, has_biases, load_embeddings, transfer
from mutirao.systems.recsys.fedrecon import ITEMS, FedRecon
from mutirao.systems.recsys.matching import match, pairs_between
from mutirao.systems.recsys.pretrain import Begin, Factorisation, pretrain
from mutirao.systems.recsys.ratings import Ratings

log = logging.getLogger("mutirao")

Names = Collection[str]


class Begun(NamedTuple):
    """Who is left as a client, the first model, and, those who withdrew since included, who was pooled and listed."""

    clients: Ratings
    model: Arrays
    pooled: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Random:
    """Vectors from N(0, 0.1), biases 0: a start without knowledge.

    >>> from mutirao.systems.recsys.fedrecon import FedRecon
    >>> from mutirao.systems.recsys.ratings import plant
    >>> begun = Random()(plant(20, 50, np.random.default_rng(0)), FedRecon(50, dimension=8), seed=0)
    >>> {name: array.shape for name, array in begun.model.items()}
    {'items': (50, 8)}
    """

    def __call__(
        self, users: Ratings, method: FedRecon, seed: int, everyone: Names = (), withdrawn: Names = ()
    ) -> Begun:
        return Begun(users, method.initial(seed))


@dataclass(frozen=True)
class Transfer:
    """Vectors of another catalogue's items, from the file `source`, for the items that are the same.

    Items are the same by id if the catalogues are one; else by the pairs of the table `matches`, which
    `mutirao catalogue match` writes; else by title. Of the pairs a `share` is used, the most popular or drawn.

    >>> Transfer(source="films.safetensors", share=0.5)  # half of the pairs, the most popular
    Transfer(source='films.safetensors', share=0.5, share_by='popularity', matches='', threshold=75.0)
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

    def __call__(
        self, users: Ratings, method: FedRecon, seed: int, everyone: Names = (), withdrawn: Names = ()
    ) -> Begun:
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
        return Begun(users, {ITEMS: items})

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
    """Ratings of users who consent are pooled and factorised; federated training of the others starts from there.

    Who does stands in the file `list`, a user a line, or in the `column` of a table; without one it is a share of the
    `users`, drawn. `epochs` = 0 with `begin` = random leaves the same users with nothing: what transfer is compared
    with. Of the items the pooled users rated, a `share` is used, the most popular or drawn.

    >>> names = [f"u{i}" for i in range(10)]
    >>> len(Consent(users=0.2).drawn(names, seed=0))
    2
    """

    users: float = 0.2
    list: str = ""
    column: str = ""
    begin: Begin = "random"
    epochs: int = 25
    lr: float = 0.02
    decay: float = 0.1
    share: float = 1.0
    share_by: Literal["popularity", "random"] = "popularity"
    # How first vectors are made is for `mutirao catalogue pretrain` to vary: here it is as by default there.
    retired_settings: ClassVar[Mapping[str, float]] = {
        "window": Factorisation.window,
        "whiten": Factorisation.whiten,
        "spread": Factorisation.spread,
    }

    def __post_init__(self) -> None:
        if not 0 < self.users < 1:
            raise ValueError(f"users is {self.users}, but must be a share between 0 and 1")
        if self.column and not self.list:
            raise ValueError("column names that of a list of users; name the file with start.list")
        check_share(self.share)

    def __call__(
        self, users: Ratings, method: FedRecon, seed: int, everyone: Names = (), withdrawn: Names = ()
    ) -> Begun:
        listed = self.listed({*users.users, *everyone})
        pooled = listed.intersection(users.users) if listed else self.drawn(users.users, seed)
        if len(pooled) < len(listed):
            log.warning("%d of %d on the list do not train, and are not pooled", len(listed - pooled), len(listed))
        consent = np.array([name in pooled for name in users.users], np.bool_)
        stays = np.array([name not in withdrawn for name in users.users], np.bool_)
        if consent.all() or not (consent & stays).any():
            left = "nobody is left to be served federatedly" if consent.all() else "there is nothing to begin from"
            raise ConfigError(f"{int((consent & stays).sum())} of {len(consent)} users consent; {left}")
        those, others = (users.of_users(np.flatnonzero(rows)) for rows in (consent & stays, ~consent))
        shared = {k: getattr(self, k) for k in ("begin", "epochs", "lr", "decay")}
        source = pretrain(those, Factorisation(method.dimension, biases=method.biases, **shared), seed)
        pairs = [(i, i) for i, times in zip(source.catalogue.ids, source.catalogue.counts, strict=True) if times]
        draw = rng(seed, 0, "transfer")
        items = transfer(
            users.catalogue, source, pairs, dimension=method.dimension, rng=draw, share=self.share, by=self.share_by
        )
        return Begun(others, {ITEMS: items}, pooled, listed)

    def drawn(self, names: Sequence[str], seed: int) -> frozenset[str]:
        """A share of the users."""
        order = rng(seed, 0, "consent").permutation(len(names)).tolist()
        return frozenset(names[i] for i in order[: max(1, round(self.users * len(order)))])

    def listed(self, known: Names) -> frozenset[str]:
        """Those on the list, all of whom have ratings; nobody if there is none."""
        if not self.list:
            return frozenset()
        lines = read_names(Path(self.list).expanduser(), self.column)
        strange = [name for name in lines if name not in known]
        if strange:
            where, many = f"{self.list}, line {lines[strange[0]]}", len(strange)
            more = f", nor are {many - 1} more of the {len(lines)} on the list" if many > 1 else ""
            raise ConfigError(f"{where}: {strange[0]!r} is not a user with enough ratings here{more}")
        return frozenset(lines)


def check_share(share: float) -> None:
    """Refuse what is no share."""
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}, but must be from 0 to 1")


NAMES = {"random": Random, "transfer": Transfer, "consent": Consent}
