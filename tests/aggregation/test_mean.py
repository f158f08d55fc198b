"""The plain mean against loops written out, against FedRisk without risk, and resumed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.aggregation import NAMES, FedAvg, FedRisk, Mean
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply
from mutirao.core.parts import Aggregator
from mutirao.experiments.task import find
from mutirao.runs.execute import execute


def model_of(draw: np.random.Generator) -> Arrays:
    """Two arrays that move, and a counter that does not."""
    return {
        "w": draw.normal(size=(3, 2)),
        "b": draw.normal(size=4).astype(np.float32),
        "steps": np.array(draw.integers(9), np.int64),
    }


def rounds_of(seed: int, rounds: int, clients: int) -> list[dict[str, Reply]]:
    """What clients of very different size send; none of them tells an error."""
    draw = np.random.default_rng(seed)
    return [
        {f"c{k}": Reply(model_of(draw), {}, n=int(draw.integers(1, 1000))) for k in range(clients)}
        for _ in range(rounds)
    ]


def follow(part: Aggregator, start: Arrays, rounds: list[dict[str, Reply]]) -> Arrays:
    """The model after all rounds, the same replies whatever it was."""
    memory: Arrays = {}
    for replies in rounds:
        start = part(start, replies, memory).arrays
    return start


@given(seed=st.integers(0, 2**20), clients=st.integers(1, 6), lr=st.floats(0.1, 2), momentum=st.floats(0, 0.95))
def test_it_is_the_formula(seed: int, clients: int, lr: float, momentum: float) -> None:
    rounds, start = rounds_of(seed, 3, clients), model_of(np.random.default_rng(seed + 1))
    end = follow(Mean(lr, momentum), start, rounds)
    for name in ("w", "b"):
        x, v = start[name].astype(np.float64).ravel().tolist(), [0.0] * start[name].size
        for replies in rounds:
            for i in range(len(x)):
                d = 0.0
                for reply in replies.values():
                    d += (float(reply.arrays[name].ravel()[i]) - x[i]) / len(replies)
                v[i] = momentum * v[i] + d
                x[i] += lr * v[i]
        np.testing.assert_allclose(end[name].ravel(), x, rtol=0, atol=1e-10 if name == "w" else 1e-4)
    steps = sum(int(r.arrays["steps"]) for r in rounds[-1].values()) / clients
    assert abs(end["steps"] - steps) < 0.5 + 1e-9  # a half may go either way


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedrisk_without_risk_is_the_plain_mean(momentum: float) -> None:
    rounds, start = rounds_of(3, 6, 7), model_of(np.random.default_rng(4))
    risk = FedRisk(memory="momentum", momentum=momentum) if momentum else FedRisk()
    theirs, ours = follow(risk, start, rounds), follow(Mean(momentum=momentum), start, rounds)
    np.testing.assert_allclose(ours["w"], theirs["w"], rtol=0, atol=1e-14)
    np.testing.assert_array_equal(ours["b"], theirs["b"])  # of float32 the same to the bit
    assert ours["steps"] == theirs["steps"]


def test_every_client_counts_once() -> None:
    start: Arrays = {"w": np.zeros(2)}
    replies = {"large": Reply({"w": np.ones(2)}, n=999), "small": Reply({"w": -np.ones(2)}, n=1)}
    merged = Mean()(start, replies, {})
    np.testing.assert_array_equal(merged.arrays["w"], 0.0)
    assert merged.weights == {"large": 0.5, "small": 0.5}
    assert FedAvg()(start, replies, {}).arrays["w"][0] == pytest.approx(0.998)


def test_it_remembers_nothing_without_momentum() -> None:
    (replies,), memory = rounds_of(1, 1, 3), {}
    Mean()(model_of(np.random.default_rng(0)), replies, memory)
    assert memory == {}
    Mean(momentum=0.5)(model_of(np.random.default_rng(0)), replies, memory)
    assert set(memory) == {"mean.v.w", "mean.v.b"}


def test_settings_are_checked() -> None:
    assert NAMES["mean"] is Mean
    for settings in ({"lr": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}):
        with pytest.raises(ValueError, match="must be"):
            Mean(**settings)


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    recipe, settings = find("quickstart"), {"clients": 8, "per_round": 3, "aggregate": "mean", "epochs": 1}
    settings |= {"aggregate.momentum": 0.9}
    whole = execute(recipe, {**settings, "rounds": 4}, tmp_path / "whole")
    execute(recipe, {**settings, "rounds": 2}, tmp_path / "parts")
    parts = execute(recipe, {**settings, "rounds": 4}, tmp_path / "parts", resume=True)
    assert parts["digest"] == whole["digest"]
