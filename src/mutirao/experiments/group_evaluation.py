"""How the groups' models do on their clients' own test data, and which groups have settled."""

from collections.abc import Mapping

import numpy as np

from mutirao.clustering.context import GroupContext
from mutirao.clustering.formation import quality
from mutirao.clustering.group_state import Grouping
from mutirao.clustering.plan import EvaluateGroups, Plan
from mutirao.core.arrays import part_of
from mutirao.core.client_evaluation import summarise
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar
from mutirao.core.records import Row
from mutirao.core.rounds import Run
from mutirao.core.validation import fault_of_extras, sift

# What a group's judgement must rise by to count as a gain (`stable`): of 500 test samples, one. Less is chance.
GAIN = 0.002


def evaluate_groups(context: GroupContext, state: Grouping, row: Row, due: bool) -> None:
    """Enter how the models do on their clients' own test data: means over clients, each counting the same.

    Where clients do not say, the plan's own evaluation of each group's model does.
    """
    run, plan = context.run, context.plan
    every = bool(plan.clients_every) and run.round % plan.clients_every == 0
    replies, members = evaluate_on_clients(context, state) if plan.clients_evaluate and (due or every) else ({}, {})
    if due:
        if not plan.clients_evaluate and plan.evaluate_on_server is not None:
            evaluate_on_server(context, state, row, plan.evaluate_on_server, every)
        for name in plan.reported_metrics:
            if values := [r.metrics[name] for r in replies.values() if name in r.metrics]:
                row[name] = float(np.mean(values))
        for c, reply in replies.items():
            run.roster.note(c, {f"own_{k}": v for k, v in reply.metrics.items() if k in row})
        for g, who in members.items():
            if own := [replies[c].metrics[plan.monitor] for c in who if plan.monitor in metrics_of(replies, c)]:
                state.scores.setdefault(g, []).append((run.round, float(np.mean(own))))
                update_settled(state, g, plan)
        found = quality(state.groups, plan.true_groups(run.round))
        row.update({k: found[k] for k in ("groups", "rand") if k in found})
    if every and plan.clients_evaluate:
        values = [r.metrics[plan.monitor] for r in replies.values() if plan.monitor in r.metrics]
        row.update(summarise(plan.monitor, values, plan.higher_is_better))


def evaluate_on_server(
    context: GroupContext, state: Grouping, row: Row, by: EvaluateGroups, every: bool = False
) -> None:
    """Enter how the models do by the plan's own evaluation, together and group by group, and what each client has."""
    run, plan = context.run, context.plan
    together, each = by({g: part_of(run.arrays, g) for g in state.groups.names}, state.groups)
    row.update(together)
    for group, figures in each.items():
        if plan.monitor in figures:
            state.scores.setdefault(group, []).append((run.round, float(figures[plan.monitor])))
            update_settled(state, group, plan)
    if every:
        scores = {g: float(figures[plan.monitor]) for g, figures in each.items() if plan.monitor in figures}
        sizes = {g: len(who) for g, who in state.groups.members().items()}
        row.update(
            summarise(
                plan.monitor, [s for g, s in scores.items() for _ in range(sizes.get(g, 0))], plan.higher_is_better
            )
        )


def metrics_of(replies: Mapping[ClientId, Reply], client: ClientId) -> Mapping[str, float]:
    """What a client says of its group's model; nothing if it did not answer."""
    return replies[client].metrics if client in replies else {}


def evaluate_on_clients(
    context: GroupContext, state: Grouping
) -> tuple[dict[ClientId, Reply], dict[str, list[ClientId]]]:
    """What the clients that are here say of their group's model, and who they are by group."""
    run, fleet, plan = context.run, context.fleet, context.plan
    here = set(fleet.clients())
    common = {g: request_of(run, state, g, "evaluate") for g in state.groups.names}
    members = {g: [c for c in who if c in here and plan.honest(c)] for g, who in state.groups.members().items()}
    requests = {c: common[g] for g, who in members.items() for c in who}
    return sift(fleet.ask(requests), fault_of_evaluation).replies if requests else {}, members


def fault_of_evaluation(reply: Reply) -> Failure | None:
    """What is wrong with what a client says of its group's model, or None: one lie must not become the group's mean."""
    if (wrong := fault_of_extras(reply)) is not None:
        return wrong
    odd = [k for k, v in reply.metrics.items() if k.startswith("accuracy") and not 0 <= v <= 1]
    return Failure("too_large", f"tells an {odd[0]} that is no share") if odd else None


def update_settled(state: Grouping, group: str, plan: Plan) -> None:
    """A group has settled if its last `stable` judgements brought no gain over the best before them."""
    values = [v if plan.higher_is_better else -v for _, v in state.scores[group]]
    if not plan.stable or group in state.settled or len(values) <= plan.stable:
        return
    if max(values[-plan.stable :]) <= max(values[: -plan.stable]) + GAIN:
        state.settled[group] = state.scores[group][-1][0]


def request_of(run: Run, state: Grouping, group: str, do: str) -> Request:
    """What a client is asked of its group's model as it is now."""
    config = {"seed": run.seed, "round": run.round, **class_map_of(state, group)}
    return Request(do, part_of(run.arrays, group), config)


def class_map_of(state: Grouping, group: str) -> dict[str, Scalar]:
    """Which class each output of a group's head stands for, where it has not all of them in order."""
    names = state.classes[group]
    return {} if names == list(range(state.total or len(names))) else {"classes": ",".join(map(str, names))}
