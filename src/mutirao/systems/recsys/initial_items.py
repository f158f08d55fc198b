"""Initial item vectors: random, transferred from another catalogue, or trained on users who consent to be pooled.

An initialisation is called as `(users, method, seed, everyone, withdrawn) -> InitialItems`. `users` are to be trained
on, `everyone` has ratings, and the initial model must contain nothing of users who have `withdrawn`.
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


class InitialItems(NamedTuple):
    """The users left as clients, the initial model, and the pooled and listed users, withdrawn ones included."""

    clients: Ratings
    model: Arrays
    pooled: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Random:
    """Vectors from N(0, 0.1), biases 0.

    >>> from mutirao.systems.recsys.fedrecon import FedRecon
    >>> from mutirao.systems.recsys.ratings import plant
    >>> initial = Random()(plant(20, 50, np.random.default_rng(0)), FedRecon(50, dimension=8), seed=0)
    >>> {name: array.shape for name, array in initial.model.items()}
    {'items': (50, 8)}
    """

    def __call__(
        self, users: Ratings, method: FedRecon, seed: int, everyone: Names = (), withdrawn: Names = ()
    ) -> InitialItems:
        return InitialItems(users, method.initial(seed))


@dataclass(frozen=True)
class Transfer:
    """Vectors of another catalogue, from the file `source`, for the items that match.

    Items match by id if the catalogues are the same; otherwise by the table `matches`, which `mutirao catalogue match`
    writes; otherwise by title. Only a `share` of the pairs is used, the most popular or random ones.

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
    ) -> InitialItems:
        source = load_embeddings(Path(self.source).expanduser())
        target = users.catalogue
        if method.biases and not has_biases(source.card):
            raise ConfigError(f"{self.source} was trained without biases; set biases=false")
        if has_biases(source.card) and not method.biases:
            raise ConfigError(f"{self.source} was trained with biases; set biases=true")
        pairs = self.pairs(target, source)
        log.info("%d of %d items match items of %s", len(pairs), len(target), self.source)
        draw = rng(seed, 0, "transfer")
        items = transfer(
            target, source, pairs, dimension=method.dimension, rng=draw, share=self.share, by=self.share_by
        )
        return InitialItems(users, {ITEMS: items})

    def pairs(self, target: Catalogue, source: Embeddings) -> Sequence[tuple[str, str]]:
        """Ids of the items that match in both catalogues."""
        if self.matches:
            return pairs_between(Path(self.matches).expanduser(), target, source.catalogue)
        # Ids of two publishers may coincide by chance, so ids only count if the titles are equal as well.
        titles = dict(zip(source.catalogue.ids, source.catalogue.titles, strict=True))
        if all(titles.get(i) == title for i, title in zip(target.ids, target.titles, strict=True)):
            return [(i, i) for i in target.ids]
        return match(target, source.catalogue, self.threshold).pairs


@dataclass(frozen=True)
class Consent:
    """Vectors factorised from the pooled ratings of users who consent; the others are trained federatedly.

    The file `list` names users who consent, one on each line or in the `column` of a table. Without it, a random share
    of the `users` consents. `epochs` = 0 with `begin` = random is the baseline without pooled ratings for the same
    users. Only a `share` of the items that pooled users rated is used, the most popular or random ones.

    >>> names = [f"u{i}" for i in range(10)]
    >>> len(Consent(users=0.2).sample_users(names, seed=0))
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
    # `mutirao catalogue pretrain` has settings for the initial vectors; here they are at its defaults.
    retired_settings: ClassVar[Mapping[str, float]] = {
        "window": Factorisation.window,
        "whiten": Factorisation.whiten,
        "spread": Factorisation.spread,
    }

    def __post_init__(self) -> None:
        if not 0 < self.users < 1:
            raise ValueError(f"users is {self.users}, but must be a share between 0 and 1")
        if self.column and not self.list:
            raise ValueError("column is that of a list of users; name the file with start.list")
        check_share(self.share)

    def __call__(
        self, users: Ratings, method: FedRecon, seed: int, everyone: Names = (), withdrawn: Names = ()
    ) -> InitialItems:
        listed = self.listed_users({*users.users, *everyone})
        pooled = listed.intersection(users.users)
        if not listed:
            pooled = self.sample_users(users.users, seed)
        if len(pooled) < len(listed):
            log.warning("%d of %d on the list do not train, and are not pooled", len(listed - pooled), len(listed))
        consents = np.array([name in pooled for name in users.users], np.bool_)
        stays = np.array([name not in withdrawn for name in users.users], np.bool_)
        count = f"{int((consents & stays).sum())} of {len(consents)} users consent"
        if consents.all():
            raise ConfigError(f"{count}; no user is left to train federatedly")
        if not (consents & stays).any():
            raise ConfigError(f"{count}; there are no ratings to start from")
        config = Factorisation(
            method.dimension, self.begin, epochs=self.epochs, lr=self.lr, decay=self.decay, biases=method.biases
        )
        # Users who withdrew are not pooled, but they consented: they do not become clients either.
        source = pretrain(users.of_users(np.flatnonzero(consents & stays)), config, seed)
        pairs = [(i, i) for i, times in zip(source.catalogue.ids, source.catalogue.counts, strict=True) if times]
        draw = rng(seed, 0, "transfer")
        items = transfer(
            users.catalogue, source, pairs, dimension=method.dimension, rng=draw, share=self.share, by=self.share_by
        )
        return InitialItems(users.of_users(np.flatnonzero(~consents)), {ITEMS: items}, pooled, listed)

    def sample_users(self, names: Sequence[str], seed: int) -> frozenset[str]:
        """A random share of the users."""
        order = rng(seed, 0, "consent").permutation(len(names)).tolist()
        return frozenset(names[i] for i in order[: max(1, round(self.users * len(order)))])

    def listed_users(self, known: Names) -> frozenset[str]:
        """The users on the list, who all must have ratings; empty without a list."""
        if not self.list:
            return frozenset()
        lines = read_names(Path(self.list).expanduser(), self.column)
        unknown = [name for name in lines if name not in known]
        if unknown:
            where = f"{self.list}, line {lines[unknown[0]]}"
            more = ""
            if len(unknown) > 1:
                more = f", nor are {len(unknown) - 1} more of the {len(lines)} on the list"
            raise ConfigError(f"{where}: {unknown[0]!r} is not a user with enough ratings here{more}")
        return frozenset(lines)


def check_share(share: float) -> None:
    """Refuse a share outside of 0 to 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}, but must be from 0 to 1")


NAMES = {"random": Random, "transfer": Transfer, "consent": Consent}
