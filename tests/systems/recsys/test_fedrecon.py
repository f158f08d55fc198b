"""FedRecon: vectors are the exact solution, items move as SGD says, both paths agree, and vectors stay home."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import check_grad, minimize
from sklearn.linear_model import Ridge

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.sparse_rows import ROWS
from mutirao.errors import ConfigError
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys import local_training
from mutirao.systems.recsys.fedrecon import ITEMS, FedRecon
from mutirao.systems.recsys.kernels import find_kernel
from mutirao.systems.recsys.local_training import (
    SolverSettings,
    UserExamples,
    make_batch,
    rebuild_vector,
    sample_support,
    splitmix64,
    train_pairs,
)
from mutirao.systems.recsys.ratings import Taste

CONFIG = {"seed": 0, "round": 1}
D = 6


def method(**changes: Any) -> FedRecon:
    return dataclasses.replace(FedRecon(items=40, dimension=D, ridge=2.0, ridge_bias=0.5, lr=0.1), **changes)


def taste(n: int = 12, seed: int = 0) -> Taste:
    draw = np.random.default_rng(seed)
    return Taste(np.sort(draw.choice(40, n, replace=False)).astype(np.int32), draw.integers(1, 6, n).astype(np.float32))


def model(seed: int = 0, spread: float = 0.5) -> Arrays:
    return {ITEMS: np.random.default_rng(seed).normal(0, spread, (40, D)).astype(np.float32)}


def worked(m: FedRecon, arrays: Arrays, ratings: Taste, support: np.ndarray, epochs: int = 0) -> local_training.Batch:
    work = UserExamples(ratings.items, ratings.values, support=support)
    batch = make_batch([work], arrays[ITEMS], m.centre, m.compiled)
    m.train(batch, epochs)
    return batch


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_the_vector_is_scikit_learns_ridge_regression(fast: bool, biases: bool) -> None:
    m, arrays, ratings = method(biases=biases, ridge_bias=1e-9, compiled=fast), model(), taste()
    known = np.arange(12) % 3 > 0
    batch = worked(m, arrays, ratings, known)
    x = arrays[ITEMS][ratings.items].astype(np.float64)
    if biases:  # scikit-learn leaves the intercept free, as a ridge of next to nothing does
        theirs = Ridge(alpha=m.ridge).fit(x[known, 1:], ratings.values[known] - m.centre - x[known, 0])
        expected = np.concatenate([[theirs.intercept_], theirs.coef_])
        guesses = m.centre + expected[0] + x[:, 0] + x[:, 1:] @ expected[1:]
    else:
        expected = Ridge(alpha=m.ridge, fit_intercept=False).fit(x[known], ratings.values[known]).coef_
        guesses = x @ expected
    np.testing.assert_allclose(batch.vectors[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch.predictions + m.centre, guesses[~known], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("rebuild", ["ridge", "sgd"])
def test_the_vector_and_items_follow_the_gradient(fast: bool, biases: bool, rebuild: Any) -> None:
    """Items of the query make one step against the gradient of the loss, taken numerically; others stay."""
    m = method(biases=biases, rebuild=rebuild, passes=3, compiled=fast, weight_decay=0.3)
    arrays, ratings, known = model(), taste(), np.arange(12) % 2 == 0
    batch = worked(m, arrays, ratings, known, epochs=1)
    v, before = batch.vectors[0].astype(np.float64), arrays[ITEMS][ratings.items].astype(np.float64)

    def loss(x: np.ndarray, k: int) -> float:
        p = v[0] + x[0] + x[1:] @ v[1:] if biases else x @ v
        return float(0.5 * (ratings.values[k] - m.centre - p) ** 2 + 0.5 * m.weight_decay * x @ x)

    assert batch.query.tolist() == np.flatnonzero(~known).tolist()
    for k, new in zip(batch.query, batch.trained, strict=True):
        slope = np.array([(loss(before[k] + h, k) - loss(before[k] - h, k)) / 2e-5 for h in 1e-5 * np.eye(D)])
        np.testing.assert_allclose(new, before[k] - m.lr * slope, atol=2e-5)


@given(seed=st.integers(0, 10**6), epochs=st.integers(0, 3), biases=st.booleans(), mu=st.sampled_from([0.0, 0.7]))
def test_compiled_and_plain_work_agree(seed: int, epochs: int, biases: bool, mu: float) -> None:
    draw = np.random.default_rng(seed)
    tastes = [taste(int(draw.integers(2, 30)), seed + k) for k in range(5)]
    for rebuild in ("ridge", "sgd"):
        found = []
        for fast in (True, False):
            m = method(biases=biases, rebuild=rebuild, passes=2, rebuild_lr=0.05, compiled=fast, weight_decay=0.1)
            works = [UserExamples(t.items, t.values, seed + k, m.support_size(len(t))) for k, t in enumerate(tastes)]
            batch = make_batch(works, model(seed)[ITEMS], m.centre, fast)
            m.train(batch, epochs, mu)
            found.append(batch)
        for name in ("trained", "vectors", "predictions", "support"):
            np.testing.assert_allclose(getattr(found[0], name), getattr(found[1], name), rtol=2e-3, atol=2e-4)


def test_a_proximal_term_holds_items_back() -> None:
    fleet = LocalFleet(method(epochs=20), {"ana": taste()})
    far, near = (
        fleet.ask({"ana": Request("train", model(), {**CONFIG, "mu": mu})}).replies["ana"].arrays for mu in (0.0, 5.0)
    )
    before = model()[ITEMS][far[ITEMS + ROWS]]
    assert np.linalg.norm(near[ITEMS] - before) < 0.8 * np.linalg.norm(far[ITEMS] - before)


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(2, 50), min_size=1, max_size=5))
def test_supports_are_drawn_alike_with_and_without_numba(seed: int, lengths: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    seeds, counts = [(seed + k) % 2**63 for k in range(len(lengths))], [n // 2 for n in lengths]
    fast, plain = sample_support(seeds, counts, offsets, True), sample_support(seeds, counts, offsets, False)
    np.testing.assert_array_equal(fast, plain)
    assert np.add.reduceat(fast, offsets[:-1]).tolist() == counts


def test_splitmix_gives_the_published_numbers() -> None:
    state, found = 1234567, []  # from the reference implementation in C by Vigna
    for _ in range(3):
        state, z = splitmix64(state)
        found.append(z)
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_support_is_drawn_evenly() -> None:
    offsets = np.arange(0, 20_001, 10)
    often = sample_support(list(range(2000)), [4] * 2000, offsets, True).reshape(2000, 10).mean(0)
    assert np.abs(often - 0.4).max() < 0.05


@pytest.mark.parametrize("loss", ["squared", "weighted", "bpr"])
def test_many_users_at_once_are_the_same_to_the_bit_as_one_by_one(loss: Any) -> None:
    m, arrays = method(loss=loss), model()
    tastes = {f"u{k}": taste(2 + k, k) for k in range(25)}
    requests = {c: Request("train", arrays, CONFIG) for c in tastes}
    together = LocalFleet(m, tastes).ask(requests)
    alone = LocalFleet(lambda request, site: m(request, site), tastes).ask(requests)
    other = LocalFleet(dataclasses.replace(m, workers=3), tastes).ask(requests)
    for answers in (alone, other):
        for client, reply in together.replies.items():
            theirs = answers.replies[client]
            assert reply.metrics == theirs.metrics
            for name in reply.arrays:
                np.testing.assert_array_equal(reply.arrays[name], theirs.arrays[name])


def test_slices_of_the_matrix_give_the_same_as_the_whole() -> None:
    m, arrays, ratings = method(), model(), taste()
    cut = {ITEMS: arrays[ITEMS][ratings.items], ITEMS + ROWS: ratings.items}
    whole, slices = (m(Request("train", a, CONFIG), Site("ana", ratings)) for a in (arrays, cut))
    np.testing.assert_array_equal(whole.arrays[ITEMS], slices.arrays[ITEMS])
    for wrong in ({ITEMS + ROWS: ratings.items[::-1]}, {ITEMS: cut[ITEMS][1:]}):
        with pytest.raises(ValueError, match="not sent the rows it asked for"):
            m(Request("train", cut | wrong, CONFIG), Site("ana", ratings))


@pytest.mark.parametrize("loss", ["squared", "weighted", "bpr"])
def test_nothing_leaves_but_rows_of_items_and_a_loss(loss: Any) -> None:
    """No vector of the user, no rating, no state: not to the server, and not to a checkpoint of the simulation."""
    fleet = LocalFleet(method(loss=loss), {"ana": taste(), "bia": taste(seed=1)})
    for round in (1, 2):
        requests = {c: Request("train", model(), {"seed": 0, "round": round}) for c in ("ana", "bia")}
        for client, reply in fleet.ask(requests).replies.items():
            assert reply.arrays.keys() == {ITEMS, ITEMS + ROWS}
            assert reply.extras == {}
            assert reply.metrics.keys() == {"loss"}
            rows = reply.arrays[ITEMS + ROWS]
            assert reply.arrays[ITEMS].shape == (len(rows), D)
            if loss == "squared":
                assert set(rows.tolist()) < set(fleet.population[client].items.tolist())
    assert fleet.states == {}
    assert fleet.snapshot() == {}


def test_only_the_query_is_sent_and_its_count_declared() -> None:
    reply = method()(Request("train", model(), CONFIG), Site("ana", taste(11)))
    assert len(reply.arrays[ITEMS + ROWS]) == reply.n == 11 - round(0.5 * 11)
    assert (np.diff(reply.arrays[ITEMS + ROWS]) > 0).all()


def test_implicit_feedback_hides_what_was_taken_among_what_was_not() -> None:
    m = method(loss="weighted", negatives=2)
    wish = m(Request("rows", {}, CONFIG), Site("ana", taste(5))).extras[ITEMS]
    assert set(taste(5).items.tolist()) < set(wish.tolist())
    assert len(wish) == 15
    assert (np.diff(wish) > 0).all(), "in rising order, which tells nothing"


@pytest.mark.parametrize("loss", ["squared", "weighted", "bpr"])
def test_each_round_splits_anew_and_a_round_repeats_itself(loss: Any) -> None:
    m = method(loss=loss)
    replies = [m(Request("train", model(), {"seed": 0, "round": t}), Site("ana", taste())) for t in (1, 1, 2)]
    assert np.array_equal(replies[0].arrays[ITEMS], replies[1].arrays[ITEMS])
    assert not np.array_equal(replies[0].arrays[ITEMS + ROWS], replies[2].arrays[ITEMS + ROWS])


def test_figures_are_of_the_query_before_it_was_trained() -> None:
    m = method()
    extras = {**CONFIG, "extras": "squared_errors,rms_loss,entropy,gradient_norm"}
    reply = m(Request("train", model(), extras), Site("ana", taste()))
    judged = m(Request("evaluate", model(), CONFIG), Site("ana", taste()))
    probed = m(Request("probe", model(), {**CONFIG, "extras": "rms_loss"}), Site("ana", taste()))
    assert judged.arrays == {}
    assert judged.metrics["rmse"] ** 2 == pytest.approx(reply.metrics["loss"])
    assert probed.metrics["rms_loss"] == reply.metrics["rms_loss"] >= reply.metrics["loss"]
    assert 0 < reply.metrics["entropy"] <= np.log(5)
    assert reply.extras["squared_errors"].dtype == np.uint8
    assert reply.extras["batch_sizes"].tolist() == [reply.n]


def test_the_gradient_norm_is_that_of_the_mean_squared_error() -> None:
    m, arrays, ratings = method(), model(), taste()
    reply = m(Request("train", arrays, {**CONFIG, "extras": "gradient_norm"}), Site("ana", ratings))
    rows = reply.arrays[ITEMS + ROWS]
    step = (reply.arrays[ITEMS].astype(np.float64) - arrays[ITEMS][rows]) / m.lr  # one step of lr e dp/dx for each item
    assert reply.metrics["gradient_norm"] == pytest.approx(2 / len(rows) * np.linalg.norm(step), rel=1e-3)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (taste(1), "has 1 ratings; two are needed"),
        (Taste(np.zeros(0, np.int32), np.zeros(0, np.float32)), "has 0 ratings"),
        (None, "expected ratings, got NoneType"),
    ],
)
def test_a_user_with_too_little_is_a_failure_of_its_own(data: Any, says: str) -> None:
    answers = LocalFleet(method(), {"ana": taste(), "odd": data}).ask(
        {c: Request("train", model(), CONFIG) for c in ("ana", "odd")}
    )
    assert says in answers.failures["odd"].reason
    assert isinstance(answers.replies["ana"], Reply)


def test_who_took_everything_cannot_be_ranked_for() -> None:
    everything = Taste(np.arange(40, dtype=np.int32), np.ones(40, np.float32))
    answers = method(loss="bpr").many({"a": Request("train", model(), CONFIG)}, {"a": Site("a", everything)})
    assert isinstance(answers["a"], Failure)
    assert "has taken all 40 items" in answers["a"].reason


def test_strange_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="not 'sing'"):
        method()(Request("sing", model(), CONFIG), Site("ana", taste()))
    with pytest.raises(ValueError, match="there are no extras ratings"):
        method()(Request("train", model(), {**CONFIG, "extras": "ratings"}), Site("ana", taste()))


def test_samples_cap_what_a_user_works_on() -> None:
    reply = method(samples=6)(Request("train", model(), CONFIG), Site("ana", taste(30)))
    assert reply.n == 3


def test_numba_is_used_where_it_is() -> None:
    assert find_kernel("squared_kernel") is not None


@pytest.mark.parametrize("fast", [True, False])
def test_weights_are_scikit_learns_sample_weights(fast: bool) -> None:
    m, arrays = method(loss="weighted", biases=False, negatives=2, negative_weight=0.3, compiled=fast), model()
    works = m.with_negatives([m.positives(taste(), 7, 12)])
    batch = make_batch(works, arrays[ITEMS], m.centre, fast)
    m.train(batch, 0)
    x, y = arrays[ITEMS][batch.rows].astype(np.float64), np.isin(batch.rows, taste().items).astype(float)
    theirs = Ridge(alpha=m.ridge, fit_intercept=False).fit(x, y, np.where(y > 0, 1, 0.3)).coef_
    np.testing.assert_allclose(batch.vectors[0], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_against_all_items_the_vector_is_that_of_implicit_als(fast: bool, biases: bool) -> None:
    """Written out: argmin of sum_taken c (1 - p)^2 + weight sum_all p^2 + ridge |v|^2, c less for what is older."""
    settings = {"others": "all", "rebuild_weight": 0.2, "half_life": 3.0, "compiled": fast, "biases": biases}
    m, items = method(loss="weighted", **settings), model(2)[ITEMS]
    recent = Taste(taste(9).items[::-1].copy(), np.ones(9, np.float32))  # in the order of time
    batch = make_batch(m.with_negatives([m.all_support(recent, 3)]), items, m.centre, fast)
    m.train(batch, 0)
    x = items.astype(np.float64)
    c = 2.0 ** (-np.arange(8, -1, -1) / 3)

    def loss(v: np.ndarray) -> float:
        p = v[0] + x[:, 0] + x[:, 1:] @ v[1:] if biases else x @ v
        penalty = m.ridge * v[1:] @ v[1:] + (m.ridge_bias if biases else m.ridge) * v[0] ** 2
        return float(c @ (1 - p[recent.items]) ** 2 + 0.2 * p @ p + penalty)

    np.testing.assert_allclose(batch.vectors[0], minimize(loss, np.zeros(D), tol=1e-12).x, atol=1e-4)


def test_against_all_items_everybody_answers_as_alone_and_needs_the_whole_matrix() -> None:
    m, tastes = method(loss="weighted", others="all"), {f"u{k}": taste(4 + k, k) for k in range(3)}
    together = LocalFleet(m, tastes).ask({c: Request("train", arrays, CONFIG) for arrays in [model()] for c in tastes})
    apart = LocalFleet(m, tastes).ask({c: Request("train", model(), CONFIG) for c in tastes})
    for client, reply in together.replies.items():
        np.testing.assert_array_equal(reply.arrays[ITEMS], apart.replies[client].arrays[ITEMS])
    rows = m(Request("rows", {}, CONFIG), Site("u0", tastes["u0"])).extras[ITEMS]
    with pytest.raises(ValueError, match="others=all needs the whole item matrix, but only some rows were sent"):
        m(Request("train", {ITEMS: model()[ITEMS][rows], ITEMS + ROWS: rows}, CONFIG), Site("u0", tastes["u0"]))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"half_life": 3.0}, "half_life: it is for implicit feedback by loss=weighted, not for loss=squared"),
        ({"loss": "bpr", "others": "all"}, "others: it is for implicit feedback by loss=weighted, not for loss=bpr"),
        ({"loss": "weighted", "others": "all", "rebuild": "sgd"}, "others=all solves for the vectors"),
    ],
)
def test_what_no_loss_heeds_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        method(**wrong)


@given(
    seed=st.integers(0, 10**6),
    epochs=st.integers(0, 3),
    biases=st.booleans(),
    mu=st.sampled_from([0.0, 0.7]),
    ridge=st.sampled_from([0.2, 2.0]),
)
def test_compiled_and_plain_ranking_agree(seed: int, epochs: int, biases: bool, mu: float, ridge: float) -> None:
    tastes = [taste(n, seed + n) for n in (2, 5, 13, 30, 39)]
    for rebuild in ("ridge", "sgd"):
        found = []
        for fast in (True, False):
            m = method(loss="bpr", biases=biases, rebuild=rebuild, ridge=ridge, compiled=fast, weight_decay=0.1)
            works = m.with_negatives([m.positives(t, seed + k, m.support_size(len(t))) for k, t in enumerate(tastes)])
            batch = make_batch(works, model(seed, 1.0)[ITEMS], m.centre, fast)
            m.train(batch, epochs, mu)
            found.append((batch, m.losses(batch)))
        for name in ("trained", "vectors", "predictions", "support", "partner"):
            one, other = (getattr(batch, name) for batch, _ in found)
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=5e-4, err_msg=name)
        np.testing.assert_allclose(found[0][1], found[1][1], rtol=2e-3, atol=5e-4)


@pytest.mark.parametrize("fast", [True, False])
def test_a_ranked_users_vector_and_loss_are_those_of_its_pairs(fast: bool) -> None:
    """Beside SciPy's minimum of the pairs written out, and the mean over the query's."""
    m, items = method(loss="bpr", negatives=3, compiled=fast), model(3, 1.0)[ITEMS].astype(np.float64)
    (work,) = m.with_negatives([m.positives(taste(9), 5, 4)])
    batch = make_batch([work], items.astype(np.float32), m.centre, fast)
    m.train(batch, 0)
    rows, support = work.rows, work.support
    pairs = [(rows[work.partner[k]], rows[k], support[k]) for k in range(len(rows)) if work.partner[k] >= 0]
    assert {i for i, _, _ in pairs} == set(taste(9).items.tolist())
    assert len(pairs) == 27

    def margin(v: np.ndarray, i: int, j: int) -> float:
        return float(items[i, 0] - items[j, 0] + (items[i, 1:] - items[j, 1:]) @ v)

    def loss(v: np.ndarray) -> float:
        return sum(np.logaddexp(0, -margin(v, i, j)) for i, j, known in pairs if known) + 0.5 * m.ridge * v @ v

    best = minimize(loss, np.zeros(D - 1), tol=1e-10).x
    np.testing.assert_allclose(batch.vectors[0], [0, *best], atol=1e-3)
    asked = np.mean([np.logaddexp(0, -margin(best, i, j)) for i, j, known in pairs if not known])
    assert m.losses(batch) == pytest.approx([asked], rel=1e-3)


def test_bpr_vectors_are_the_likeliest() -> None:
    draw = np.random.default_rng(0)
    gap, bias = draw.normal(0, 1, (30, 4)), draw.normal(0, 1, 30)
    settings = SolverSettings(biases=False, ridge=0.7, ridge_bias=0, passes=0, rebuild_lr=0, lr=0.1, decay=0)

    def loss(v: np.ndarray) -> float:
        return float(np.logaddexp(0, -(bias + gap @ v)).sum() + 0.5 * settings.ridge * v @ v)

    best = minimize(loss, np.zeros(4), tol=1e-12).x
    np.testing.assert_allclose(rebuild_vector(settings, gap, bias), best, atol=1e-3)
    by_descent = rebuild_vector(dataclasses.replace(settings, passes=3000, rebuild_lr=1.0), gap, bias)
    np.testing.assert_allclose(by_descent, best, atol=1e-3)


def test_bpr_items_move_down_the_gradient() -> None:
    draw = np.random.default_rng(0)
    x, step = draw.normal(0, 1, (6, 3)), draw.normal(0, 1, 3)
    pairs = np.array([[0, 1, 1], [3, 4, 5]])
    settings = SolverSettings(biases=False, ridge=1, ridge_bias=0, passes=0, rebuild_lr=0, lr=0.01, decay=0)

    def loss(flat: np.ndarray) -> float:
        p = flat.reshape(6, 3) @ step
        return float(np.logaddexp(0, p[pairs[1]] - p[pairs[0]]).sum())

    moved = train_pairs(settings, x, step, pairs, 1, 0.0)
    slope = (x - moved).ravel() / settings.lr
    assert check_grad(loss, lambda flat: slope, x.ravel()) < 1e-5
    np.testing.assert_array_equal(moved[2], x[2])
