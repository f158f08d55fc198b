"""The five systems together: who is selected x how updates are joined x whose model it is, with effects and intervals.

    python -m research.together --cifar10 DIR/cifar-10-batches-bin --mq2008 DIR/MQ2008 --out together.json
    python -m research.together --hidden --cifar10 DIR/cifar-10-batches-bin --fashion DIR --out hidden.json

Every cell of {uniform, aoiu} x {fedavg, fedavgm, fedrisk, scaffold} x {one model, groups, personal} on digits, CIFAR-10
(small network, few pictures) and MQ2008. On pictures each client is judged on its own test data; on MQ2008, where test
queries belong to no client, by how its model ranks all of them. Each aggregator has the rate that did best for it on
validation data. `--hidden` compares personal methods with groups on hidden populations. Cells that are in the file
already are not made again.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from mutirao.clustering.group_state import Grouping
from mutirao.clustering.signatures import Bias
from mutirao.config import resolve, setting
from mutirao.core.arrays import part_of
from mutirao.core.fleet import Request, Site
from mutirao.core.rounds import Run
from mutirao.errors import Diverged, TooFewReplies
from mutirao.experiments.group_client import GroupMember, last_layer
from mutirao.experiments.personal_models import personal_of
from mutirao.experiments.task import Recipe, Task
from mutirao.personalization.handler import ask_together
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.groups_lab import recipe as groups
from mutirao.systems.ranking import recipe as ranking
from mutirao.training.optimizers import one_thread
from research.settled import settled_task

SELECT = ("uniform", "aoiu")
AGGREGATE: dict[str, Any] = {"fedavg": "fedavg", "fedavgm": "fedavgm", "fedrisk": "fedrisk", "scaffold": "scaffold"}
WHOSE = ("one", "groups", "personal")
FACTORS = ("select", "aggregate", "whose")
Cell = tuple[str, tuple[Recipe, dict[str, Any], str]]  # its name, and the recipe, settings and metric that make it
TUNED = {"digits": range(100, 110), "mq2008": range(100, 105), "cifar10": range(100, 102)}  # seeds of nothing else
SETS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": "digits", "clients": 30, "per_round": 0.3, "rounds": 40, "epochs": 2, "momentum": 0.0,
        "partition": {"name": "dirichlet", "alpha": 0.3, "min_size": 10}, "head": "full", "warm_epochs": 10,
    },
    "cifar10": {
        "clients": 20, "per_round": 0.5, "rounds": 40, "epochs": 2, "samples": 200, "momentum": 0.0,
        "partition": {"name": "dirichlet", "alpha": 0.3, "min_size": 100}, "head": "full", "warm_epochs": 5,
        "judge_samples": 200, "engine": "plain",
    },
    "mq2008": {"rounds": 60},
}  # fmt: skip
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # each aggregator's own is found there, on validation data and other seeds
PERSONAL: dict[str, dict[str, Any]] = {
    "one model": {},
    "groups": {},
    "alone": {},
    "finetune": {"personal": {"name": "finetune", "epochs": 5}},
    "fedper": {"personal": "fedper"},
    "fedrep": {"personal": {"name": "fedrep", "epochs": 2}},
    "ditto": {"personal": {"name": "ditto", "lam": 0.1}},
}


def own_task(config: Any) -> Task:
    """The clients of groups, each with its own test data, and one model for all of them."""
    task = groups.task(config)
    return replace(task, handler=task.knows.member.trainers(task.classes), evaluate=None, knows=None)


OWN = Recipe(groups.Config, own_task, name="own")


@dataclass(frozen=True, kw_only=True)
class RankedConfig(groups.Config):
    """Groups of clients that rank."""

    fold: int = setting(1, "which of the five folds", low=1, high=5)


def ranked_task(config: Any) -> Task:
    """The clients of ranking as groups have them: what they send of a warm-up is the bias of the last layer."""
    settings = {k: getattr(config, k) for k in ("data", "fold", "clients", "seed", "lr", "epochs", "batch_size")}
    task = settled_task(resolve(ranking.Config, {**settings, "personal": "finetune"}))  # with tests of their own
    trainer: Any = task.handler
    member = GroupMember(
        lambda outputs: trainer, task.classes or 0, Bias(), config.warm_epochs, last_layer(trainer.blank())
    )
    return replace(
        task, handler=member, evaluate=None, knows=groups.GroundTruth(member, frozenset(), None), check=member.check
    )


RANKED = Recipe(RankedConfig, ranked_task, groups.flow, name="ranked")


def follow(recipe: Recipe, settings: dict[str, Any], metric: str) -> float:
    """What a run ends with: a metric of its last round, or how well the clients' own models rank all test queries."""
    config = resolve(recipe.config, settings)
    task = recipe.prepare(config)
    run = Run(task.initial(), seed=config.seed)
    with one_thread():
        for done in recipe.flow(LocalFleet(task.handler, task.population), config, task, run):
            last = done.row
        if recipe == RANKED:
            return rank_by_groups(run, settings)
        if recipe == ranking.recipe and config.personal.name != "none":
            return rank_by_clients(run, config)
    return float(last[metric] if metric in last else last[f"{metric}_mean"])


def rank_by_groups(run: Run, settings: dict[str, Any]) -> float:
    """nDCG@5 of each client's group's model on the test queries, the mean over clients."""
    state = Grouping.from_memory(run.memory)
    assert state is not None
    given = {k: settings[k] for k in ("data", "fold", "seed", "clients")}
    evaluate: Any = settled_task(resolve(ranking.Config, given)).evaluate
    members = state.groups.members()
    found = [(evaluate(part_of(run.arrays, g))["ndcg@5"], len(who)) for g, who in members.items()]
    return float(np.average([v for v, _ in found], weights=[n for _, n in found]))


def rank_by_clients(run: Run, config: Any) -> float:
    """nDCG@5 on the test queries of the model that each client fine-tunes, the mean over clients."""
    settled = settled_task(config)
    trainer: Any = personal_of(config).at_client(settled.handler)
    evaluate: Any = settled.evaluate
    ask = Request("evaluate", run.arrays, {"seed": run.seed, "round": run.round})
    sites = {c: Site(c, data) for c, data in settled.population.items()}
    models, failed = trainer.fit(ask_together, dict.fromkeys(sites, ask), sites)
    assert not failed
    return float(np.mean([evaluate(arrays)["ndcg@5"] for arrays in models.values()]))


def rates_for(name: str) -> tuple[float, ...]:
    """The rates that are tried: on CIFAR-10, whose runs are long, those in the middle."""
    return RATES[1:5] if name == "cifar10" else RATES


def rate_of(found: dict[str, float], name: str, aggregate: str) -> float:
    """The rate with which an aggregator did best on validation data, with uniform selection and one model."""
    rates = rates_for(name)
    means = {r: np.mean([found[f"tune {name} {aggregate} {r} {seed}"] for seed in TUNED[name]]) for r in rates}
    best = max(means, key=lambda rate: means[rate])
    if best in (rates[0], rates[-1]):
        print(f"{name} {aggregate}: the best rate, {best}, is at the edge")
    return best


def tuning(name: str, where: str) -> Iterator[Cell]:
    """Runs that find the rates of a data set."""
    common = SETS[name]
    for aggregate, rate, seed in itertools.product(AGGREGATE, rates_for(name), TUNED[name]):
        settings = {**common, "data": where, "seed": seed, "aggregate": AGGREGATE[aggregate], "lr": rate}
        settings["evaluate_every"] = common["rounds"]
        cell = f"tune {name} {aggregate} {rate} {seed}"
        if name == "mq2008":
            yield cell, (ranking.recipe, {**settings, "fold": seed % 5 + 1, "judge_by": "vali"}, "ndcg@5")
        else:
            judged = {"judge_by": "vali", "clients_every": common["rounds"]}
            yield cell, (OWN, {**settings, **judged}, "accuracy")


def factorial(name: str, where: str, seeds: int, found: dict[str, float]) -> Iterator[Cell]:
    """Each cell of a data set, and how it is made."""
    common = SETS[name]
    rates = {aggregate: rate_of(found, name, aggregate) for aggregate in AGGREGATE}
    found |= {f"rate {name} {aggregate}": rate for aggregate, rate in rates.items()}
    for seed, select, aggregate, whose in itertools.product(range(seeds), SELECT, AGGREGATE, WHOSE):
        settings = {**common, "data": where, "seed": seed, "select": select, "aggregate": AGGREGATE[aggregate]}
        settings["lr"] = rates[aggregate]
        settings["evaluate_every"] = common["rounds"]
        cell = f"{name} {select} {aggregate} {whose} {seed}"
        if name == "mq2008":
            yield cell, ranked_cell(settings, whose, seed % 5 + 1)
        elif whose == "groups":
            yield cell, (groups.recipe, settings, "accuracy")
        elif whose == "personal":
            yield cell, (OWN, {**settings, "personal": {"name": "finetune", "epochs": 2}}, "accuracy")
        else:
            yield cell, (OWN, {**settings, "clients_every": common["rounds"]}, "accuracy")


def ranked_cell(settings: dict[str, Any], whose: str, fold: int) -> tuple[Recipe, dict[str, Any], str]:
    """A cell of MQ2008: clients of the ranking recipe, as groups or each with a model of its own."""
    settings = {**settings, "fold": fold}
    if whose == "groups":
        own = {"clients": 100, "per_round": 0.1, "epochs": 1, "momentum": 0.0, "head": "full", "warm_epochs": 5}
        return RANKED, {**settings, **own}, "ndcg@5"
    own = {"personal": {"name": "finetune", "epochs": 2}} if whose == "personal" else {}
    return ranking.recipe, {**settings, **own}, "ndcg@5"


def hidden(given: Any, seeds: int) -> Iterator[Cell]:
    """Personal methods against groups on hidden populations."""
    plain: dict[str, Any] = {
        "clients": 30,
        "per_round": 0.4,
        "epochs": 3,
        "lr": 0.05,
        "judge_samples": 100,
        "head": "full",
    }
    pictures = {**plain, "samples": 150, "rounds": 6, "lr": 0.02, "engine": "plain"}
    sets = {"digits": {**plain, "samples": 40, "rounds": 30}, "fashion": pictures, "cifar10": pictures}
    for name, seed, kind, method in itertools.product(sets, range(seeds), ("skewed", "permuted", "rotated"), PERSONAL):
        common = sets[name]
        if not (where := place_of(given, name)):
            continue
        settings = {**common, "data": where, "hidden": kind, "seed": seed, "evaluate_every": common["rounds"]}
        cell = f"{name} {kind} {method} {seed}"
        if method == "groups":
            yield cell, (groups.recipe, {**settings, "signature": "projection", "warm_epochs": 6}, "accuracy")
        elif method == "one model":
            yield cell, (OWN, {**settings, "clients_every": common["rounds"]}, "accuracy")
        elif method == "alone":  # from nothing, as many epochs as a client makes on average in all rounds together
            epochs = round(common["rounds"] * common["per_round"] * common["epochs"])
            own = {"personal": {"name": "finetune", "epochs": epochs}, "rounds": 1, "evaluate_every": 1}
            yield cell, (OWN, {**settings, **own, "epochs": 1, "per_round": 1}, "accuracy")
        else:
            yield cell, (OWN, {**settings, **PERSONAL[method]}, "accuracy")


def interval(values: Any) -> str:
    """Mean and 95% interval, in hundredths."""
    values = 100 * np.asarray(values, float)
    half = (
        stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    )
    return f"{values.mean():+.1f} ± {half:.1f}"


def effects(found: dict[str, float], name: str) -> Iterator[tuple[str, Any]]:
    """Main effects and interactions of two factors over the first level of each, one value a seed."""
    table = {tuple(k.split()[1:]): v for k, v in found.items() if k.split()[0] == name}
    known = [{key[i] for key in table} for i in range(3)]
    levels = [[x for x in names if x in here] for names, here in zip((SELECT, AGGREGATE, WHOSE), known, strict=True)]
    seeds = sorted({key[3] for key in table})

    def mean(seed: str, **fixed: str) -> float:
        keep = [v for k, v in table.items() if k[3] == seed and all(k[FACTORS.index(f)] == x for f, x in fixed.items())]
        return float(np.mean(keep))

    for f, names in zip(FACTORS, levels, strict=True):
        for level in names[1:]:
            yield f"{level}", [mean(s, **{f: level}) - mean(s, **{f: names[0]}) for s in seeds]
    for (f, a), (g, b) in itertools.combinations(zip(FACTORS, levels, strict=True), 2):
        for x, y in itertools.product(a[1:], b[1:]):
            beside = [mean(t, **{f: x, g: y}) - mean(t, **{f: a[0], g: y}) for t in seeds]
            alone = [mean(t, **{f: x, g: b[0]}) - mean(t, **{f: a[0], g: b[0]}) for t in seeds]
            yield f"{x} x {y}", [one - two for one, two in zip(beside, alone, strict=True)]


def print_factorial(found: dict[str, float]) -> None:
    """The page's two tables: effects and all cells, a column a data set."""
    sets = [name for name in SETS if any(key.split()[0] == name for key in found)]
    lines: dict[str, dict[str, str]] = {}
    for name in sets:
        for effect, values in effects(found, name):
            lines.setdefault(effect, {})[name] = interval(values)
    print(f"| effect | {' | '.join(sets)} |\n|---|" + "---|" * len(sets))
    for effect, line in lines.items():
        print(f"| {effect} | " + " | ".join(line.get(name, "") for name in sets) + " |")
    print(f"\n| selection | aggregation | model | {' | '.join(sets)} |\n|---|---|---|" + "---|" * len(sets))
    for whose, aggregate, select in itertools.product(WHOSE, AGGREGATE, SELECT):
        cells = [cell_of(found, f"{name} {select} {aggregate} {whose}") for name in sets]
        print(f"| {select} | {aggregate} | {whose} | " + " | ".join(cells) + " |")


def cell_of(found: dict[str, float], cell: str) -> str:
    """Mean and interval of a cell over its seeds; nothing if it was not made."""
    values = [value for key, value in found.items() if key.rpartition(" ")[0] == cell]
    return interval(values).removeprefix("+") if values else ""


def print_hidden(found: dict[str, float]) -> None:
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    for key, value in found.items():
        name, kind, *method, _ = key.split()
        rows.setdefault((name, kind), {}).setdefault(" ".join(method), []).append(value)
    print("| data | population | " + " | ".join(PERSONAL) + " |\n|---|---|" + "---|" * len(PERSONAL))
    for (name, kind), methods in rows.items():
        print(
            f"| {name} | {kind} | "
            + " | ".join(interval(methods[m]).lstrip("+") if m in methods else "" for m in PERSONAL)
            + " |"
        )


def make(cells: Iterable[Cell], found: dict[str, float], given: Any) -> None:
    """Make the cells that are not there yet, several at once, one core each."""
    due = [cell for cell in cells if cell[0] not in found]
    with multiprocessing.get_context("fork").Pool(given.workers, maxtasksperchild=20) as pool:
        for name, value, seconds in pool.imap_unordered(run_cell, due):
            found[name] = value
            given.out.write_text(json.dumps(dict(sorted(found.items())), indent=0))
            print(f"{name}: {value:.4f}, {seconds:.1f} s", flush=True)


def run_cell(cell: Cell) -> tuple[str, float, float]:
    """One cell: its name, what it came to, and the seconds it took."""
    name, (recipe, settings, metric) = cell
    began = time.perf_counter()
    try:
        found = follow(recipe, settings, metric)
    except (Diverged, TooFewReplies):  # nobody was left to make a model with: a rate that is too high
        found = 0.0
    return name, found, time.perf_counter() - began


def place_of(given: Any, name: str) -> str:
    """Where a data set lies; empty if it is not to be used."""
    places = {"digits": "digits", "cifar10": given.cifar10, "mq2008": given.mq2008, "fashion": given.fashion}
    return "" if given.only and name not in given.only.split(",") else places[name]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cifar10", "mq2008", "fashion"):
        ask.add_argument(f"--{name}", default="")
    ask.add_argument("--hidden", action="store_true")
    ask.add_argument("--workers", type=int, default=2, help="cells made at once")
    ask.add_argument("--seeds", type=int, default=5)
    ask.add_argument("--only", default="", help="the data sets to make, separated by commas")
    ask.add_argument("--out", type=Path, required=True)
    given = ask.parse_args()
    found: dict[str, float] = json.loads(given.out.read_text()) if given.out.exists() else {}
    if given.hidden:
        make(hidden(given, given.seeds), found, given)
    else:
        for name in SETS:
            if where := place_of(given, name):
                make(tuning(name, where), found, given)
                make(factorial(name, where, given.seeds, found), found, given)
    (print_hidden if given.hidden else print_factorial)(found)


if __name__ == "__main__":
    main()
