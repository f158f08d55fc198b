"""Simulated users click as their table says: every pattern of clicks as often as the cascade gives it."""

from itertools import product

import numpy as np
import pytest

from clicking import chance_of
from mutirao.errors import ConfigError
from mutirao.systems.ranking.online.click_models import NAMES, TABLES, Cascade, click_documents

DRAWS = 60_000


@pytest.mark.parametrize("name", list(TABLES))
@pytest.mark.parametrize(("highest", "grades"), [(2, (1, 0, 2)), (4, (3, 0, 4))])
def test_every_pattern_of_clicks_is_as_frequent_as_the_cascade_says(name: str, highest: int, grades: tuple) -> None:
    user = Cascade.of(name, highest)
    click, stop = ([table[g] for g in grades] for table in (user.click, user.stop))
    draws = np.random.default_rng(5).random((2, DRAWS, 3))
    clicked = click_documents(np.tile(click, (DRAWS, 1)), np.tile(stop, (DRAWS, 1)), draws)
    total = 0.0
    for pattern in product((0, 1), repeat=3):
        expected = chance_of(pattern, click, stop)
        found = (clicked == np.array(pattern, bool)).all(1).mean()
        assert found == pytest.approx(expected, abs=4.5 * np.sqrt(max(expected * (1 - expected), 1e-9) / DRAWS))
        total += expected
    assert total == pytest.approx(1)


def test_the_tables_are_those_of_the_field() -> None:
    # Wang, Liu, Zhuang and Zuccon (2021) for grades 0 to 2 and 0 to 4; near random as Oosterhuis and de Rijke (2018).
    assert TABLES["perfect"][2] == ((0.0, 0.5, 1.0), (0.0, 0.0, 0.0))
    assert TABLES["navigational"][2] == ((0.05, 0.5, 0.95), (0.2, 0.5, 0.9))
    assert TABLES["informational"][2] == ((0.4, 0.7, 0.9), (0.1, 0.3, 0.5))
    assert TABLES["perfect"][4] == ((0.0, 0.2, 0.4, 0.8, 1.0), (0.0,) * 5)
    assert TABLES["navigational"][4] == ((0.05, 0.3, 0.5, 0.7, 0.95), (0.2, 0.3, 0.5, 0.7, 0.9))
    assert TABLES["informational"][4] == ((0.4, 0.6, 0.7, 0.8, 0.9), (0.1, 0.2, 0.3, 0.4, 0.5))
    assert TABLES["near_random"][4] == ((0.4, 0.45, 0.5, 0.55, 0.6), (0.5,) * 5)
    assert {"perfect", "navigational", "informational", "near_random", "mixed", "logged"} == set(NAMES)


def test_noise_moves_chances_to_a_half_and_grades_without_a_table_are_refused() -> None:
    assert Cascade.of("perfect", 2, noise=1.0).click == (0.5, 0.5, 0.5)
    assert Cascade.of("perfect", 2, noise=0.2).click == pytest.approx((0.1, 0.5, 0.9))
    assert Cascade.of("perfect", 3).click == TABLES["perfect"][4][0]
    assert Cascade.of("logged", 1).click == (0.0, 1.0)
    with pytest.raises(ConfigError, match="grades up to 4, but the data have grade 5"):
        Cascade.of("perfect", 5)
