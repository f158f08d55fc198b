"""Evaluation of the groups' models on their clients' own test data, and which groups have settled.

References for groups: each client alone, and one FedAvg model fine-tuned by each client; and which model is served.

At the end of a run every client fits a few models to its own samples and reports their metrics; no model leaves it:

- `groups`: its group's model as it is, and `groups_finetuned`: the same after a round's training at the client;
- `finetuned`: a FedAvg model of all clients, trained for this in `rounds` rounds, after as much; where all clients are
  in one group, its model;
- `alone`: the common first model, trained by the client for as many epochs as it trained in the run, at most `alone`.

Test samples measure how good the served models are. Which model is served is chosen on held-out samples, which are not
trained on: the one with the best mean, but groups unless it is better by more than one standard error of the clients'
differences (the rule of Breiman, Friedman, Olshen and Stone, 1984).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mutirao.aggregation import FedAvg
from mutirao.clustering.context import FIT_EPOCHS, EvaluateGroups, GroupContext, Plan
from mutirao.clustering.formation import quality
from mutirao.clustering.group_state import HOME, Grouping
from mutirao.core.arrays import Arrays, part_of
from mutirao.core.client_evaluation import summarise
from mutirao.core.fleet import ClientId, Failure, Fleet, Reply, Request, Scalar
from mutirao.core.records import Row
from mutirao.core.rounds import Group, Run, step, wait_for_clients
from mutirao.core.validation import fault_of_extras, sift
from mutirao.errors import Diverged, TooFewClients, TooFewReplies
from mutirao.selection import Uniform

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
    values = [score for _, score in state.scores[group]]
    if not plan.higher_is_better:
        values = [-score for score in values]
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


log = logging.getLogger("mutirao")

SERVED_MODELS = ("groups", "groups_finetuned", "finetuned", "alone")
MEMORY_KEY = HOME + "served"  # in the run's memory
VALIDATION_ACCURACY = "accuracy_held"  # a metric: accuracy on held-out samples
STANDARD_ERRORS = 1.0  # by which another model must be better than that of groups
DESCRIPTIONS = {
    "groups": "the models of their groups",
    "groups_finetuned": "the models of their groups, fine-tuned",
    "finetuned": "one FedAvg model, fine-tuned",
    "alone": "training alone",
}
Fits = dict[str, dict[ClientId, dict[str, float]]]  # metrics by model and client


@dataclass(frozen=True)
class References:
    """How long references train, and which models clients get: `serve` is one of `SERVED_MODELS`, or `auto`."""

    rounds: int  # of FedAvg
    epochs: int  # of a round, and of fine-tuning
    alone: int  # most epochs of a client alone (0: as many as in the run)
    per_round: int | float = 0.5  # clients of a round: a share of all, or that many for each group
    serve: str = "groups"
    repeats_rounds: bool = False  # whether requests give a number of rounds to train, and not of epochs

    def effort(self, rounds: int) -> dict[str, Scalar]:
        """The part of a request's configuration that makes a client train as long as in that many rounds."""
        if self.repeats_rounds:
            return {"times": rounds}
        epochs = rounds * self.epochs
        if self.alone:
            epochs = min(self.alone, epochs)
        return {FIT_EPOCHS: epochs}


def compare_with_references(run: Run, fleet: Fleet, plan: Plan, settings: References) -> Row:
    """Train the references, evaluate them on the clients, and store the comparison; returns columns for the record."""
    state = Grouping.from_memory(run.memory)
    if state is None:
        return {}
    try:
        fedavg = train_fedavg(run, fleet, plan, settings, state.groups.count)
    except (TooFewReplies, TooFewClients, Diverged) as error:
        log.warning("no references for the groups: FedAvg for comparison failed: %s", error)
        return {}
    metric = plan.monitor
    requests = requests_of(run, plan, state, settings, fedavg)
    present = {c for c in fleet.clients() if plan.honest(c)}
    fits: Fits = {}
    for way in SERVED_MODELS:
        fits[way] = ask_to_fit(fleet, {c: r for c, r in requests[way].items() if c in present}, metric)
    # Means over different clients could not be compared: only those count that have fitted every model.
    clients = sorted(set.intersection(*(set(found) for found in fits.values())))
    if not clients:
        log.warning("no references for the groups: no client has fitted all of %s", ", ".join(SERVED_MODELS))
        return {}
    held_out = held_out_accuracies(fits, clients)
    served = settings.serve
    why = f"serve={settings.serve}"
    if settings.serve == "auto":
        served, why = choose_served(held_out)
    if served != "groups":
        ask_to_fit(fleet, {c: with_keep(requests[served][c]) for c in clients}, metric)
    run.sites = fleet.snapshot()
    means: dict[str, float] = {}
    for way, found in fits.items():
        means[way] = float(np.mean([found[c][metric] for c in clients]))
    efforts = [requests["alone"][c].config for c in clients]
    if settings.repeats_rounds:
        epochs = [int(effort["times"]) * settings.epochs for effort in efforts]
    else:
        epochs = [int(effort[FIT_EPOCHS]) for effort in efforts]
    comparison = {
        "clients": len(clients),
        "judge": metric,
        "means": means,
        "held": {way: float(np.mean(values)) for way, values in held_out.items() if values},
        "fedavg_rounds": settings.rounds if fedavg is not None else run.round,
        "finetuned_epochs": settings.epochs,
        "alone_epochs": float(np.mean(epochs)),
        "served": served,
        "why": why,
        "warnings": warnings_of(means, served, metric, plan.higher_is_better),
    }
    return store_comparison(run, comparison, plan.higher_is_better)


def held_out_accuracies(fits: Fits, clients: list[ClientId]) -> dict[str, list[float]]:
    """The accuracies on held-out samples by model, of the clients that report them for all models."""
    complete = [c for c in clients if all(VALIDATION_ACCURACY in found[c] for found in fits.values())]
    held_out = {}
    for way, found in fits.items():
        held_out[way] = [found[c][VALIDATION_ACCURACY] for c in complete]
    return held_out


def store_comparison(run: Run, comparison: dict[str, Any], higher_is_better: bool) -> Row:
    """Store the comparison with the run, and log it; returns columns for the record."""
    run.memory = run.memory | {MEMORY_KEY: np.frombuffer(json.dumps(comparison).encode(), np.uint8).copy()}
    metric = comparison["judge"]
    means = comparison["means"]
    served = comparison["served"]
    for line in comparison["warnings"]:
        log.warning("round %d: %s", run.round, line)
    log.info("round %d: clients are served by %s: %s", run.round, DESCRIPTIONS[served], comparison["why"])
    row: Row = {f"{metric}_{way}": value for way, value in means.items() if way != "groups"}
    sign = 1 if higher_is_better else -1
    gains = {f"gain_{way}": sign * (means[served] - means[way]) for way in ("alone", "finetuned")}
    return row | {f"{metric}_served": means[served]} | gains


def directions_of(metric: str, higher_is_better: bool = True) -> dict[str, str]:
    """The direction of each column that the comparison adds to the record."""
    directions = {"gain_alone": "higher", "gain_finetuned": "higher"}
    for name in ("served", *SERVED_MODELS[1:]):
        directions[f"{metric}_{name}"] = "higher" if higher_is_better else "lower"
    return directions


def stored_comparison(run: Run) -> dict[str, Any]:
    """What `compare_with_references` stored in the run; empty before."""
    if MEMORY_KEY in run.memory:
        stored: dict[str, Any] = json.loads(run.memory[MEMORY_KEY].tobytes())
        return stored
    return {}


def train_fedavg(run: Run, fleet: Fleet, plan: Plan, settings: References, groups: int) -> Arrays | None:
    """FedAvg over all clients from the common first model, as a run of its own of which only the model is kept."""
    # The model of a single group is that of FedAvg already.
    if groups < 2:
        return None
    share = settings.per_round
    # A count is that of each group, and FedAvg has the clients of all groups.
    if not isinstance(share, float):
        share *= groups
    other = Run(plan.model(plan.classes), seed=run.seed)
    wait_for_clients(other.roster, fleet, 1, plan.patience)
    group = Group(Uniform(share), FedAvg(), filters=plan.filters, size_cap=plan.size_cap, metrics=plan.allowed_metrics)
    for _ in range(settings.rounds):
        step(other, fleet, [group], patience=plan.patience)
    return other.arrays


def requests_of(
    run: Run, plan: Plan, state: Grouping, settings: References, fedavg: Arrays | None
) -> dict[str, dict[ClientId, Request]]:
    """The requests to fit each of `SERVED_MODELS`; without `fedavg` the only group's model is the common one."""
    config: dict[str, Scalar] = {"seed": run.seed, "round": run.round + 1}
    fresh = plan.model(plan.classes)
    one_round = replace(settings, alone=0).effort(1)
    out: dict[str, dict[ClientId, Request]] = {way: {} for way in SERVED_MODELS}
    for group, members in state.groups.members().items():
        own = request_of(run, state, group, "fit")
        tuned = Request("fit", own.arrays, {**own.config, **config, **one_round})
        common = tuned
        if fedavg is not None:
            common = Request("fit", fedavg, {**config, **one_round})
        for client in members:
            times = int(run.roster.replied[run.roster.row(client)]) if client in run.roster else 0
            out["groups"][client] = own
            out["groups_finetuned"][client] = tuned
            out["finetuned"][client] = common
            out["alone"][client] = Request("fit", fresh, {**config, **settings.effort(max(1, times))})
    return out


def with_keep(request: Request) -> Request:
    """The same request; the client keeps its model."""
    # No client has kept a model before one was chosen, so each fits the chosen one again.
    return replace(request, config={**request.config, "keep": True})


def ask_to_fit(fleet: Fleet, requests: Mapping[ClientId, Request], metric: str) -> dict[ClientId, dict[str, float]]:
    """The metrics of the models that clients have fitted."""
    if not requests:
        return {}
    replies = sift(fleet.ask(requests), fault_of_evaluation).replies
    return {c: dict(r.metrics) for c, r in replies.items() if metric in r.metrics}


def choose_served(held: Mapping[str, list[float]]) -> tuple[str, str]:
    """The model that is best on held-out samples, and why; that of groups, unless another is significantly better.

    >>> choose_served({"groups": [0.6, 0.5, 0.7], "alone": [0.9, 0.9, 0.95]})
    ('alone', 'on held-out samples 91.7%, 31.7 points above the models of their groups (standard error 4.4)')
    """
    if not held["groups"] or len({len(values) for values in held.values()}) > 1:
        return "groups", "too few clients have held-out samples to choose by"
    best = "groups"
    why = "on held-out samples no other model is better by more than a standard error"
    most = float(np.mean(held["groups"]))
    for way, (gain, error) in gains_in(held).items():
        if gain > STANDARD_ERRORS * error and float(np.mean(held[way])) > most:
            best = way
            most = float(np.mean(held[way]))
            above = f"{100 * gain:.1f} points above {DESCRIPTIONS['groups']} (standard error {100 * error:.1f})"
            why = f"on held-out samples {100 * most:.1f}%, {above}"
    return best, why


def gains_in(held: Mapping[str, list[float]]) -> dict[str, tuple[float, float]]:
    """The mean gain of the other models over groups, and its standard error over clients."""
    base = np.asarray(held["groups"], np.float64)
    found = {}
    for way, values in held.items():
        gain = np.asarray(values) - base
        if way != "groups":
            # Of one client there is no standard error; with infinity no other model is better by more than it.
            error = np.inf
            if len(gain) > 1:
                error = float(np.std(gain, ddof=1) / np.sqrt(len(gain)))
            found[way] = float(gain.mean()), error
    return found


def warnings_of(
    means: Mapping[str, float], served: str, metric: str = "accuracy", higher_is_better: bool = True
) -> list[str]:
    """Warnings where clients would be better off without groups, and which model they get."""
    found = []
    instead = ""
    if served != "groups":
        instead = f"; they get {DESCRIPTIONS[served]} instead"
    for way in ("alone", "finetuned"):
        loss = means[way] - means["groups"]
        if not higher_is_better:
            loss = -loss
        if loss <= 0:
            continue
        if metric.startswith("accuracy"):
            how = f"{100 * loss:.1f} points"
            both = f"{metric} {100 * means['groups']:.1f}% against {100 * means[way]:.1f}%"
        else:
            how = f"{loss:.4g}"
            both = f"{metric} {means['groups']:.4g} against {means[way]:.4g}"
        found.append(f"groups serve clients {how} worse than {DESCRIPTIONS[way]} does ({both}){instead}")
    return found
