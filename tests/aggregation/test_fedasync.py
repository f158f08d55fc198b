"""FedAsync: the paper's mixing with its three kinds of decay, and the optimum of a quadratic."""

import numpy as np
import pytest

from mutirao.aggregation.fedasync import FedAsync
from mutirao.config import Part, build
from mutirao.core.fleet import Reply
from mutirao.errors import ConfigError
from staggering import Quadratic, run_staggered


def authors(decay: str, staleness: int, a: float, b: int) -> float:
    """s(t - tau) as section 4 of the paper has it."""
    if decay == "constant":
        return 1.0
    if decay == "polynomial":
        return float((staleness + 1) ** (-a))
    return 1.0 if staleness <= b else 1.0 / (a * (staleness - b) + 1)


@pytest.mark.parametrize("decay", ["constant", "hinge", "polynomial"])
def test_models_are_mixed_as_in_the_paper_over_several_steps(decay: str) -> None:
    part = FedAsync(mixing=0.7, decay=decay, a=0.5 if decay == "polynomial" else 10.0, b=2)  # type: ignore[arg-type]
    draw = np.random.default_rng(3)
    x = {"w": draw.normal(size=3), "steps": np.array(5)}
    wanted = x["w"]
    for staleness in (0, 1, 2, 3, 7):
        theirs = draw.normal(size=3)
        share = 0.7 * authors(decay, staleness, part.a, 2)
        wanted = (1 - share) * wanted + share * theirs
        told = {"ana": Reply({"w": theirs, "steps": np.array(9)}, metrics={"staleness": float(staleness)}, n=4)}
        made = part(x, told, {})
        assert made.weights == pytest.approx({"ana": share})
        x = made.arrays
    np.testing.assert_allclose(x["w"], wanted, atol=1e-12)
    assert x["steps"].dtype == np.int64


def test_the_proximal_term_is_the_clients() -> None:
    assert FedAsync(mu=0.1).needs.config == {"mu": 0.1}
    assert not FedAsync().needs.config


@pytest.mark.parametrize(
    "wrong", [{"mixing": 0.0}, {"mixing": 1.5}, {"a": -1.0}, {"b": -1}, {"mu": -0.1}, {"decay": "linear"}]
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^aggregate=fedasync: {next(iter(wrong))} is"):
        build("aggregate", Part("fedasync", wrong))


def test_it_finds_the_optimum_that_all_clients_share() -> None:
    task = Quadratic(shared=True)
    run, made = run_staggered(task, FedAsync(), rounds=600, at_once=5)
    assert {len(done.clients) for done in made} == {1}  # every reply makes a model
    np.testing.assert_allclose(run.arrays["w"], task.optimum, atol=1e-6)
