"""Federated ranking end to end: generated data, real folds, losses on lists, and a divergence with a name."""

from pathlib import Path

import pytest

from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.errors import Diverged
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.ranking.recipe import LOSS_NAMES, Config

SMALL = {"queries": 60, "clients": 10, "per_round": 5, "rounds": 8, "lr": 0.03}


def test_generated_documents_are_ranked_better_than_by_chance(tmp_path: Path) -> None:
    summary = execute("ranking", resolve(Config, SMALL | {"rounds": 30}), tmp_path / "run")
    history = CsvTable(tmp_path / "run/history.csv").read()
    assert summary["final"]["ndcg@5"] > float(history[0]["ndcg@5"]) + 0.05
    assert set(summary["final"]) == {"ndcg@1", "ndcg@5", "ndcg@10", "mrr@1", "mrr@5", "mrr@10"}
    rows = CsvTable(tmp_path / "run/clients.csv").read()
    assert all(-1 < float(row["risk"]) < 5 for row in rows)
    assert all(float(row["weight"]) == pytest.approx((1 - float(row["risk"])) / 5) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["dirichlet", "by_query", "by_query_groups", "iid"])
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_every_split_goes_with_every_loss(partition: str, loss: str) -> None:
    config = resolve(Config, SMALL | {"rounds": 2, "partition": partition, "loss": loss})
    task = find("ranking").task(config)
    run = Run(task.initial(), seed=0)
    rounds = list(find("ranking").flow(LocalFleet(task.handler, task.population), config, task, run))
    assert all(r.row["failed"] == 0 for r in rounds)
    assert 0 < rounds[-1].row["ndcg@10"] <= 1


def test_listwise_training_ranks_real_queries_better_than_it_began(real_data: Path, tmp_path: Path) -> None:
    settings = {"data": str(real_data / "MQ2008"), "rounds": 20, "clients": 20, "partition": "by_query"}
    for loss in ("listnet", "lambdarank"):
        config = resolve(Config, settings | {"loss": loss, "aggregate": "fedavgm", "lr": 0.03})
        summary = execute("ranking", config, tmp_path / loss, pictures=False)
        first = float(CsvTable(tmp_path / loss / "history.csv").read()[0]["ndcg@5"])
        assert summary["final"]["ndcg@5"] > max(0.35, first)


def test_the_literal_form_diverges_with_a_clear_word(tmp_path: Path) -> None:
    config = resolve(
        Config,
        SMALL | {"rounds": 400, "evaluate_every": 400},
        [("aggregate.form", "parameters"), ("aggregate.memory", "previous")],
    )
    with pytest.raises(Diverged, match=r"diverged at round \d+"):
        execute("ranking", config, tmp_path / "run", pictures=False)


def test_the_pooled_reference_and_folds_of_generated_data() -> None:
    one = find("ranking").task(resolve(Config, SMALL | {"centralised": True, "per_round": 1}))
    assert len(one.population) == 1
    tasks = [find("ranking").task(resolve(Config, SMALL | {"fold": f})) for f in (1, 2)]
    sizes = [sum(len(s) for s in t.population.values()) for t in tasks]
    assert sizes[0] != sizes[1]
