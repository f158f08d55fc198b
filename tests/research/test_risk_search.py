"""The search for risk weights: its measures by hand, and every idea for a few rounds."""

import json
import sys

import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.core.fleet import Reply
from mutirao.metrics import ndcg
from mutirao.systems.ranking.recipe import Config
from mutirao.systems.ranking.scorers import score
from research import risk_ideas, risk_scene, risk_search


@pytest.fixture(scope="module")
def scene():
    table = {"data": "generated", "queries": 50, "clients": 8, "partition": {"name": "by_query_groups", "groups": 5}}
    return risk_search.set_scene(resolve(Config, table | {"judge_by": "vali", "fold": 1, "lr": 0.03}))


def test_the_mean_over_queries_is_the_metric(scene):
    arrays, q = scene.trainer.initial(3), scene.judge
    scores = score(scene.trainer.fill(arrays), q.x)
    for k in (5, 10):
        expected = ndcg(scores, np.log2(q.gains + 1), q.query, k)
        assert q.ndcg(scene.trainer, arrays, k).mean() == pytest.approx(expected, abs=1e-12)


def test_the_servers_queries_and_the_judges_are_not_the_same(scene):
    rows = {tuple(row) for row in scene.server.x}
    assert rows
    assert not rows & {tuple(row) for row in scene.judge.x}


def test_scores_of_models_by_hand():
    base = np.array([0.4, 0.4, 0.9, 0.1, 0.5])
    q = np.array([[0.5, 0.2, 0.9, 0.4, 0.5], base])
    weighed = [0.1, 6 * -0.2, 0.0, 0.3, 0.0]
    mean = sum(weighed) / 5
    error = (sum((g - mean) ** 2 for g in weighed) / 4 / 5) ** 0.5
    scores = [risk_ideas.of_each(f)(q, base, 5.0) for f in (risk_ideas.u_risk, risk_ideas.t_risk)]
    np.testing.assert_allclose(scores, [[mean, 0], [mean / error, 0]], atol=1e-12)
    assert risk_ideas.middle_risk(q[0], base, 5.0) == 0  # of five groups of one query


def test_the_next_model_is_what_the_weights_and_the_momentum_say(scene):
    current, draw = scene.trainer.initial(0), np.random.default_rng(0)
    ends = [{k: v + draw.normal(size=v.shape).astype(np.float32) for k, v in current.items()} for _ in range(3)]
    replies = {f"c{i}": Reply(end, {}, {"loss": 1.0}, 10) for i, end in enumerate(ends)}
    of = risk_scene.Joining(scene, current, replies, {k: np.ones_like(v) for k, v in current.items()}, {})
    ahead, here = (of.model([0.25, 0.0, 0.75], ahead=way) for way in (True, False))
    for k in current:
        np.testing.assert_allclose(here[k], 0.25 * ends[0][k] + 0.75 * ends[2][k], atol=1e-6)
        np.testing.assert_allclose(ahead[k], here[k] + 0.9, atol=1e-6)


def test_a_matched_step_is_as_long_as_the_means(scene):
    current, draw = scene.trainer.initial(0), np.random.default_rng(1)
    ends = [
        {k: (v + (i + 1) * draw.normal(size=v.shape)).astype(np.float32) for k, v in current.items()} for i in (0, 1, 5)
    ]
    replies = {f"c{i}": Reply(end, {}, {"loss": 1.0}, 10) for i, end in enumerate(ends)}
    of = risk_scene.Joining(scene, current, replies, {}, {})
    weights = risk_ideas.IDEAS["short-matched"].weigh(of)

    def length(w):
        steps = [
            sum(s * (end[k].astype(float) - v) for s, end in zip(w, ends, strict=True)) for k, v in current.items()
        ]
        return np.sqrt(sum((step**2).sum() for step in steps))

    assert weights[0] > weights[1] > weights[2] > 0  # the shorter the more
    assert length(weights) == pytest.approx(length([1 / 3] * 3), rel=1e-6)


@pytest.mark.parametrize("name", risk_ideas.IDEAS)
def test_every_idea_makes_rounds_and_is_compared_with_a_control(scene, name):
    idea = risk_ideas.IDEAS[name]
    found = risk_search.try_idea(idea, scene, rounds=2, per_round=4)
    assert idea.control in risk_ideas.IDEAS
    assert {k: len(v) for k, v in found.items()} == dict.fromkeys((5, 10), scene.judge.query.max() + 1)
    assert all((v >= 0).all() and (v <= 1 + 1e-12).all() for v in found.values())


def test_weights_sum_to_one_but_for_the_step(scene):
    shares = {}

    class Spy(risk_ideas.Joiner):
        def __call__(self, *given):
            merged = super().__call__(*given)
            shares[name] = merged.weights
            return merged

    for name in ("mean", "errors", "query-errors", "tilted", "worst-half", "minimax", "server-urisk5", "ascent-urisk5"):
        spy = Spy(risk_ideas.IDEAS[name], scene)
        run = risk_search.Run(scene.trainer.initial(0), seed=0)
        fleet = risk_search.LocalFleet(scene.trainer, scene.clients)
        list(risk_search.train(run, fleet, rounds=1, select=risk_search.Uniform(4), aggregate=spy))
        assert sum(shares[name].values()) == pytest.approx(1)
        assert min(shares[name].values()) >= 0


def test_the_command_prints_each_idea_beside_its_control(monkeypatch, capsys):
    line = "risk_search --clients 10 --rounds 2 --folds 1 2 --seeds 0 --ideas server-urisk5 --liars 0.3"
    monkeypatch.setattr(sys, "argv", line.split())
    risk_search.main()
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert {(row["idea"], row.get("against")) for row in rows} == {
        ("mean", None),
        ("server-neutral", "mean"),
        ("server-urisk5", "mean"),
        ("server-urisk5", "server-neutral"),
    }
