"""Federated recommendation: clients are users. Item vectors are shared; a user's vector is rebuilt and discarded."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.clustering.signature_handler import SignatureHandler
from mutirao.config import Common, Part, build, setting
from mutirao.core.arrays import Arrays, fingerprint
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
from mutirao.systems.recsys.consent import consent_facts, roles_of, without
from mutirao.systems.recsys.evaluation import (
    Evaluator,
    GroupEvaluator,
    HeldOutEvaluator,
    UserEvaluation,
    hold_out,
    sign_users,
)
from mutirao.systems.recsys.fedrecon import ITEMS, FedRecon
from mutirao.systems.recsys.partially_local.client import PartiallyLocal, evaluated_rounds, metrics_of, population_of
from mutirao.systems.recsys.partially_local.methods import is_implicit, method_of
from mutirao.systems.recsys.pretrain import Factorisation, Pooled
from mutirao.systems.recsys.ratings import (
    FOLDS,
    PARTS,
    SPLITS,
    Ratings,
    all_but_last,
    join,
    plant,
    sample_known,
    split_ratings,
)
from mutirao.systems.recsys.readers import read_ratings

GENERATED = (600, 400)  # users and items


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the recommender; the defaults were chosen on MovieLens-1M's validation users."""

    rounds: int = setting(300, "number of rounds", low=1)
    clients: int = setting(0, "number of users to train on (0: all)", low=0)
    per_round: int | float = setting(50, "users selected a round: a count, or a share such as 0.2", low=1e-9)
    evaluate_every: int = setting(10, "rounds between evaluations", low=1)
    size_cap: float = setting(
        50.0, "largest weight of a user, in multiples of the median number of ratings (0: no cap)", low=0
    )
    lr: float = setting(0.2, "learning rate of the items", low=1e-12)
    data: str = setting("generated", "'generated', a folder of MovieLens or Netflix, or a file of ratings")
    columns: str = setting("", "columns of your own file: item,user,rating (no header) or user=NAME,item=NAME")
    method: Part = setting(
        Part("fedrecon", home="mutirao.systems.recsys.partially_local.methods"),
        "federated method: what users train, and what they keep",
    )
    aggregate: Part = setting(
        Part("by_item", home="mutirao.systems.recsys.item_aggregation"), "aggregation method for item rows"
    )
    start: Part = setting(Part("random", home="mutirao.systems.recsys.initial_items"), "initial item vectors")
    dimension: int = setting(50, "length of the vectors, biases included", low=2)
    biases: bool = setting(True, "users and items have a bias, the first number of their vectors")
    loss: str = setting("squared", "ratings, or implicit feedback", choices=("squared", "weighted", "bpr"))
    taken: float = setting(0.0, "implicit: ratings of at least this count as taken (0: all)", low=0)
    negatives: int = setting(4, "implicit: sampled negatives for each positive", low=1)
    negative_weight: float = setting(1.0, "implicit: weight of a sampled negative", low=0)
    others: str = setting("drawn", "implicit: negatives that vectors are rebuilt against", choices=("drawn", "all"))
    rebuild_weight: float = setting(
        0.0, "weighted: weight of a negative when a vector is rebuilt (0: as negative_weight)", low=0
    )
    half_life: float = setting(
        0.0, "weighted: number of later ratings that halves a rating's weight in the vector (0: none)", low=0
    )
    support: float = setting(0.5, "share of a user's ratings that rebuilds its vector", low=1e-9, high=1)
    rebuild: str = setting("ridge", "solver for a user's vector", choices=("ridge", "sgd"))
    ridge: float = setting(10.0, "weight of |vector|^2", low=0)
    ridge_bias: float = setting(0.1, "weight of the user's bias^2", low=0)
    passes: int = setting(10, "rebuild=sgd: passes over the support", low=1)
    rebuild_lr: float = setting(0.1, "rebuild=sgd: learning rate of the vector", low=1e-12)
    split: str = setting("users", "test data: unseen users, or the latest ratings of all users", choices=tuple(SPLITS))
    fold: int = setting(
        0, "split=users: which of five folds of the users is the test set (0: a tenth of the users)", low=0, high=FOLDS
    )
    candidates: int = setting(99, "leave_one_out: random items among which the held-out item is ranked as well", low=0)
    support_by: str = setting(
        "random", "ratings that vectors are rebuilt from in evaluation", choices=("random", "time")
    )
    judge_by: str = setting("test", "data that the model is evaluated on", choices=("test", "vali"))
    download: str = setting(
        "touched",
        "item rows that a user gets: of items it rated, of their blocks, or all",
        choices=item_privacy.DOWNLOADS,
    )
    block: int = setting(20, "download=blocks: least number of items of a block", low=2)


def load(config: Config) -> Ratings:
    """The ratings of users with enough of them to train and to evaluate."""
    if config.data == "generated":
        ratings = plant(*GENERATED, rng(config.seed, 0, "generated"))
    else:
        ratings = read_ratings(Path(config.data), config.columns)
    if is_implicit(config):
        ratings = ratings.implicit(config.taken)
    return ratings.with_at_least(SPLITS[config.split])


def task(config: Config) -> Task:
    """Users as clients, with evaluation on unseen users or on later ratings."""
    if config.device not in ("cpu", "auto") or config.precision != "float32":
        raise ConfigError("device, precision: recommendation is trained by kernels for the CPU; use cpu and float32")
    item_privacy.check_settings(config, has_groups(config))
    ratings = load(config)
    method = method_of(config, ratings)
    withdrawn = parse_names(config.exclude)
    train, evaluator, evaluated = evaluation_of(config, method, ratings, withdrawn)
    if config.clients:
        if config.clients > len(train.users):
            raise ConfigError(f"clients is {config.clients}, but there are only {len(train.users)} users to train on")
        chosen = rng(config.seed, 0, "clients").choice(len(train.users), config.clients, replace=False)
        train = train.of_users(np.sort(chosen))
    start = build("start", config.start)(train, method, config.seed, ratings.users, withdrawn)
    pooled = start.pooled
    handler, touches = item_privacy.private_handler(config, method, sums_of(config))
    population: Mapping[str, Any] = population_of(start.clients, evaluator)
    if config.centralised:
        # Every client is pooled then, not only those who consented: a withdrawal is recorded of each in this role.
        pooled = pooled.union(start.clients.users)
        handler = Pooled(Factorisation(config.dimension, biases=config.biases))
        population = {"pooled": without(start.clients, withdrawn)}
    return Task(
        handler=handler,
        population=population,
        initial=lambda: {ITEMS: start.model[ITEMS].copy(), **touches},
        evaluate=None if isinstance(evaluator, UserEvaluation) else evaluator,
        evaluate_groups=group_evaluator(config, method, evaluator, start.model),
        left_out=roles_of(withdrawn, pooled, evaluated),
        facts=consent_facts(start.pooled, start.listed, withdrawn),
        basis=cache(lambda: {"items": fingerprint([list(ratings.catalogue.ids), list(method.levels)])}),
        judge="ndcg@10" if method.implicit else "rmse",
        metrics=evaluator.metrics,
        classes=2 if method.implicit else len(method.levels),
    )


def evaluation_of(
    config: Config, method: FedRecon | PartiallyLocal, ratings: Ratings, withdrawn: Collection[str]
) -> tuple[Ratings, Evaluator | HeldOutEvaluator | UserEvaluation, tuple[str, ...]]:
    """The training ratings, the evaluator, and the names of the users it is for.

    Users who withdrew are not evaluated on, but their names are listed.
    """
    if config.fold and config.judge_by == "vali":
        raise ConfigError("judge_by=vali: folds have no validation users; use judge_by=test, or fold=0")
    if config.split == "leave_one_out" and not method.implicit:
        raise ConfigError("split=leave_one_out ranks items for implicit feedback; set loss=weighted or loss=bpr")
    parts = split_ratings(ratings, config.split, config.fold, config.seed)
    part: Literal["vali", "test"] = "vali" if config.judge_by == "vali" else "test"
    at = PARTS.index(part)
    train = parts[0]
    names = parts[at].users
    if gone := {*names}.intersection(withdrawn):
        parts = without(parts[0], gone), without(parts[1], gone), without(parts[2], gone)
    if isinstance(method, PartiallyLocal):
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
        known = sample_known(test, config.support, config.support_by, config.seed)
    return train, Evaluator(method, test, known, config.seed), names


def group_evaluator(config: Config, method: Any, evaluator: Any, initial: Arrays) -> GroupEvaluator | None:
    """The evaluator of users by the model of their group; None without groups."""
    if not has_groups(config):
        return None
    if not isinstance(evaluator, Evaluator):
        raise ConfigError(f"cluster: split={config.split} evaluates one model on all users; use split=users or time")
    sign = partial(sign_users, SignatureHandler(method, method, signature_of(config)), initial, config.seed)

    def make(test: Ratings, known: npt.NDArray[np.bool_]) -> Evaluator:
        return Evaluator(method, test, known, config.seed)

    return GroupEvaluator(make, evaluator.ratings, evaluator.known, sign)


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """The ordinary flow, over a fleet that sends each user only the item rows it requests, or all of them."""
    rounds = federate(item_privacy.slice_rows(fleet, config), config, task, run)
    if config.method.name == "fedrecon":
        yield from rounds
    else:
        yield from evaluated_rounds(rounds, fleet, run, config, task.metrics)


def disclosure(config: Config, task: Task) -> Disclosure:
    """The requests and extras of users who evaluate the model themselves, and of users who request rows."""
    evaluation = Disclosure()
    if config.method.name != "fedrecon":
        evaluation = Disclosure(("evaluate",))
    requests, extras = item_privacy.row_requests(config)
    return evaluation | Disclosure(requests, extras=extras)


recipe = Recipe(Config, task, flow, heeds=frozenset({"privacy", "cluster", "secure"}), asks=disclosure)
