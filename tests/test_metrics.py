"""Metrics against pytrec-eval-terrier and scikit-learn, and figures of fairness by hand."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from sklearn.metrics import ndcg_score

from mutirao.metrics import (
    classification_metrics,
    direction_of,
    evaluate_logits,
    gini,
    mean_average_precision,
    mrr,
    ndcg,
    regression_metrics,
    rmse,
    rounds_to,
    softmax,
)

Ints = npt.NDArray[np.int64]


@st.composite
def rankings(draw: st.DrawFn, ties: bool = False) -> tuple[npt.NDArray[np.float64], Ints, Ints]:
    n = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, n).astype(float) if ties else rng.permutation(n) / n
    return scores, rng.integers(0, 5, n) * rng.integers(0, 2, n), rng.integers(0, draw(st.integers(1, 6)), n)


def trec(scores: npt.NDArray[np.float64], labels: Ints, queries: Ints, measure: str) -> float:
    """The mean over queries by trec_eval's own code."""
    judged: dict[str, dict[str, int]] = {}
    found: dict[str, dict[str, float]] = {}
    for i, (s, y, q) in enumerate(zip(scores, labels, queries, strict=True)):
        judged.setdefault(str(q), {})[f"d{i}"] = int(y)
        found.setdefault(str(q), {})[f"d{i}"] = float(s)
    result = pytrec_eval.RelevanceEvaluator(judged, {measure}).evaluate(found)
    name = measure.replace(".", "_")
    return float(np.mean([result[q][name] if q in result else 0.0 for q in judged]))


@given(rankings(), st.integers(1, 20))
@settings(deadline=None)
def test_ndcg_with_linear_gain_equals_trec_eval(ranking: tuple[npt.NDArray[np.float64], Ints, Ints], k: int) -> None:
    ours = ndcg(*ranking, k=k, gain="linear")
    assert ours == pytest.approx(trec(*ranking, f"ndcg_cut.{k}"), abs=1e-9)


@given(rankings(), st.integers(1, 20))
@settings(deadline=None)
def test_ndcg_with_exponential_gain_equals_trec_eval_on_gains(
    ranking: tuple[npt.NDArray[np.float64], Ints, Ints], k: int
) -> None:
    scores, labels, queries = ranking
    assert ndcg(scores, labels, queries, k=k) == pytest.approx(
        trec(scores, 2**labels - 1, queries, f"ndcg_cut.{k}"), abs=1e-9
    )


@given(rankings(), st.integers(1, 20))
@settings(deadline=None)
def test_map_equals_trec_eval(ranking: tuple[npt.NDArray[np.float64], Ints, Ints], k: int) -> None:
    assert mean_average_precision(*ranking, k=k) == pytest.approx(trec(*ranking, f"map_cut.{k}"), abs=1e-9)


@given(rankings())
@settings(deadline=None)
def test_mrr_equals_trec_eval(ranking: tuple[npt.NDArray[np.float64], Ints, Ints]) -> None:
    assert mrr(*ranking, k=1000) == pytest.approx(trec(*ranking, "recip_rank"), abs=1e-9)


@given(rankings(ties=True), st.integers(1, 20))
@settings(deadline=None)
def test_ties_averaged_equal_scikit_learn(ranking: tuple[npt.NDArray[np.float64], Ints, Ints], k: int) -> None:
    scores, labels, queries = ranking
    values = []
    for q in np.unique(queries):
        own = queries == q
        if own.sum() > 1:
            values.append(ndcg_score([labels[own]], [scores[own]], k=k))
        else:
            values.append(float(labels[own][0] > 0))
    assert ndcg(scores, labels, queries, k=k, gain="linear", ties="average") == pytest.approx(np.mean(values), abs=1e-9)


def test_the_tie_rules_bracket_each_other() -> None:
    scores, labels, queries = [1, 1, 1], [0, 2, 1], [0, 0, 0]
    worst = ndcg(scores, labels, queries, 3, ties="worst")
    average = ndcg(scores, labels, queries, 3, ties="average")
    order = ndcg(scores, labels, queries, 3, ties="order")
    assert worst < average < 1.0
    assert worst < order
    assert mrr(scores, labels, queries, 3, ties="worst") == 0.5
    assert mrr(scores, [2, 0, 0], queries, 3) == 1.0


def test_a_query_without_relevant_documents_counts_as_told() -> None:
    scores, labels, queries = [2, 1, 2, 1], [0, 0, 1, 0], [0, 0, 1, 1]
    assert ndcg(scores, labels, queries, 5) == 0.5
    assert ndcg(scores, labels, queries, 5, empty=1.0) == 1.0
    assert ndcg(scores, labels, queries, 5, empty=math.nan) == 1.0
    assert mrr(scores, labels, queries, 5, empty=math.nan) == 1.0
    assert math.isnan(ndcg([1.0], [0], [0], 5, empty=math.nan))
    assert math.isnan(ndcg([], [], [], 5))


def test_queries_need_not_be_sorted_or_numbers() -> None:
    scores, labels = [0.3, 0.9, 0.5, 0.1], [1, 0, 2, 1]
    assert ndcg(scores, labels, ["b", "a", "b", "a"], 2) == ndcg(
        [0.9, 0.1, 0.3, 0.5], [0, 1, 1, 2], ["a", "a", "b", "b"], 2
    )


@pytest.mark.parametrize("scores", [[math.nan, 1.0], [1.0]])
def test_nonsense_is_refused(scores: list[float]) -> None:
    with pytest.raises(ValueError, match=r"NaN|one length"):
        ndcg(scores, [0, 1], [0, 0], 5)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_gini_is_the_mean_absolute_difference(counts: list[int]) -> None:
    x = np.array(counts, float)
    expected = np.abs(x[:, None] - x).sum() / (2 * len(x) ** 2 * x.mean()) if x.sum() else 0.0
    assert gini(counts) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "metric",
    [
        "loss",
        "rmse",
        "train_loss",
        "loss_worst",
        "rmse,cold",
        "val_loss",
        "train_val_loss",
        "ece",
        "mse",
        "brier",
        "perplexity",
        "wer",
        "global_loss",
        "distributed_loss",
        "loss_p90",
        "epsilon",
        "false_rejections",
    ],
)
def test_lower_is_better_for_losses_and_errors_however_they_are_told(metric: str) -> None:
    assert direction_of(metric) == "lower"


@pytest.mark.parametrize(
    "metric",
    ["accuracy", "ndcg@5", "balanced_accuracy", "sensitivity@95", "val_acc", "accuracy_worst_decile", "recall_light"],
)
def test_higher_is_better_for_what_is_right_and_found(metric: str) -> None:
    assert direction_of(metric) == "higher"


def test_a_direction_is_told_or_known_and_never_guessed() -> None:
    assert [direction_of(m) for m in ("regret", "groups", "accuracy_clients", "lossless", "")] == [None] * 5
    assert direction_of("regret_worst", {"regret": "lower"}) == "lower"
    assert direction_of("accuracy", {"accuracy": "lower"}) == "lower"
    assert direction_of("loss", {"loss": "sideways"}) == "lower"  # a summary may hold anything


def test_rounds_to_and_rmse() -> None:
    assert rounds_to([0.1, 0.7, 0.6], 0.65) == 2
    assert rounds_to([0.1], 0.65) is None
    assert rmse([1, 2], [1, 4]) == pytest.approx(math.sqrt(2))


@st.composite
def judged_classes(draw: st.DrawFn, ties: bool) -> tuple[npt.NDArray[np.float64], Ints]:
    n, classes = draw(st.integers(1, 60)), draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.integers(0, 3, (n, classes)).astype(float) if ties else rng.normal(size=(n, classes)) * 3
    return scores, rng.integers(0, draw(st.integers(1, classes)), n)  # some classes may be missing


@pytest.mark.parametrize("ties", [False, True])
@given(st.data())
@settings(deadline=None)
def test_figures_of_classes_equal_those_of_scikit_learn(ties: bool, data: st.DataObject) -> None:
    scores, y = data.draw(judged_classes(ties))
    p, classes = softmax(scores), scores.shape[1]
    found, here, ours = p.argmax(1), np.unique(y), classification_metrics(p, y)
    assert evaluate_logits(scores, y) == ours
    assert ours["accuracy"] == sk.accuracy_score(y, found)
    recall = sk.recall_score(y, found, labels=here, average="macro", zero_division=0)
    assert ours["balanced_accuracy"] == pytest.approx(recall)
    average = {"pos_label": 1} if classes == 2 else {"average": "macro"}
    assert ours["f1"] == pytest.approx(sk.f1_score(y, found, **average, zero_division=0))
    assert ours["log_loss"] == pytest.approx(sk.log_loss(y, p, labels=range(classes)))
    if len(here) == 1:
        assert "auc" not in ours
    else:
        areas = [sk.roc_auc_score(y == k, p[:, k]) for k in ([1] if classes == 2 else here)]
        assert ours["auc"] == pytest.approx(np.mean(areas))
    assert all(direction_of(name) == ("lower" if name == "log_loss" else "higher") for name in ours)


@given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.floats(-1e6, 1e6), st.floats(1e-3, 1e4))
@settings(deadline=None)
def test_figures_of_numbers_equal_those_of_scikit_learn(n: int, seed: int, shift: float, scale: float) -> None:
    rng = np.random.default_rng(seed)
    p, t = (rng.normal(shift, scale, n) for _ in range(2))
    ours = regression_metrics(p[:, None], t)
    assert ours["rmse"] == pytest.approx(sk.root_mean_squared_error(t, p))
    assert ours["mae"] == pytest.approx(sk.mean_absolute_error(t, p))
    if n > 1 and t.min() < t.max():
        assert ours["r2"] == pytest.approx(sk.r2_score(t, p), rel=1e-6, abs=1e-6)
    else:
        assert "r2" not in ours
    assert {name: direction_of(name) for name in ours} == {k: "higher" if k == "r2" else "lower" for k in ours}


def test_what_cannot_be_said_is_left_out() -> None:
    assert classification_metrics(np.empty((0, 2)), []) == regression_metrics([], []) == {}
    assert evaluate_logits([[np.inf, 0.0]], [0]) == evaluate_logits([[np.nan, 0.0]], [0]) == {}
    assert regression_metrics([np.nan, 1.0], [0.0, 1.0]) == {}
    assert regression_metrics([1.0, 2.0], [3.0, 3.0]).keys() == {"rmse", "mae"}
    with pytest.raises(ValueError, match="labels from 0 to 2 do not number 2 classes"):
        classification_metrics([[0.5, 0.5]] * 2, [0, 2])
    with pytest.raises(ValueError, match="one row of probabilities for each label"):
        classification_metrics([0.5, 0.5], [0, 1])
    with pytest.raises(ValueError, match="expected one prediction for each target, got 1 for 2"):
        regression_metrics([1.0], [0.0, 1.0])
