"""Does weighing clients by risk help a federated ranker? Each idea beside its own control: the same without risk.

    python -m research.risk_search --data ~/MQ2008                                   # on validation queries
    python -m research.risk_search --data ~/MQ2008 --confirm --seeds 3 4 5 --ideas NAME   # on test queries, once

Every idea is a way to weigh the clients of a round; weights sum to one, so that all make steps of one length, and all
go through the same server momentum: v' = 0.9 v + sum_k w_k (x_k - x), x' = x + v'. Half of a fold's validation queries,
drawn by the seed, are the server's own, and the other half (or the test queries) judge. Ideas that look at the server's
queries are compared with the same idea for which all gains count alike (aversion 0), and not with the plain mean alone.
The figure of a run is the mean over rounds 80, 85, 90, 95 and 100 of each query's nDCG.
"""

import argparse
import json
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao import LocalFleet, Run, Trainer, train, virtual_clients
from mutirao.config import build, resolve
from mutirao.core.moments import combine_moments, measure_moments, standardise
from mutirao.randomness import derive_seed, rng
from mutirao.selection import Uniform
from mutirao.stats import paired
from mutirao.systems.ranking.metrics import t_risk, u_risk
from mutirao.systems.ranking.query_partition import partition_documents
from mutirao.systems.ranking.ranking_sources import load_splits
from mutirao.systems.ranking.recipe import Config
from mutirao.systems.ranking.scorers import dense
from research.risk_ideas import IDEAS, Idea, Joiner
from research.risk_scene import CUT, Floats, Queries, Scene

Found = dict[int, Floats]  # nDCG at 5 and at 10 of each query


def set_scene(config: Config, liars: float = 0.0) -> Scene:
    """The documents dealt and put on one scale; a share of `liars` among the clients turns its grades round."""
    learn, vali, test = load_splits(config)
    draw, split = rng(config.seed, 0, "partition"), build("partition", config.partition)
    dealt = partition_documents(split, learn.grades, learn.queries, config.clients, draw, learn.x)
    mean, std = combine_moments([measure_moments(learn.x[rows], "none") for rows in dealt])
    x, x_vali, x_test = (standardise(part.x, mean, std, "none") for part in (learn, vali, test))
    grades = learn.grades.copy()
    for k in rng(config.seed, 0, "liars").permutation(len(dealt))[: int(liars * len(dealt))]:
        grades[dealt[k]] = grades.max() - learn.grades[dealt[k]]
    clients = virtual_clients(x, grades, dealt, 0, derive_seed(config.seed, 0, "samples"))
    lists = {c: lists_in(x, grades, learn.queries, rows) for c, rows in zip(clients, dealt, strict=True)}
    classes = 1 + int(max(part.grades.max() for part in (learn, vali, test)))
    trainer = Trainer(partial(dense, learn.features, classes, 64), lr=config.lr, batch_size=32, workers=1)
    many = len(vali.query_ids)
    own = np.isin(vali.queries, rng(config.seed, 0, "half").permutation(many)[: many // 2])
    server, other = (Queries(x_vali[rows], vali.grades[rows], vali.queries[rows]) for rows in (own, ~own))
    judge = other if config.judge_by == "vali" else Queries(x_test, test.grades, test.queries)
    shared = len(judge.ideal[CUT]) / len(learn.query_ids)
    return Scene(trainer, clients, lists, server, judge, shared, config.seed)


def lists_in(x: npt.NDArray[np.float32], grades: Any, queries: Any, rows: Any) -> Queries | None:
    """A client's queries with documents of more than one grade."""
    kept = [r for r in np.split(rows, np.flatnonzero(np.diff(queries[rows])) + 1) if len(np.unique(grades[r])) > 1]
    if not kept:
        return None
    here = np.concatenate(kept)
    return Queries(x[here], grades[here], queries[here])


def try_idea(idea: Idea, scene: Scene, rounds: int = 100, per_round: int = 10) -> Found:
    """nDCG@5 and @10 of each query that judges, the mean over five rounds of the last fifth."""
    run = Run(scene.trainer.initial(scene.seed), seed=scene.seed)
    last = {rounds - i * max(1, rounds // 20) for i in range(5)}
    seen: dict[int, list[Floats]] = {5: [], 10: []}
    fleet = LocalFleet(scene.trainer, scene.clients)
    made = train(run, fleet, rounds=rounds, select=Uniform(per_round), aggregate=Joiner(idea, scene), size_cap=0.0)
    for _ in made:
        if run.round in last:
            for k, values in seen.items():
                values.append(scene.judge.ndcg(scene.trainer, run.arrays, k))
    return {k: np.mean(values, axis=0) for k, values in seen.items()}


def compare(ours: list[Found], theirs: list[Found], k: int, shared: float) -> dict[str, Any]:
    """An idea beside another: run by run, and query by query, where the other is the baseline of URisk and TRisk.

    What runs share counts, by `shared` queries that judge for one of training (Nadeau and Bengio, 2003).
    """
    runs = paired([r[k].mean() for r in ours], [r[k].mean() for r in theirs], shared)
    q, base = np.concatenate([r[k] for r in ours]), np.concatenate([r[k] for r in theirs])
    risks = {f"urisk{a}": round(u_risk(q, base, a), 4) for a in (1, 5)}
    risks |= {f"trisk{a}": round(t_risk(q, base, a), 2) for a in (1, 5)}
    wins, losses = int((q > base + 1e-9).sum()), int((q < base - 1e-9).sum())
    return {"difference": str(runs.difference), "verdict": runs.verdict, **risks, "wins": wins, "losses": losses}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--data", default="generated", help="a ranking set with five folds, or 'generated'")
    ask.add_argument("--partition", default="dirichlet", help="dirichlet, by_query or by_query_groups")
    ask.add_argument("--clients", type=int, default=100)
    ask.add_argument("--liars", type=float, default=0.0, help="share of clients that turn their grades round")
    ask.add_argument("--ideas", default=",".join(IDEAS), help="names, separated by commas; controls are added")
    ask.add_argument("--lr", type=float, default=0.01)
    ask.add_argument("--rounds", type=int, default=100)
    ask.add_argument("--folds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    ask.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ask.add_argument("--confirm", action="store_true", help="judge by the test queries; do this once")
    given = ask.parse_args()
    asked = given.ideas.split(",")
    if unknown := [name for name in asked if name not in IDEAS]:
        ask.error(f"there is no idea {unknown[0]!r}; right would be one of {', '.join(IDEAS)}")
    names = list(dict.fromkeys(["mean", *(IDEAS[n].control for n in asked), *asked]))
    found: dict[str, list[Found]] = {name: [] for name in names}
    table = {"data": given.data, "partition": given.partition, "clients": given.clients, "lr": given.lr}
    table |= {"judge_by": "test" if given.confirm else "vali"}
    for seed, fold in product(given.seeds, given.folds):
        scene = set_scene(resolve(Config, table | {"seed": seed, "fold": fold}), given.liars)
        for name in names:
            found[name].append(try_idea(IDEAS[name], scene, given.rounds))
    for name, k in product(names, (5, 10)):
        line = {"idea": name, f"ndcg@{k}": round(float(np.mean([r[k].mean() for r in found[name]])), 4)}
        for other in dict.fromkeys(["mean", IDEAS[name].control]):
            beside = {"against": other, **compare(found[name], found[other], k, scene.shared)} if name != other else {}
            print(json.dumps(line | beside))


if __name__ == "__main__":
    main()
