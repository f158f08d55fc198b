"""IFCA (Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020):
k models from the start, and each client trains the one with the least loss on its data.
"""

# ruff: noqa: D102  # documented in `Grouper`

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mutirao.clustering.base import Grouper, groups_without_signatures
from mutirao.clustering.context import GroupContext
from mutirao.clustering.formation import Admission
from mutirao.clustering.group_state import Grouping, Groups, move
from mutirao.core.fleet import ClientId, Failure, Reply, Request
from mutirao.core.validation import fault_of_extras


@dataclass(frozen=True)
class Ifca(Grouper):
    """`groups` different models; before each round all are sent to all clients, and s_i = argmin_j F_i(theta_j).

    F_i is the mean loss over the client's training samples. Clients reply with the number of a model, without the loss.

    >>> Ifca(groups=3).uses_warm_up  # clients choose among the three models and send no signature
    False
    """

    groups: int = 5  # must be known in IFCA
    uses_warm_up = False
    different_models = True
    moves_clients = True
    requests = ("choose",)
    extras = ("choice",)

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"groups is {self.groups!r}, but must be at least 1")

    def __call__(self, context: GroupContext, replies: Mapping[ClientId, Reply]) -> Groups:
        return groups_without_signatures(replies, np.zeros(len(replies)), min_count=self.groups)

    def admit(
        self, context: GroupContext, state: Grouping, replies: Mapping[ClientId, Reply]
    ) -> dict[ClientId, Admission]:
        # Only until they choose for themselves, which is before this very round.
        first = state.groups.names[0]
        return {client: Admission(first, 0.0, 0.0) for client in replies}

    def before(self, context: GroupContext, state: Grouping) -> None:
        run = context.run
        names = state.groups.names
        models = {k: v for k, v in run.arrays.items() if k.partition("/")[0] in names}
        common = Request("choose", models, {"seed": run.seed, "round": run.round + 1})
        here = [c for c in context.fleet.clients() if c in state.groups.labelled]
        replies = context.ask(dict.fromkeys(here, common), "choice", lambda reply: fault_of_choice(reply, len(names)))
        move(state, {c: names[int(r.extras["choice"][0])] for c, r in replies.items()})


def fault_of_choice(reply: Reply, groups: int) -> Failure | None:
    """The fault of a choice, or None if it is the number of a model."""
    if (wrong := fault_of_extras(reply)) is not None:
        return wrong
    choice = reply.extras.get("choice")
    if choice is None:
        return Failure("missing_key", "did not say which model it chose")
    if choice.dtype != np.int64 or choice.shape != (1,):
        return Failure("shape", f"sent a choice of {choice.dtype} {choice.shape}, expected one int64")
    if not 0 <= choice[0] < groups:
        return Failure("too_large", f"chose model {choice[0]} of {groups}")
    return None
