"""FPDGD's shares of noise: of all clients together they are Laplace noise of the scale that was promised."""

import numpy as np
import pytest
from scipy import stats

from mutirao.config import Part, build
from mutirao.errors import ConfigError
from mutirao.randomness import Secret
from mutirao.systems.ranking.online.fpdgd_noise import Shares, laplace_shares


@pytest.mark.parametrize("parties", [1, 4, 40])
def test_shares_add_up_to_laplace_noise(parties: int) -> None:
    draw = np.random.default_rng(7)
    total = sum(laplace_shares(draw, 1.5, parties, (4000,)) for _ in range(parties))
    assert stats.kstest(total, stats.laplace(scale=1.5).cdf).pvalue > 0.01
    assert np.var(total) == pytest.approx(2 * 1.5**2, rel=0.15)


def test_shares_come_from_the_system_unless_they_are_to_be_repeated() -> None:
    model, where = {"weight": np.zeros(50)}, (10, 3, 1, "u1")
    first, again = (Shares().add(model, *where)["weight"] for _ in range(2))
    assert not np.array_equal(first, again)
    first, again = (Shares(repeatable=True).add(model, *where)["weight"] for _ in range(2))
    assert np.array_equal(first, again)
    assert laplace_shares(Secret(), 1.0, 2, (3, 2)).shape == (3, 2)


def test_a_model_is_cut_to_a_length_and_wrong_settings_are_refused() -> None:
    clipped = Shares(sensitivity=5.0).clip({"a": np.array([6.0]), "b": np.array([8.0])})
    assert (clipped["a"][0], clipped["b"][0]) == (3.0, 4.0)
    short = {"a": np.array([1.0]), "b": np.zeros(1)}
    assert Shares(sensitivity=5.0).clip(short) == short
    with pytest.raises(ConfigError, match=r"epsilon is 0\.0, but must be above 0"):
        build("privacy", Part("shares", {"epsilon": 0.0}, home="mutirao.systems.ranking.online.fpdgd_noise"))
