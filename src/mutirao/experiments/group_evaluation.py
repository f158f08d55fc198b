"""Evaluation of the groups' models on their clients' own test data, and which groups have settled."""

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

# The least rise of a group's score that counts as a gain (`stable`): one of 500 test samples. Less is chance.
GAIN = 0.002


def evaluate_groups(context: GroupContext, state: Grouping, row: Row, due: bool) -> None:
    """Enter the models' metrics on their clients' own test data, as means over clients with equal weights.

    Where clients do not evaluate, the plan's own evaluation of each group's model is entered.
    """
    run = context.run
    plan = context.plan
    with_worst = bool(plan.clients_every) and run.round % plan.clients_every == 0
    replies: dict[ClientId, Reply] = {}
    if plan.clients_evaluate and (due or with_worst):
        replies = evaluate_on_clients(context, state)
    if due:
        if not plan.clients_evaluate and plan.evaluate_on_server is not None:
            evaluate_on_server(context, state, row, plan.evaluate_on_server, with_worst)
        enter_metrics(context, state, row, replies)
        found = quality(state.groups, plan.true_groups(run.round))
        row.update({k: found[k] for k in ("groups", "rand") if k in found})
    if with_worst and plan.clients_evaluate:
        values = [r.metrics[plan.monitor] for r in replies.values() if plan.monitor in r.metrics]
        row.update(summarise(plan.monitor, values, plan.higher_is_better))


def enter_metrics(context: GroupContext, state: Grouping, row: Row, replies: Mapping[ClientId, Reply]) -> None:
    """Enter what clients reported: the means into the row, each group's score into the state."""
    run = context.run
    plan = context.plan
    for name in plan.reported_metrics:
        values = [r.metrics[name] for r in replies.values() if name in r.metrics]
        if values:
            row[name] = float(np.mean(values))
    for client, reply in replies.items():
        run.roster.note(client, {f"own_{k}": v for k, v in reply.metrics.items() if k in row})
    for group, members in state.groups.members().items():
        scores = [m[plan.monitor] for c in members if c in replies and plan.monitor in (m := replies[c].metrics)]
        if scores:
            state.scores.setdefault(group, []).append((run.round, float(np.mean(scores))))
            update_settled(state, group, plan)


def evaluate_on_server(
    context: GroupContext, state: Grouping, row: Row, evaluate: EvaluateGroups, with_worst: bool = False
) -> None:
    """Enter the metrics of the plan's own evaluation: of all groups, of each group, and those of single clients."""
    run = context.run
    plan = context.plan
    overall, by_group = evaluate({g: part_of(run.arrays, g) for g in state.groups.names}, state.groups)
    row.update(overall)
    values: list[float] = []  # the score of each client's group
    members = state.groups.members()
    for group, metrics in by_group.items():
        if plan.monitor in metrics:
            score = float(metrics[plan.monitor])
            state.scores.setdefault(group, []).append((run.round, score))
            update_settled(state, group, plan)
            values += [score] * len(members.get(group, ()))
    if with_worst:
        row.update(summarise(plan.monitor, values, plan.higher_is_better))


def evaluate_on_clients(context: GroupContext, state: Grouping) -> dict[ClientId, Reply]:
    """The metrics of each group's model on the test data of its clients that are present."""
    here = set(context.fleet.clients())
    requests = {}
    for group, members in state.groups.members().items():
        request = request_of(context.run, state, group, "evaluate")
        requests.update({c: request for c in members if c in here and context.plan.honest(c)})
    if requests:
        return sift(context.fleet.ask(requests), fault_of_evaluation).replies
    return {}


def fault_of_evaluation(reply: Reply) -> Failure | None:
    """The fault of a reply to an evaluation, or None: one false value must not decide a group's mean."""
    if (wrong := fault_of_extras(reply)) is not None:
        return wrong
    odd = [k for k, v in reply.metrics.items() if k.startswith("accuracy") and not 0 <= v <= 1]
    if odd:
        return Failure("too_large", f"reports an {odd[0]} outside of 0 to 1")
    return None


def update_settled(state: Grouping, group: str, plan: Plan) -> None:
    """Mark a group as settled if its last `stable` scores brought no gain over the best before them."""
    values = [v if plan.higher_is_better else -v for _, v in state.scores[group]]
    if not plan.stable or group in state.settled or len(values) <= plan.stable:
        return
    if max(values[-plan.stable :]) <= max(values[: -plan.stable]) + GAIN:
        state.settled[group] = state.scores[group][-1][0]


def request_of(run: Run, state: Grouping, group: str, do: str) -> Request:
    """A request with the current model of a group."""
    config = {"seed": run.seed, "round": run.round, **class_map_of(state, group)}
    return Request(do, part_of(run.arrays, group), config)


def class_map_of(state: Grouping, group: str) -> dict[str, Scalar]:
    """The class of each output of a group's model, unless it has all classes in order."""
    names = state.classes[group]
    if names == list(range(state.total or len(names))):
        return {}
    return {"classes": ",".join(map(str, names))}
