"""How much data the cells of a study share, and what that does to its verdicts."""

from pathlib import Path

import numpy as np
import pytest

from mutirao.errors import ConfigError
from mutirao.experiments.task import NAMES, find
from mutirao.studies.study import has_validation, ratio_of, read_study, shared_of
from mutirao.systems.quickstart import Config as Quickstart
from mutirao.systems.ranking.ranking_sources import load_splits
from mutirao.systems.ranking.recipe import Config as Ranking

STUDY = """
recipe = "ranking"
[over]
fold = [1, 2, 3]
[methods.a]
"""


def test_folds_share_what_the_recipe_cuts_them_from(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(STUDY)
    study = read_study(tmp_path / "s.toml")
    train, _, test = load_splits(Ranking(fold=1))
    sizes = len(np.unique(test.queries)) / len(np.unique(train.queries))
    assert study.shared == pytest.approx(sizes)  # of five parts three train and one judges


def test_seeds_alone_share_nothing_unless_the_file_says_so(tmp_path: Path) -> None:
    assert shared_of(None, {"seed": [0, 1]}, Ranking) == 0.0
    assert shared_of(None, {"fold": [1, 2, 3, 4]}, Quickstart) == pytest.approx(
        1 / 2 if has_validation(Quickstart) else 1 / 3
    )
    assert {shared_of(None, {"seed": [0, 1]}, find(name).config) for name in NAMES} == {0.0}
    (tmp_path / "s.toml").write_text('shared = "1/8"\n' + STUDY)
    assert read_study(tmp_path / "s.toml").shared == 0.125


@pytest.mark.parametrize(("told", "ratio"), [(0, 0.0), (0.25, 0.25), ("1/4", 0.25), (" 1 / 3 ", 1 / 3), (2, 2.0)])
def test_a_share_is_a_number_or_a_fraction(told: object, ratio: float) -> None:
    assert ratio_of(told) == pytest.approx(ratio)


@pytest.mark.parametrize("told", ["x", "1/0", "1/x", "", "0.25", True, -0.1, [1], float("nan"), float("inf"), "-1/4"])
def test_anything_else_is_refused(told: object) -> None:
    with pytest.raises(ConfigError, match="test samples for each training sample"):
        ratio_of(told)
