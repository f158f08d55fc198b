"""Metrics by name and cut, against trec_eval, and ERR against a loop over ranks."""

from typing import Any

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.errors import ConfigError
from mutirao.metrics import direction_of
from mutirao.systems.ranking.metrics import DIRECTIONS, FUNCTIONS, USUAL, build_metrics, metric_names

NAMES = {"map": "map", "p@5": "P_5", "p@20": "P_20", "mrr": "recip_rank", "ndcg": "ndcg", "ndcg@5": "ndcg_cut_5"}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), documents=st.integers(1, 60))
def test_they_are_trec_evals(seed: int, documents: int) -> None:
    draw = np.random.default_rng(seed)
    queries, grades = draw.integers(0, 5, documents), draw.integers(0, 3, documents) * draw.integers(0, 2, documents)
    scores = draw.permutation(documents) / 7
    run: dict[str, dict[str, float]] = {}
    qrel: dict[str, dict[str, int]] = {}
    for i in range(documents):
        run.setdefault(f"q{queries[i]}", {})[f"d{i}"] = float(scores[i])
        qrel.setdefault(f"q{queries[i]}", {})[f"d{i}"] = int(grades[i])
    found = pytrec_eval.RelevanceEvaluator(qrel, {"map", "P", "recip_rank", "ndcg", "ndcg_cut"}).evaluate(run)
    ours = build_metrics(",".join(NAMES), gain="linear")
    for name, theirs in NAMES.items():
        wanted = np.mean([figures[theirs] for figures in found.values()])
        assert ours[name](scores, grades, queries) == pytest.approx(wanted, abs=1e-12)


def slow_err(grades: list[int], k: int, highest: int) -> float:
    left, total = 1.0, 0.0
    for rank, grade in enumerate(grades[:k], 1):
        stops = (2**grade - 1) / 2**highest
        total += left * stops / rank
        left *= 1 - stops
    return total


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 12), highest=st.integers(2, 6))
def test_err_is_the_loop_over_ranks(seed: int, k: int, highest: int) -> None:
    draw = np.random.default_rng(seed)
    queries, grades = draw.integers(0, 4, 30), draw.integers(0, highest + 1, 30)
    scores = draw.permutation(30) / 3
    each = []
    for q in np.unique(queries):
        mine = np.flatnonzero(queries == q)
        each.append(slow_err(grades[mine][np.argsort(-scores[mine])].tolist(), k, highest))
    ours = build_metrics(f"err@{k}", highest=highest)[f"err@{k}"](scores, grades, queries)
    assert ours == pytest.approx(np.mean(each), abs=1e-12)


@pytest.mark.parametrize(("empty", "wanted"), [("0", 0.5), ("1", 1.0), ("skip", 1.0)])
def test_a_query_without_relevant_documents_counts_as_is_set(empty: str, wanted: float) -> None:
    for name, measure in build_metrics("ndcg@1,mrr@1,map,p@1", empty=empty).items():
        assert measure([2.0, 1.0, 3.0], [1, 0, 0], [0, 0, 1]) == wanted, name


def test_gain_is_of_the_grade_or_of_its_power() -> None:
    scores, grades, queries = [2.0, 1.0], [1, 3], [0, 0]
    discount = 1 / np.log2(3)
    both = [build_metrics("ndcg@2", gain)["ndcg@2"](scores, grades, queries) for gain in ("linear", "exponential")]
    assert both == pytest.approx([(1 + 3 * discount) / (3 + discount), (1 + 7 * discount) / (7 + discount)])


def test_a_grade_off_the_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="not on the scale from 0 to 2"):
        build_metrics("err", highest=2)["err"]([1.0], [3], [0])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ndgc@5", "no metric is called 'ndgc'; did you mean 'ndcg'"),
        ("ndcg@0", "'ndcg@0' is not cut at a rank from 1 on, as ndcg@5 is"),
        ("ndcg@five", "'ndcg@five' is not cut"),
        ("p", "'p' is not cut at a rank"),
        ("map,map", "'map' is named twice"),
        (" , ", "name at least one"),
    ],
)
def test_a_metric_that_cannot_be_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        metric_names(text)


def test_every_metric_has_a_direction() -> None:
    directions: dict[str, Any] = DIRECTIONS
    assert {direction_of(name, directions) for name in (*metric_names(USUAL), *FUNCTIONS, "vali_p@5")} == {"higher"}
