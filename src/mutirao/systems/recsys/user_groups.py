"""Evaluation of groups: every user by the item matrix of its own group.

Users that nobody trained with (`split=users`) sign as late joiners do, with the ratings that are known of them, and are
evaluated by the model of the nearest group.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mutirao.clustering.late_joiners import place_clients
from mutirao.clustering.membership import Groups
from mutirao.clustering.signature_handler import WARM, Signing
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply, Request, Site
from mutirao.systems.recsys.ratings import Ratings, Taste

Mask = npt.NDArray[np.bool_]
Figures = dict[str, float]
Evaluate = Callable[[Arrays], Mapping[str, float]]
BY_RATINGS = ("rmse", "mae")  # metrics of which every rating counts the same; of others every user does


@dataclass(frozen=True)
class Part:
    """The evaluation on a group's users, and how many ratings and users it counts."""

    evaluate: Evaluate
    ratings: int
    users: int


@dataclass
class GroupEvaluator:
    """Evaluates the models of groups; `make(ratings, known)` is the evaluation on these users alone."""

    make: Callable[[Ratings, Mask], Evaluate]
    test: Ratings
    known: Mask
    sign: Callable[[dict[ClientId, Taste]], Mapping[ClientId, npt.NDArray[np.float64]]]
    _found: dict[bytes, dict[str, Part]] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, models: Mapping[str, Arrays], groups: Groups) -> tuple[Figures, dict[str, Figures]]:
        """The figures of all users together, and of each group's."""
        parts = self.parts(groups)
        found = {g: dict(parts[g].evaluate(arrays)) for g, arrays in models.items() if g in parts}
        together: Figures = {}
        for name in dict.fromkeys(name for figures in found.values() for name in figures):
            power = 2 if name == "rmse" else 1
            sizes = {g: parts[g].ratings if name in BY_RATINGS else parts[g].users for g in found if name in found[g]}
            total = sum(n * found[g][name] ** power for g, n in sizes.items())
            together[name] = (total / sum(sizes.values())) ** (1 / power)
        return together, found

    def parts(self, groups: Groups) -> dict[str, Part]:
        """The evaluation on each group's users, made once."""
        key = groups.labels.tobytes() + repr(sorted(groups.later.items())).encode()
        if key not in self._found:
            owners, home = self.test.owners(), self.homes(groups)
            table = {}
            for name in groups.names:
                rows = np.flatnonzero([home[user] == name for user in self.test.users])
                mine = np.isin(owners, rows)
                unknown = mine & ~self.known
                if unknown.any():
                    evaluate = self.make(self.test.of_users(rows), self.known[mine])
                    table[name] = Part(evaluate, int(unknown.sum()), len(np.unique(owners[unknown])))
            self._found = {key: table}
        return self._found[key]

    def homes(self, groups: Groups) -> dict[ClientId, str]:
        """The group of each user: its own, or the one its signature is nearest to, or else the largest."""
        members = groups.members()
        largest = max(members, key=lambda g: (len(members[g]), g))
        home = {user: groups.group_of(user) or largest for user in self.test.users}
        strangers = [user for user in self.test.users if user not in groups.labelled]
        if strangers and groups.signatures.shape[1]:
            rows = dict(zip(self.test.users, range(len(self.test.users)), strict=True))
            signed = self.sign({user: self.taste(rows[user]) for user in strangers})
            names = sorted(signed)
            if names:
                placed = place_clients(groups, np.stack([signed[user] for user in names]))
                home |= {u: groups.names[g] for u, g in zip(names, placed.label.tolist(), strict=True)}
        return home

    def taste(self, row: int) -> Taste:
        """What is known of a user."""
        mine = slice(int(self.test.offsets[row]), int(self.test.offsets[row + 1]))
        known = self.known[mine]
        return Taste(self.test.items[mine][known], self.test.values[mine][known])


def sign_all(
    signing: Signing, first: Arrays, seed: int, tastes: Mapping[ClientId, Taste]
) -> dict[ClientId, npt.NDArray[np.float64]]:
    """The signatures of users who warm up here; who cannot, for want of ratings, has none."""
    request = Request(WARM, first, {"seed": seed, "round": 0})
    many = signing.many
    assert many is not None
    answers = many(dict.fromkeys(tastes, request), {c: Site(c, taste) for c, taste in tastes.items()})
    return {c: r.extras["signature"].astype(np.float64) for c, r in answers.items() if isinstance(r, Reply)}
