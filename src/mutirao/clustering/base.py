"""The seam: a grouper is a part that says who is alike, at first and from round to round.

`cluster=NAME` names one. What a run does around it (`flow`): refuse swarms -> warm-up, if `warms` -> `grouper(scene,
replies)`, the first division -> one model a group; then in every round: newcomers (`admit`) -> `before` -> all groups
train -> `after` -> clients judge. To write one, take `Grouper` and change what differs:

- by what clients send once (our way; PACFL, FedClust): a clusterer, which is a function of signatures, is enough, since
  `Signed` makes a grouper of it; `signature` names what they send if it is not for the user to choose;
- by asking in every round (IFCA): `warms = False`, `apart = True`, k groups at first, and `before` asks clients by
  `scene.ask`, then moves them (`state.move`);
- by the updates of a round (CFL): `warms = False`, `hears = True`, one group at first, and `after` looks at what was
  heard and opens groups (`state.open_group`).

What it asks of clients besides training stands in `asks`, `extras` and `metrics`: policies are written from them.
What it has to remember between rounds goes into `state.own`, which is saved with the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mutirao.clustering.context import Scene
from mutirao.clustering.formation import form
from mutirao.clustering.group_state import Grouping, open_group
from mutirao.clustering.late_joiners import Admission, admit
from mutirao.clustering.membership import Groups
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply


@dataclass(frozen=True)
class Heard:
    """What the clients of one group sent in a round, as it was screened, and the model that they were sent."""

    model: Arrays
    replies: Mapping[ClientId, Reply]


class Grouper:
    """How clients are assigned to groups. By default nobody moves once groups are formed, and newcomers wait.

    A way of one's own says how groups are formed at first; this one makes two by the first letter of the name:

    >>> class Alphabetical(Grouper):
    ...     warms = False
    ...     def __call__(self, scene, replies):
    ...         names = scene.run.roster.ids
    ...         return unsigned([[c for c in names if c < "m"], [c for c in names if c >= "m"]])
    >>> Alphabetical().warms, Alphabetical().moves
    (False, False)
    """

    warms: bool = True  # whether clients train the test model first, and send its signature
    signature: Any = (
        None  # what they send, if the grouper says so and not the user (see `mutirao.clustering.signatures`)
    )
    apart: bool = False  # whether groups begin with different models
    hears: bool = False  # whether `after` needs the updates of single clients
    moves: bool = False  # whether it moves clients by itself, so that forming groups anew is not for it
    asks: tuple[str, ...] = ()  # requests it makes besides the warm-up
    extras: tuple[str, ...] = ()  # what clients answer to them
    metrics: tuple[str, ...] = ()

    def __call__(self, scene: Scene, replies: Mapping[ClientId, Reply]) -> Groups:
        """The first division: of those who sent a usable warm-up, or of all who are here if there is none."""
        raise NotImplementedError

    def admit(self, scene: Scene, state: Grouping, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Admission]:
        """Where newcomers belong, or why they have to wait."""
        return {client: Admission("", 0.0, 0.0, "groups are formed") for client in replies}

    def before(self, scene: Scene, state: Grouping) -> None:
        """Before a round: ask what is to be asked, and move clients."""

    def after(self, scene: Scene, state: Grouping, heard: Mapping[str, Heard]) -> None:
        """After a round, given what was heard in each group if it `hears`: move clients, open groups."""


@dataclass(frozen=True)
class Signed(Grouper):
    """Any clusterer of the signatures of one warm-up; newcomers join the group that theirs is nearest to."""

    cluster: Any

    def __call__(self, scene: Scene, replies: Mapping[ClientId, Reply]) -> Groups:
        """What the clusterer finds."""
        plan, signatures = scene.plan, {c: r.extras["signature"] for c, r in replies.items()}
        return form(signatures, self.cluster, plan.noise, plan.directions, scene.run.seed)

    def admit(self, scene: Scene, state: Grouping, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Admission]:
        """The nearest group, or none."""
        return admit(state.groups, {c: r.extras["signature"] for c, r in replies.items()})


@dataclass(frozen=True)
class Alone(Grouper):
    """Every client trains a model of its own, by itself: what any way of learning together has to beat.

    >>> from mutirao.config import Part, build
    >>> build("cluster", Part("alone"))  # as `cluster=alone` does
    Alone()
    """

    warms = False

    def __call__(self, scene: Scene, replies: Mapping[ClientId, Reply]) -> Groups:
        """As many groups as clients."""
        return unsigned(replies, np.arange(len(replies)))

    def admit(self, scene: Scene, state: Grouping, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Admission]:
        """One more group each."""
        plan, everything = scene.plan, range(scene.plan.classes)
        for client in sorted(replies):
            open_group(scene.run, state, [client], plan.model(plan.classes), everything, plan.inherit([]))
        return {c: Admission(state.groups.group_of(c), 0.0, 1.0) for c in sorted(replies)}


def as_grouper(part: Any) -> Grouper:
    """A grouper as it is; anything else is taken for a clusterer of signatures."""
    return part if isinstance(part, Grouper) else Signed(part)


def unsigned(clients: Mapping[ClientId, Any], labels: Any, least: int = 0) -> Groups:
    """Groups of clients, sorted by name, that sent no signature; `least`: so many groups, be they empty."""
    names = tuple(sorted(clients))
    return Groups(names, np.asarray(labels, np.int64), np.zeros((len(names), 0)), least=least)
