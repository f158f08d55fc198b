"""FedBuff: the paper's formula, the limits of its settings, and a quadratic's optimum in spite of stale updates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.aggregation import FedAvg
from mutirao.aggregation.fedbuff import FedBuff
from mutirao.config import Part, build
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply
from mutirao.errors import ConfigError
from staggering import Quadratic, run_staggered


def reply(w: list[float], staleness: float, steps: int = 0, n: int = 1) -> Reply:
    arrays: Arrays = {"w": np.array(w), "steps": np.array(steps)}
    return Reply(arrays, metrics={"staleness": staleness}, n=n)


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.integers(0, 30)), min_size=1, max_size=6),
    st.floats(0.1, 2),
    st.floats(0, 2),
)
def test_a_step_is_that_of_the_paper(updates: list[tuple[float, float, int]], lr: float, exponent: float) -> None:
    x = np.array([1.0, -2.0])
    replies = {f"c{i}": reply([1 + a, -2 + b], tau, n=i + 1) for i, (a, b, tau) in enumerate(updates)}
    made = FedBuff(lr=lr, exponent=exponent)({"w": x, "steps": np.array(3)}, replies, {})
    total = np.zeros(2)  # written out as the algorithm has it: sum up, divide by K, step
    for a, b, tau in updates:
        total += (1.0 + tau) ** (-exponent) * np.array([a, b])
    np.testing.assert_allclose(made.arrays["w"], x + lr * total / len(updates), atol=1e-12)
    assert list(made.weights.values()) == pytest.approx([(1 + t) ** -exponent / len(updates) for *_, t in updates])


def test_fresh_updates_of_equal_clients_are_averaged_as_by_fedavg() -> None:
    current: Arrays = {"w": np.zeros(2), "steps": np.array(4)}
    replies = {"ana": reply([1, 2], 0, 9), "bia": reply([3, 4], 0, 10)}
    made, plain = FedBuff()(current, replies, {}), FedAvg()(current, replies, {})
    np.testing.assert_allclose(made.arrays["w"], plain.arrays["w"])
    assert made.arrays["steps"] == plain.arrays["steps"]
    assert made.arrays["steps"].dtype == np.int64


def test_half_of_those_at_work_fill_the_buffer_unless_it_is_said() -> None:
    assert [FedBuff().buffer_of(m) for m in (1, 2, 5, 10)] == [1, 1, 3, 5]
    assert FedBuff(buffer=4).buffer_of(10) == 4


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"buffer": -1}, {"exponent": -0.5}, {"exponent": float("inf")}])
def test_wrong_settings_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^aggregate=fedbuff: {next(iter(wrong))} is"):
        build("aggregate", Part("fedbuff", wrong))


@pytest.mark.parametrize("buffer", [1, 3])
def test_it_finds_the_optimum_that_all_clients_share(buffer: int) -> None:
    """Their curvatures differ by ten and their speeds by forty; updates are up to dozens of models old."""
    task = Quadratic(shared=True)
    run, made = run_staggered(task, FedBuff(buffer=buffer), rounds=400, at_once=6)
    assert max(r["staleness"] for done in made for r in done.clients) >= 8
    np.testing.assert_allclose(run.arrays["w"], task.optimum, atol=1e-6)
    start = float(np.linalg.norm(task.optimum))
    assert start > 1  # it did not begin there
