"""Federated recommendation: a client is a user; item vectors are shared, a user's vector is rebuilt and forgotten."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.clustering.signature_handler import SignatureHandler
from mutirao.config import Common, Part, build, setting
from mutirao.core.arrays import Arrays
from mutirao.core.digests import fingerprint
from mutirao.core.exclusion import parse_names
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Round, Run
from mutirao.errors import ConfigError
from mutirao.experiments.disclosure import Disclosure
from mutirao.experiments.grouping import has_groups, signature_of
from mutirao.experiments.simulated_parts import sums_of
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.randomness import rng
from mutirao.systems.recsys import item_privacy
from mutirao.systems.recsys.consent import facts_of, parts_of, without
from mutirao.systems.recsys.evaluation import (
    Evaluator,
    GroupEvaluator,
    HeldOutEvaluator,
    UserEvaluation,
    hold_out,
    sign_all,
)
from mutirao.systems.recsys.fedrecon import ITEMS, FedRecon
from mutirao.systems.recsys.partially_local.client import KeptUsers, evaluated_rounds, metrics_of, population_of
from mutirao.systems.recsys.partially_local.methods import is_implicit, method_of
from mutirao.systems.recsys.pretrain import Factorisation, Pooled
from mutirao.systems.recsys.ratings import Ratings, join, plant
from mutirao.systems.recsys.readers import read_ratings
from mutirao.systems.recsys.user_split import FOLDS, PARTS, SPLITS, all_but_last, split_ratings, supports

GENERATED = (600, 400)  # users and items


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the recommender; the defaults were chosen on MovieLens-1M's validation users."""

    rounds: int = setting(300, "how many rounds", low=1)
    clients: int = setting(0, "users that take part in training (0: all there are)", low=0)
    per_round: int | float = setting(50, "users selected a round: a count, or a share such as 0.2", low=1e-9)
    evaluate_every: int = setting(10, "rounds between evaluations", low=1)
    size_cap: float = setting(50.0, "times the median ratings that a user counts for at most (0: any number)", low=0)
    lr: float = setting(0.2, "learning rate of the items", low=1e-12)
    data: str = setting("generated", "'generated', a folder of MovieLens or Netflix, or a file of ratings")
    columns: str = setting("", "columns of your own file: item,user,rating (no header) or user=NAME,item=NAME")
    method: Part = setting(
        Part("fedrecon", home="mutirao.systems.recsys.partially_local.methods"), "what users train, and keep"
    )
    aggregate: Part = setting(
        Part("by_item", home="mutirao.systems.recsys.item_aggregation"), "how item rows are joined"
    )
    start: Part = setting(Part("random", home="mutirao.systems.recsys.initial_items"), "how item vectors begin")
    dimension: int = setting(50, "length of the vectors, biases included", low=2)
    biases: bool = setting(True, "give users and items a bias: the first number of their vectors")
    loss: str = setting("squared", "ratings, or implicit feedback", choices=("squared", "weighted", "bpr"))
    taken: float = setting(0.0, "implicit: ratings from here on count as taken (0: all)", low=0)
    negatives: int = setting(4, "implicit: items drawn for each one taken", low=1)
    negative_weight: float = setting(1.0, "implicit: how much an item drawn counts", low=0)
    others: str = setting("drawn", "implicit: what vectors are rebuilt against", choices=("drawn", "all"))
    rebuild_weight: float = setting(
        0.0, "weighted: weight of a drawn item when a vector is rebuilt (0: as negative_weight)", low=0
    )
    half_life: float = setting(
        0.0, "weighted: later ratings after which a rating counts half in its vector (0: all count 1)", low=0
    )
    support: float = setting(0.5, "share of a user's ratings that rebuilds its vector", low=1e-9, high=1)
    rebuild: str = setting("ridge", "how a user's vector is rebuilt", choices=("ridge", "sgd"))
    ridge: float = setting(10.0, "weight of |vector|^2", low=0)
    ridge_bias: float = setting(0.1, "weight of the user's bias^2", low=0)
    passes: int = setting(10, "rebuild=sgd: passes over the support", low=1)
    rebuild_lr: float = setting(0.1, "rebuild=sgd: learning rate of the vector", low=1e-12)
    split: str = setting("users", "evaluated on: unseen users, or the latest ratings of all", choices=tuple(SPLITS))
    fold: int = setting(
        0, "split=users: which of five parts of the users is the test set (0: a tenth of the users)", low=0, high=FOLDS
    )
    candidates: int = setting(99, "leave_one_out: random items among which the held-out one is ranked as well", low=0)
    support_by: str = setting("random", "what users are rebuilt from in evaluation", choices=("random", "time"))
    judge_by: str = setting("test", "which part the model is evaluated on", choices=("test", "vali"))
    download: str = setting(
        "touched", "item rows a user is sent: those it rated, their blocks, ...", choices=item_privacy.DOWNLOADS
    )
    block: int = setting(20, "download=blocks: items of a block, of which a user names whole ones", low=2)


def load(config: Config) -> Ratings:
    """The ratings, of users with enough of them to train and to evaluate on."""
    if config.data == "generated":
        ratings = plant(*GENERATED, rng(config.seed, 0, "generated"))
    else:
        ratings = read_ratings(Path(config.data), config.columns)
    if is_implicit(config):
        ratings = ratings.implicit(config.taken)
    return ratings.with_at_least(SPLITS[config.split])


def task(config: Config) -> Task:
    """Users as clients, evaluation on unseen users or on later ratings."""
    if config.device not in ("cpu", "auto") or config.precision != "float32":
        raise ConfigError("device, precision: recommendation is trained by kernels for the CPU; use cpu and float32")
    item_privacy.check(config, has_groups(config))
    ratings = load(config)
    method = method_of(config, ratings)
    gone = parse_names(config.exclude)
    train, evaluator, evaluated = evaluation_of(config, method, ratings, gone)
    if config.clients:
        if config.clients > len(train.users):
            raise ConfigError(f"clients is {config.clients}, but only {len(train.users)} users are there to train on")
        chosen = rng(config.seed, 0, "clients").choice(len(train.users), config.clients, replace=False)
        train = train.of_users(np.sort(chosen))
    clients, first, pooled, listed = build("start", config.start)(train, method, config.seed, ratings.users, gone)
    facts = facts_of(pooled, listed, gone)
    if config.centralised:
        pooled, clients = pooled.union(clients.users), without(clients, gone)
    users, touches = item_privacy.discreet(config, method, sums_of(config))
    return Task(
        handler=Pooled(Factorisation(config.dimension, biases=config.biases)) if config.centralised else users,
        population={"pooled": clients} if config.centralised else population_of(clients, evaluator),
        initial=lambda: {ITEMS: first[ITEMS].copy(), **touches},
        evaluate=None if isinstance(evaluator, UserEvaluation) else evaluator,
        evaluate_groups=group_evaluator(config, method, evaluator, first),
        left_out=parts_of(gone, pooled, evaluated),
        facts=facts,
        basis=cache(lambda: {"items": fingerprint([list(ratings.catalogue.ids), list(method.levels)])}),
        judge="ndcg@10" if method.implicit else "rmse",
        metrics=evaluator.metrics,
        classes=2 if method.implicit else len(method.levels),
    )


def evaluation_of(
    config: Config, method: FedRecon | KeptUsers, ratings: Ratings, withdrawn: Collection[str]
) -> tuple[Ratings, Evaluator | HeldOutEvaluator | UserEvaluation, tuple[str, ...]]:
    """The ratings to train on, what evaluates the model, and the names of the users it is evaluated on.

    Nothing is evaluated on users who withdrew, but they are among the names.
    """
    if config.fold and config.judge_by == "vali":
        raise ConfigError("judge_by=vali: of folds nobody is kept to validate; use judge_by=test, or fold=0")
    if config.split == "leave_one_out" and not method.implicit:
        raise ConfigError("split=leave_one_out ranks items for implicit feedback; set loss=weighted or loss=bpr")
    parts = split_ratings(ratings, config.split, config.fold, config.seed)
    part: Literal["vali", "test"] = "vali" if config.judge_by == "vali" else "test"
    at = PARTS.index(part)
    train, names = parts[0], parts[at].users
    if gone := {*names}.intersection(withdrawn):
        parts = without(parts[0], gone), without(parts[1], gone), without(parts[2], gone)
    if isinstance(method, KeptUsers):
        held_out = hold_out(parts, part, config.candidates, config.seed) if method.implicit else None
        return train, UserEvaluation(parts[at], held_out, metrics_of(method.method, config.candidates)), names
    if config.split == "leave_one_out":
        held_out = hold_out(parts, part, config.candidates, config.seed)
        return train, HeldOutEvaluator(method, parts[0], held_out, config.seed), names
    test = parts[at]
    if config.split == "time":
        test, known = join(parts[0], test)
    elif method.implicit:
        known = all_but_last(test)
    else:
        known = supports(test, config.support, config.support_by, config.seed)
    return train, Evaluator(method, test, known, config.seed), names


def group_evaluator(config: Config, method: Any, evaluator: Any, first: Arrays) -> GroupEvaluator | None:
    """What evaluates groups of users, if there are to be any: each user by the model of its group."""
    if not has_groups(config):
        return None
    if not isinstance(evaluator, Evaluator):
        raise ConfigError(f"cluster: split={config.split} evaluates one model on all users; use split=users or time")
    sign = partial(sign_all, SignatureHandler(method, method, signature_of(config)), first, config.seed)

    def make(test: Ratings, known: npt.NDArray[np.bool_]) -> Evaluator:
        return Evaluator(method, test, known, config.seed)

    return GroupEvaluator(make, evaluator.ratings, evaluator.known, sign)


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """The ordinary flow, over a fleet that sends each user only the item rows it asks for, or all of them."""
    rounds = federate(item_privacy.slice_rows(fleet, config), config, task, run)
    if config.method.name == "fedrecon":
        yield from rounds
    else:
        yield from evaluated_rounds(rounds, fleet, run, config, task.metrics)


def asks(config: Config, task: Task) -> Disclosure:
    """Some users evaluate by themselves; and what `privacy_guarantee` says of rows."""
    evaluation = Disclosure() if config.method.name == "fedrecon" else Disclosure(("evaluate",))
    requests, extras = item_privacy.rows_asked(config)
    return evaluation | Disclosure(requests, extras=extras)


recipe = Recipe(Config, task, flow, heeds=frozenset({"privacy", "cluster", "secure"}), asks=asks)
