"""What groups have to beat: each client alone, and one FedAvg model fine-tuned by each client; and what clients get.

At the end of a run every client fits a few models to its own samples and says how they do; none of them leaves it:

- `groups`: its group's model as it is, and `groups_finetuned`: the same after a round's training at the client;
- `finetuned`: a FedAvg model of all clients, made for this in `rounds` rounds, after as much; where all clients are in
  one group, its model;
- `alone`: the common first model, trained by the client for as many epochs as it spent in the run, at most `alone`.

Test samples say how well clients are served. Which way they are served is decided before, by samples that each client
kept back and nobody has trained on: the way with the best mean, but groups stay unless it is better by more than one
standard error of the clients' differences (the rule of Breiman, Friedman, Olshen and Stone, 1984).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mutirao.aggregation import FedAvg
from mutirao.clustering.choices import FIT_EPOCHS
from mutirao.clustering.group_state import HOME, Grouping
from mutirao.clustering.plan import Plan
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Fleet, Reply, Request, Scalar
from mutirao.core.records import Row
from mutirao.core.rounds import Cohort, Run, step, wait_for_clients
from mutirao.core.validation import sift
from mutirao.errors import Diverged, TooFewClients, TooFewReplies
from mutirao.experiments.group_evaluation import fault_of_evaluation, request_of
from mutirao.selection import Uniform

log = logging.getLogger("mutirao")

SERVED_MODELS = ("groups", "groups_finetuned", "finetuned", "alone")
MEMORY_KEY = HOME + "served"  # where the run remembers it
VALIDATION_ACCURACY = "accuracy_held"  # what a client says of the samples it kept back
SURE = 1.0  # standard errors by which another way must be better than groups
DESCRIPTIONS = {
    "groups": "the models of their groups",
    "groups_finetuned": "the models of their groups, fine-tuned",
    "finetuned": "one FedAvg model, fine-tuned",
    "alone": "training alone",
}
Fits = dict[str, dict[ClientId, dict[str, float]]]  # by way and client: what it measured


@dataclass(frozen=True)
class References:
    """How much is spent on references, and what clients get: `serve` is a way, or `auto`."""

    rounds: int  # of FedAvg
    epochs: int  # of a round, and of fine-tuning
    alone: int  # most epochs of a client alone (0: as many as it spent)
    per_round: int | float = 0.5  # clients of a round: a share of all, or so many for each group there is
    serve: str = "groups"
    again: bool = False  # whether clients are told how often to train as in a round, and not for how many epochs

    def effort(self, rounds: int) -> dict[str, Scalar]:
        """What a client is told that is to spend as much as in so many rounds."""
        if self.again:
            return {"times": rounds}
        return {FIT_EPOCHS: min(self.alone, rounds * self.epochs) if self.alone else rounds * self.epochs}


def compare_with_references(run: Run, fleet: Fleet, plan: Plan, settings: References) -> Row:
    """Figures for the last round's record; what was spent and what clients get is remembered with the run."""
    state = Grouping.from_memory(run.memory)
    if state is None:
        return {}
    try:
        one = train_one(run, fleet, plan, settings, state.groups.count) if state.groups.count > 1 else None
    except (TooFewReplies, TooFewClients, Diverged) as error:
        log.warning("no references for the groups: FedAvg for comparison failed: %s", error)
        return {}
    judge, asked = plan.monitor, requests_of(run, plan, state, settings, one)
    here = {c for c in fleet.clients() if plan.honest(c)}
    fits: Fits = {
        way: ask_to_fit(fleet, {c: r for c, r in asked[way].items() if c in here}, judge) for way in SERVED_MODELS
    }
    who = sorted(set.intersection(*(set(found) for found in fits.values())))
    if not who:
        log.warning("no references for the groups: no client has fitted all of %s", ", ".join(SERVED_MODELS))
        return {}
    choosers = [c for c in who if all(VALIDATION_ACCURACY in found[c] for found in fits.values())]
    held = {way: [found[c][VALIDATION_ACCURACY] for c in choosers] for way, found in fits.items()}
    chosen, why = choose_served(held) if settings.serve == "auto" else (settings.serve, f"serve={settings.serve}")
    if chosen != "groups":
        ask_to_fit(fleet, {c: with_keep(asked[chosen][c]) for c in who}, judge)
    run.sites = fleet.snapshot()
    means = {way: float(np.mean([found[c][judge] for c in who])) for way, found in fits.items()}
    efforts = [asked["alone"][c].config for c in who]
    spent = [int(e["times"]) * settings.epochs if settings.again else int(e[FIT_EPOCHS]) for e in efforts]
    told = {
        "clients": len(who),
        "judge": judge,
        "means": means,
        "held": {way: float(np.mean(values)) for way, values in held.items() if values},
        "fedavg_rounds": settings.rounds if one is not None else run.round,
        "finetuned_epochs": settings.epochs,
        "alone_epochs": float(np.mean(spent)),
        "served": chosen,
        "why": why,
        "warnings": warnings_of(means, chosen, judge, plan.higher_is_better),
    }
    return store_comparison(run, told, plan.higher_is_better)


def store_comparison(run: Run, told: dict[str, Any], higher: bool) -> Row:
    """Keep what was found with the run, and say it; the figures for the record."""
    run.memory = run.memory | {MEMORY_KEY: np.frombuffer(json.dumps(told).encode(), np.uint8).copy()}
    judge, means, chosen = told["judge"], told["means"], told["served"]
    for line in told["warnings"]:
        log.warning("round %d: %s", run.round, line)
    log.info("round %d: clients are served by %s: %s", run.round, DESCRIPTIONS[chosen], told["why"])
    row: Row = {f"{judge}_{way}": value for way, value in means.items() if way != "groups"}
    sign = 1 if higher else -1
    gains = {f"gain_{way}": sign * (means[chosen] - means[way]) for way in ("alone", "finetuned")}
    return row | {f"{judge}_served": means[chosen]} | gains


def directions_of(judge: str, higher: bool = True) -> dict[str, str]:
    """Which way each figure in the record is better."""
    names = ("served", *SERVED_MODELS[1:])
    return dict.fromkeys(("gain_alone", "gain_finetuned"), "higher") | dict.fromkeys(
        (f"{judge}_{name}" for name in names), "higher" if higher else "lower"
    )


def stored_comparison(run: Run) -> dict[str, Any]:
    """What `compare_with_references` left with the run; empty before."""
    return json.loads(run.memory[MEMORY_KEY].tobytes()) if MEMORY_KEY in run.memory else {}


def train_one(run: Run, fleet: Fleet, plan: Plan, settings: References, groups: int) -> Arrays:
    """FedAvg over all clients from the common first model: a run of its own, of which nothing else is kept."""
    share = settings.per_round if isinstance(settings.per_round, float) else settings.per_round * groups
    other = Run(plan.model(plan.classes), seed=run.seed)
    wait_for_clients(other.roster, fleet, 1, plan.patience)
    everybody = Cohort(
        Uniform(share), FedAvg(), filters=plan.filters, size_cap=plan.size_cap, metrics=plan.allowed_metrics
    )
    for _ in range(settings.rounds):
        step(other, fleet, [everybody], patience=plan.patience)
    return other.arrays


def requests_of(
    run: Run, plan: Plan, state: Grouping, settings: References, one: Arrays | None
) -> dict[str, dict[ClientId, Request]]:
    """What each client of a group is asked to fit, by way; `one` is the model of all, if it is not that of a group."""
    about: dict[str, Scalar] = {"seed": run.seed, "round": run.round + 1}
    fresh, once = plan.model(plan.classes), replace(settings, alone=0).effort(1)
    out: dict[str, dict[ClientId, Request]] = {way: {} for way in SERVED_MODELS}
    for group, members in state.groups.members().items():
        own = request_of(run, state, group, "fit")
        tuned = Request("fit", own.arrays, {**own.config, **about, **once})
        common = tuned if one is None else Request("fit", one, {**about, **once})
        for client in members:
            times = int(run.roster.replied[run.roster.row(client)]) if client in run.roster else 0
            out["groups"][client], out["groups_finetuned"][client] = own, tuned
            out["finetuned"][client] = common
            out["alone"][client] = Request("fit", fresh, {**about, **settings.effort(max(1, times))})
    return out


def with_keep(request: Request) -> Request:
    """The same, to be gone on with."""
    return replace(request, config={**request.config, "keep": True})


def ask_to_fit(fleet: Fleet, requests: Mapping[ClientId, Request], judge: str) -> dict[ClientId, dict[str, float]]:
    """What clients say of the models they have fitted."""
    replies: dict[ClientId, Reply] = sift(fleet.ask(requests), fault_of_evaluation).replies if requests else {}
    return {c: dict(r.metrics) for c, r in replies.items() if judge in r.metrics}


def choose_served(held: Mapping[str, list[float]]) -> tuple[str, str]:
    """The way that serves clients best by what they kept back, and why; groups, unless another is surely better.

    >>> choose_served({"groups": [0.6, 0.5, 0.7], "alone": [0.9, 0.9, 0.95]})
    ('alone', 'on samples kept back 91.7%, 31.7 points above the models of their groups (standard error 4.4)')
    """
    if not held["groups"] or len({len(values) for values in held.values()}) > 1:
        return "groups", "too few clients kept samples back to choose by"
    best, why = "groups", "on samples kept back no other way is better by more than a standard error"
    most = float(np.mean(held["groups"]))
    for way, (gain, error) in gains_in(held).items():
        if gain > SURE * error and float(np.mean(held[way])) > most:
            best, most = way, float(np.mean(held[way]))
            above = f"{100 * gain:.1f} points above {DESCRIPTIONS['groups']} (standard error {100 * error:.1f})"
            why = f"on samples kept back {100 * most:.1f}%, {above}"
    return best, why


def gains_in(held: Mapping[str, list[float]]) -> dict[str, tuple[float, float]]:
    """How far the other ways are above groups in the mean over clients, and the standard error of that."""
    base, found = np.asarray(held["groups"], np.float64), {}
    for way, values in held.items():
        gain = np.asarray(values) - base
        if way != "groups":
            error = float(np.std(gain, ddof=1) / np.sqrt(len(gain))) if len(gain) > 1 else np.inf
            found[way] = float(gain.mean()), error
    return found


def warnings_of(means: Mapping[str, float], chosen: str, judge: str = "accuracy", higher: bool = True) -> list[str]:
    """Where groups serve clients worse than they would be without them, and whether that is what clients get."""
    found, share = [], judge.startswith("accuracy")
    instead = "" if chosen == "groups" else f"; they get {DESCRIPTIONS[chosen]} instead"
    for way in ("alone", "finetuned"):
        if (worse := (means[way] - means["groups"]) * (1 if higher else -1)) > 0:
            how = f"{100 * worse:.1f} points" if share else f"{worse:.4g}"
            ours, theirs = (f"{100 * means[w]:.1f}%" if share else f"{means[w]:.4g}" for w in ("groups", way))
            both = f"{judge} {ours} against {theirs}"
            found.append(f"groups serve clients {how} worse than {DESCRIPTIONS[way]} does ({both}){instead}")
    return found
