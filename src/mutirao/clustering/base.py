"""The interface of a grouper: the part that assigns clients to groups, at first and from round to round.

`cluster=NAME` names one. A run refuses Sybils, requests warm-up signatures if `uses_warm_up`, and calls
`grouper(context, replies)` for the first assignment; each group then has a model of its own. In every round it admits
late joiners (`admit`), calls `before`, trains all groups, calls `after`, and evaluates. Three kinds of groupers:

- by signatures that clients send once (ours; PACFL, FedClust): a clusterer, which is a function of signatures, is
  enough, since `SignatureGrouper` wraps it; `signature` names what clients send if the user may not choose;
- by a request in every round (IFCA): `uses_warm_up = False`, `different_models = True`, k groups at first, and `before`
  sends requests with `context.ask`, then moves clients (`group_state.move`);
- by the updates of a round (CFL): `uses_warm_up = False`, `needs_updates = True`, one group at first, and `after` looks
  at the updates and opens groups (`group_state.open_group`).

`requests`, `extras` and `metrics` declare what it needs of clients besides training: sites' policies are written from
them. What it must remember between rounds goes into `state.own`, which is saved with the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mutirao.clustering.context import GroupContext
from mutirao.clustering.formation import Admission, admit, form
from mutirao.clustering.group_state import Grouping, Groups, open_group
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply


@dataclass(frozen=True)
class GroupUpdates:
    """The screened replies of one group's clients in a round, and the model that they were sent."""

    model: Arrays
    replies: Mapping[ClientId, Reply]


class Grouper:
    """Assigns clients to groups. By default clients never move once groups are formed, and late joiners wait.

    A grouper of your own defines the first assignment; this one makes two groups by the first letter of the name:

    >>> class Alphabetical(Grouper):
    ...     uses_warm_up = False
    ...     def __call__(self, context, replies):
    ...         names = sorted(context.run.roster.ids)
    ...         return groups_without_signatures(dict.fromkeys(names), [int(name >= "m") for name in names])
    >>> Alphabetical().uses_warm_up, Alphabetical().moves_clients
    (False, False)
    """

    uses_warm_up: bool = True  # whether clients train the test model first and send its signature
    signature: Any = None  # what they send, if the user may not choose (see `mutirao.clustering.signatures`)
    different_models: bool = False  # whether groups begin with different models
    needs_updates: bool = False  # whether `after` needs the updates of single clients
    moves_clients: bool = False  # whether it moves clients itself, so that `regroup` does not apply
    requests: tuple[str, ...] = ()  # kinds of requests it makes besides the warm-up
    extras: tuple[str, ...] = ()  # arrays that clients answer them with
    metrics: tuple[str, ...] = ()

    def __call__(self, context: GroupContext, replies: Mapping[ClientId, Reply]) -> Groups:
        """The first assignment of the clients with a usable warm-up, or of all present clients without a warm-up."""
        raise NotImplementedError

    def admit(
        self, context: GroupContext, state: Grouping, replies: Mapping[ClientId, Reply]
    ) -> dict[ClientId, Admission]:
        """Assign late joiners to groups, or say why they have to wait."""
        return {client: Admission("", 0.0, 0.0, "groups are formed") for client in replies}

    def before(self, context: GroupContext, state: Grouping) -> None:
        """Called before a round: make requests, move clients."""

    def after(self, context: GroupContext, state: Grouping, updates: Mapping[str, GroupUpdates]) -> None:
        """Called after a round, with each group's updates if `needs_updates`: move clients, open groups."""


@dataclass(frozen=True)
class SignatureGrouper(Grouper):
    """Any clusterer of warm-up signatures; late joiners go to the group that their signature is nearest to."""

    cluster: Any

    def __call__(self, context: GroupContext, replies: Mapping[ClientId, Reply]) -> Groups:
        """The groups that the clusterer finds."""
        plan = context.plan
        signatures = {c: r.extras["signature"] for c, r in replies.items()}
        return form(signatures, self.cluster, plan.noise, plan.directions, context.run.seed)

    def admit(
        self, context: GroupContext, state: Grouping, replies: Mapping[ClientId, Reply]
    ) -> dict[ClientId, Admission]:
        """The nearest group, or none."""
        return admit(state.groups, {c: r.extras["signature"] for c, r in replies.items()})


@dataclass(frozen=True)
class Alone(Grouper):
    """Every client trains a model of its own: the baseline that any collaboration has to beat.

    >>> from mutirao.config import Part, build
    >>> build("cluster", Part("alone"))  # as `cluster=alone` does
    Alone()
    """

    uses_warm_up = False

    def __call__(self, context: GroupContext, replies: Mapping[ClientId, Reply]) -> Groups:
        """As many groups as clients."""
        return groups_without_signatures(replies, np.arange(len(replies)))

    def admit(
        self, context: GroupContext, state: Grouping, replies: Mapping[ClientId, Reply]
    ) -> dict[ClientId, Admission]:
        """A new group for each client."""
        plan = context.plan
        all_classes = range(plan.classes)
        for client in sorted(replies):
            open_group(context.run, state, [client], plan.model(plan.classes), all_classes, plan.inherit([]))
        return {c: Admission(state.groups.group_of(c), 0.0, 1.0) for c in sorted(replies)}


def as_grouper(part: Any) -> Grouper:
    """A grouper as it is; anything else is taken for a clusterer of signatures."""
    if isinstance(part, Grouper):
        return part
    return SignatureGrouper(part)


def groups_without_signatures(clients: Mapping[ClientId, Any], labels: Any, min_count: int = 0) -> Groups:
    """Groups of clients, sorted by name, that sent no signature; at least `min_count` groups, some perhaps empty."""
    names = tuple(sorted(clients))
    return Groups(names, np.asarray(labels, np.int64), np.zeros((len(names), 0)), min_count=min_count)
