"""What a site reaches alone: each client's own network, evaluated on the common test part."""

import numpy as np
import pytest
from research.settled import settled_task

from mutirao.config import resolve
from mutirao.core.fleet import Request, Site
from mutirao.report import execute
from mutirao.systems.ranking.recipe import Config

FEW = {"queries": 60, "clients": 6, "rounds": 3, "evaluate_every": 3, "partition": "by_query", "lr": 0.05}


def test_alone_is_each_client_trained_on_its_own_documents(tmp_path):
    config = resolve(Config, FEW | {"cluster": "alone", "aggregate": "fedavg"})
    summary = execute("ranking", config, tmp_path / "run", pictures=False)
    task, reached = settled_task(resolve(Config, FEW)), []
    for client in sorted(task.population):
        site, arrays = Site(client, task.population[client], {}), task.initial()
        for number in range(1, 4):
            arrays = task.handler(Request("train", arrays, {"seed": 0, "round": number}), site).arrays
        reached.append(task.evaluate(arrays))
    for metric in ("ndcg@5", "ndcg@10", "mrr@5"):
        assert summary["final"][metric] == pytest.approx(np.mean([r[metric] for r in reached]), abs=1e-9)
    scores = [r["ndcg@5"] for r in reached]
    assert len(set(scores)) > 1
    assert summary["final"]["ndcg@5_worst"] == pytest.approx(min(scores), abs=1e-9)
    assert summary["final"]["ndcg@5_p90"] == pytest.approx(np.percentile(scores, 90), abs=1e-9)
    assert summary["final"]["ndcg@5_clients"] == 6
