"""FMF, FCF, PFedRec and FedRAP against their authors' formulas, computed by torch's autograd on the same batches."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Run
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS
from mutirao.systems.recsys.partially_local.base import Examples, Method, RoundSettings, batches, with_negatives
from mutirao.systems.recsys.partially_local.client import (
    PREFIX,
    EvaluatedTaste,
    PartiallyLocal,
    evaluate_users,
    rank_metrics,
)
from mutirao.systems.recsys.partially_local.fcf import FCF
from mutirao.systems.recsys.partially_local.fedrap import FedRAP
from mutirao.systems.recsys.partially_local.fmf import FMF
from mutirao.systems.recsys.partially_local.pfedrec import PFedRec
from mutirao.systems.recsys.ratings import Taste

M, D, EPOCHS, SIZE = 12, 4, 2, 7
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(M, D))
TAKEN = np.array([1, 4, 5, 9], np.int32)
WORK = with_negatives(TAKEN, M, 3, np.random.default_rng(1))
STEPS = RoundSettings(M, EPOCHS, factor=0.5, round=3)


def tensor(value: npt.ArrayLike) -> Tensor:
    return torch.tensor(np.asarray(value, np.float64), requires_grad=True)


def rounds() -> Any:
    """The batches that a method sees: the same draw gives the same ones."""
    for at, y in batches(WORK, SIZE, EPOCHS, np.random.default_rng(2)):
        yield torch.from_numpy(WORK.rows[at].astype(np.int64)), torch.from_numpy(y)


def trained(method: Method, own: Arrays) -> tuple[npt.NDArray[np.float64], Arrays, float]:
    done = method.train(X[WORK.rows], own, WORK, STEPS, np.random.default_rng(2))
    whole = X.copy()
    whole[WORK.rows] = done.x
    return whole, done.personal, done.loss


def layer_of(own: Arrays) -> tuple[Tensor, Tensor]:
    return tensor(own["weights"]), tensor(own["bias"])


def test_pfedrec_moves_the_score_function_and_then_the_items_by_their_rate() -> None:
    method = PFedRec(lr=0.1, eta=0.7, decay=0.01, batch_size=SIZE)
    own = method.initial_personal(M, D, np.random.default_rng(3))
    x, (w, b), losses = tensor(X), layer_of(own), []
    for items, y in rounds():
        loss = functional.binary_cross_entropy(torch.sigmoid(x[items] @ w + b), y)
        slopes = torch.autograd.grad(loss, [w, b])
        w, b = (tensor(v.detach() - 0.05 * (g + 0.01 * v.detach())) for v, g in zip((w, b), slopes, strict=True))
        loss = functional.binary_cross_entropy(torch.sigmoid(x[items] @ w + b), y)
        (g,) = torch.autograd.grad(loss, [x])
        held = torch.zeros(M, 1, dtype=torch.float64)
        held[items] = 0.01
        x = tensor(x.detach() - 0.05 * 0.7 * M * (g + held * x.detach()))
        losses.append((float(loss.detach()), len(y)))
    found, kept, loss_ = trained(method, own)
    np.testing.assert_allclose(found, x.detach(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(kept["weights"], w.detach(), rtol=1e-6)
    np.testing.assert_allclose(kept["bias"], b.detach(), rtol=1e-6)
    assert loss_ == pytest.approx(np.average([v for v, _ in losses], weights=[n for _, n in losses]))
    np.testing.assert_allclose(
        method.score(X, own, Taste(TAKEN, TAKEN.astype(np.float32))), X @ own["weights"] + own["bias"][0]
    )


def test_fedrap_moves_the_sum_of_the_common_and_the_own_part_with_two_regularisers() -> None:
    method = FedRAP(lr=0.2, item_lr=1.5, decay=0.03, apart=0.4, sparse=0.6, fade=0.9, batch_size=SIZE)
    own = method.initial_personal(M, D, np.random.default_rng(3))
    before = np.random.default_rng(4).normal(size=(M, D))
    own |= {"rows": np.arange(M, dtype=np.int32), "values": before.astype(np.float32)}
    x, d, (w, b), rate, grown = tensor(X), tensor(own["values"]), layer_of(own), 0.5, math.tanh(3 / 10)
    for items, y in rounds():
        c, mine = x[items], d[items]
        loss = functional.binary_cross_entropy(torch.sigmoid((c + mine) @ w + b), y)
        loss = (
            loss - grown * 0.4 * functional.mse_loss(mine, c) + grown * 0.6 * functional.l1_loss(c, torch.zeros_like(c))
        )
        slopes = torch.autograd.grad(loss, [w, b, x, d])
        held = torch.zeros(M, 1, dtype=torch.float64)
        held[items] = 0.03
        one = torch.tensor(0.03)
        w, b, x, d = (
            tensor(v.detach() - rate * lr * (g + h * v.detach()))
            for v, g, lr, h in zip((w, b, x, d), slopes, (0.2, 0.2, 1.5, 1.5), (one, one, held, held), strict=True)
        )
        rate *= 0.9
    found, kept, _ = trained(method, own)
    np.testing.assert_allclose(found, x.detach(), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(kept["values"], d.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(kept["weights"], w.detach(), rtol=1e-5)
    scores = method.score(X, kept, Taste(TAKEN, TAKEN.astype(np.float32)))
    np.testing.assert_allclose(scores, (X + kept["values"]) @ kept["weights"] + kept["bias"][0], rtol=1e-6)


def test_fedrap_keeps_what_it_worked_on_and_nothing_else() -> None:
    method = FedRAP(lr=0.1, item_lr=1.0)
    own = method.initial_personal(M, D, np.random.default_rng(3))
    few = Examples(np.array([2, 6], np.int32), np.array([0, 1, 1]), np.array([1.0, 0.0, 0.0]))
    first = method.train(X[[2, 6]], own, few, STEPS, np.random.default_rng(0)).personal
    assert first["rows"].tolist() == [2, 6]
    other = Examples(np.array([0, 6], np.int32), np.array([0, 1]), np.array([1.0, 0.0]))
    second = method.train(X[[0, 6]], first, other, STEPS, np.random.default_rng(0)).personal
    assert second["rows"].tolist() == [0, 2, 6]
    assert np.array_equal(second["values"][1], first["values"][0])
    assert not np.array_equal(second["values"][2], first["values"][1])


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_fmf_moves_user_and_items_at_once(loss: Any, biases: bool) -> None:
    method = FMF(lr=0.3, item_lr=0.2, decay=0.05, batch_size=SIZE, loss=loss, biases=biases)
    own = {"vector": np.random.default_rng(5).normal(size=D).astype(np.float32)}
    x, v = tensor(X), tensor(own["vector"])
    first = int(biases)
    for items, y in rounds():
        p = x[items][:, first:] @ v[first:] + x[items][:, :first].sum(1) + v[:first].sum()
        each = (
            functional.binary_cross_entropy_with_logits(p, y, reduction="sum")
            if loss == "logistic"
            else (0.5 * ((y - p) ** 2).sum())
        )
        (du,) = torch.autograd.grad(each / len(y), [v], retain_graph=True)
        (dx,) = torch.autograd.grad(each, [x])
        held = torch.zeros(M, 1, dtype=torch.float64)
        held[items] = 0.05
        v, x = tensor(v.detach() - 0.15 * (du + 0.05 * v.detach())), tensor(x.detach() - 0.1 * (dx + held * x.detach()))
    found, kept, _ = trained(method, own)
    np.testing.assert_allclose(found, x.detach(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(kept["vector"], v.detach(), rtol=1e-5, atol=1e-7)
    scores = method.score(X, own, Taste(TAKEN, TAKEN.astype(np.float32)))
    u = own["vector"].astype(np.float64)
    np.testing.assert_allclose(scores, X[:, first:] @ u[first:] + X[:, :first].sum(1) + u[:first].sum())


def test_fcf_solves_for_the_user_and_steps_down_the_slope_of_all_items() -> None:
    method = FCF(alpha=3.0, ridge=0.7, item_lr=0.2, decay=0.1)
    p = torch.zeros(M, dtype=torch.float64)
    p[TAKEN.astype(np.int64)] = 1
    c, x = 1 + 3.0 * p, tensor(X)
    for _ in range(EPOCHS):
        v = tensor(method.vector(x.detach().numpy(), TAKEN))
        cost = (c * (p - x @ v) ** 2).sum() + 0.7 * (v @ v) + 0.1 * (x**2).sum()
        at_v, dx = torch.autograd.grad(cost, [v, x])
        np.testing.assert_allclose(at_v, np.zeros(D), atol=1e-9)  # it is the least of all
        x = tensor(x.detach() - 0.1 * dx)
    every = Examples(np.arange(M, dtype=np.int32), TAKEN.astype(np.int64), np.ones(4))
    done = method.train(X, {}, every, STEPS, np.random.default_rng(0))
    np.testing.assert_allclose(done.x, x.detach(), rtol=1e-9, atol=1e-12)
    assert done.personal == {}


@given(st.sets(st.integers(0, 29), min_size=1, max_size=25), st.sets(st.integers(0, 29), max_size=4), st.integers(1, 5))
def test_others_are_drawn_from_what_is_neither_taken_nor_avoided(taken: set[int], avoid: set[int], times: int) -> None:
    work = with_negatives(np.array(sorted(taken), np.int32), 30, times, np.random.default_rng(0), sorted(avoid))
    rows = work.rows[work.at]
    assert set(rows[work.y > 0].tolist()) == taken
    assert not set(rows[work.y == 0].tolist()) & (taken | avoid)
    assert (work.y == 0).sum() == times * len(taken)
    assert (np.diff(work.rows) > 0).all()


def test_others_are_drawn_evenly() -> None:
    work = with_negatives(np.array([0, 3], np.int32), 6, 20_000, np.random.default_rng(0))
    counts = np.bincount(work.rows[work.at[work.y == 0]], minlength=6)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert np.abs(counts[[1, 2, 4, 5]] / 40_000 - 0.25).max() < 0.01


METHODS = [FMF(), FCF(), PFedRec(eta=0.5), FedRAP(item_lr=2.0), PFedRec(eta=0.5, spare=True), PFedRec(tune=False)]


def users(method: Method) -> PartiallyLocal:
    return PartiallyLocal(method, M, D, negatives=2)


def evaluated() -> EvaluatedTaste:
    one = np.ones(1, np.float32)
    return EvaluatedTaste(TAKEN, np.ones(4, np.float32), np.array([7]), one, TAKEN, np.array([0, 2, 3]))


def asked(handler: PartiallyLocal, do: str = "train", round: int = 1, **told: Any) -> Request:
    return Request(do, {ITEMS: handler.initial(0)[ITEMS]}, {"seed": 0, "round": round, **told})


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_reply_holds_rows_and_a_loss_and_the_rest_stays(method: Method) -> None:
    handler, site = users(method), Site("ana", evaluated())
    reply = handler(asked(handler), site)
    assert set(reply.arrays) == {ITEMS, ITEM_ROWS}
    assert reply.arrays[ITEMS].shape == (len(reply.arrays[ITEM_ROWS]), D)
    assert (reply.extras, set(reply.metrics), reply.n) == ({}, {"loss"}, 1)
    assert all(name.startswith(PREFIX) for name in site.state)
    assert bool(site.state) == method.keeps_personal
    rows = handler(asked(handler, "rows"), Site("ana", site.data)).extras[ITEMS]
    assert np.array_equal(rows, reply.arrays[ITEM_ROWS])


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_slice_trains_as_the_whole_matrix_does_and_the_state_goes_on(method: Method) -> None:
    handler, sites = users(method), (Site("ana", evaluated()), Site("ana", evaluated()))
    for round in (1, 2):
        request = asked(handler, round=round)
        rows = handler(asked(handler, "rows", round), sites[0]).extras[ITEMS]
        cut = Request("train", {ITEMS: request.arrays[ITEMS][rows], ITEM_ROWS: rows}, request.config)
        one, two = handler(request, sites[0]), handler(cut, sites[1])
        assert np.array_equal(one.arrays[ITEMS], two.arrays[ITEMS])
    if method.keeps_personal:
        fresh = handler(asked(handler, round=2), Site("ana", evaluated()))
        assert not np.array_equal(one.arrays[ITEMS], fresh.arrays[ITEMS])


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_evaluation_leaves_no_trace_and_tells_how_high_its_item_came(method: Method) -> None:
    handler, site = users(method), Site("ana", evaluated())
    for trains in (False, True):
        if trains:
            handler(asked(handler), site)
        kept = {k: v.copy() for k, v in site.state.items()}
        reply = handler(asked(handler, "evaluate"), site)
        assert reply.arrays == reply.extras == {}
        assert kept.keys() == site.state.keys()
        assert all(np.array_equal(kept[k], site.state[k]) for k in kept)
        assert {"hr@10", "sampled_ndcg@5", "mrr@20"} <= reply.metrics.keys()


def test_an_item_ranks_among_what_is_not_hidden_and_among_candidates() -> None:
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    rest = {"targets": np.array([3]), "hidden": np.array([0, 1]), "candidates": np.array([4, 5])}
    taste = EvaluatedTaste(np.array([0, 1], np.int32), np.ones(2, np.float32), **rest)
    found = rank_metrics(scores, taste)
    assert found["mrr@5"] == pytest.approx(1 / 2)  # item 2 alone is above it
    assert found["sampled_mrr@5"] == 1


def test_explicit_ratings_are_evaluated_on_their_scale() -> None:
    handler = PartiallyLocal(FMF(loss="squared", lr=0.5, item_lr=0.1), M, D, levels=(1.0, 5.0))
    values = np.array([5, 5, 1, 1], np.float32)
    site = Site("ana", EvaluatedTaste(TAKEN, values, targets=np.array([4, 9]), ratings=np.array([5, 1], np.float32)))
    reply = handler(asked(handler, "evaluate"), site)
    assert set(reply.metrics) == {"rmse", "mae"}
    assert reply.n == 2
    assert reply.metrics["rmse"] <= 4


@pytest.mark.parametrize(
    ("request_", "data", "words"),
    [
        ({"do": "probe"}, None, "can train and evaluate, not 'probe'"),
        ({"mu": 0.1}, None, "not a hyperparameter of this client"),
        ({}, Taste(TAKEN[:0], np.zeros(0, np.float32)), "has no ratings to train on"),
        ({}, {"ratings": 3}, "expected ratings, got dict"),
        ({"do": "evaluate"}, Taste(TAKEN, np.ones(4, np.float32)), "has nothing to evaluate on"),
    ],
)
def test_what_cannot_be_answered_is_said(request_: dict[str, Any], data: Any, words: str) -> None:
    handler = users(FMF())
    with pytest.raises(Exception, match=words):
        handler(asked(handler, **request_), Site("ana", evaluated() if data is None else data))


def test_a_user_who_took_everything_is_its_own_failure_alone() -> None:
    handler = users(FMF())
    every = Taste(np.arange(M, dtype=np.int32), np.ones(M, np.float32))
    requests = dict.fromkeys(("ana", "bia"), asked(handler))
    out = handler.many(requests, {"ana": Site("ana", evaluated()), "bia": Site("bia", every)})
    assert set(out["ana"].arrays) == {ITEMS, ITEM_ROWS}
    assert "has taken all 12 items" in out["bia"].reason


@pytest.mark.parametrize(
    "made",
    [
        lambda: FMF(lr=0.0),
        lambda: PFedRec(eta=-1.0),
        lambda: FedRAP(fade=0.0),
        lambda: FCF(ridge=0.0),
        lambda: FedRAP(sparse=-1.0),
    ],
)
def test_settings_out_of_range_are_refused(made: Any) -> None:
    with pytest.raises(ValueError, match="but must be"):
        made()


def test_no_item_taken_is_drawn_as_one_that_was_not_even_if_a_round_leaves_it_out() -> None:
    handler = PartiallyLocal(FMF(spare=True), M, D, negatives=30, samples=2)
    request = asked(handler)
    work = handler.examples(evaluated(), request, "ana")
    others = set(work.rows[work.at[work.y == 0]].tolist())
    assert (work.y > 0).sum() == 2
    assert not others & {*TAKEN.tolist(), 7}
    assert others == set(range(M)) - {*TAKEN.tolist(), 7}


def test_a_user_that_boasts_is_not_counted() -> None:
    handler = users(FMF())
    honest = Site("ana", evaluated())

    def boast(request: Request, site: Site) -> Reply:
        reply = handler(request, site)
        return replace(reply, metrics=dict.fromkeys(reply.metrics, 1e9), n=10**6) if site.id == "bia" else reply

    fleet = LocalFleet(boast, {"ana": evaluated(), "bia": evaluated()})
    run = Run(handler.initial(0))
    alone = handler(Request("evaluate", run.arrays, {"seed": 0, "round": 0}), honest).metrics
    assert evaluate_users(fleet, run, ("hr@10", "mrr@20")) == {k: alone[k] for k in ("hr@10", "mrr@20")}
