"""One update gives the ratings away: a server that reads it states all of them, whatever the settings but noise."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.core.fleet import Request, Site
from mutirao.core.sparse_rows import to_dense
from mutirao.privacy.central_noise import clip_update
from mutirao.randomness import rng
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon
from mutirao.systems.recsys.rating_attack import (
    Attacker,
    Reading,
    average_exposures,
    measure_exposure,
    rating_prior,
    read_sum,
)
from mutirao.systems.recsys.ratings import Users, plant

RATINGS = plant(200, 250, rng(0, 0, "attacked"))
USERS = Users(RATINGS)
LEVELS = np.arange(1.0, 6.0)
PRIOR = rating_prior(RATINGS.of_users(np.arange(100, 200)), LEVELS)  # of people who are not attacked


def method_of(**settings: Any) -> FedRecon:
    return FedRecon(items=250, dimension=50, **settings)


def model_of(method: FedRecon) -> dict[str, np.ndarray]:
    """Items as after some training: biases are not 0."""
    draw = np.random.default_rng(3)
    return {ITEMS: draw.normal(0, 0.2, (250, method.dimension)).astype(np.float32)}


def ask(method: FedRecon, user: str, do: str = "train", **hyperparameters: float) -> Any:
    config = {"seed": 5, "round": 2, **hyperparameters}
    return method(Request(do, model_of(method) if do == "train" else {}, config), Site(user, USERS[user]))


def truth_of(method: FedRecon, user: str) -> dict[int, float]:
    work = method.with_negatives([method.examples(USERS[user], user, 5, 2)])[0]
    return dict(zip(work.rows.tolist(), work.y.tolist(), strict=True))


def test_todays_way_gives_all_ratings_and_all_items() -> None:
    """The default: biases, one epoch, and rows a user asked for. Of small users the support is read as well."""
    method, supports, found = method_of(), 0, []
    attacker = Attacker(method, prior=PRIOR.shares)
    for user in list(USERS)[:30]:
        asked = ask(method, user, "rows").extras[ITEMS]
        reading = attacker(model_of(method), ask(method, user).arrays, asked)
        truth = truth_of(method, user)
        query = {i: truth[i] for i in reading.rows.tolist()}
        found.append(measure_exposure(query, list(query), reading.ratings(), reading.rows.tolist(), PRIOR, LEVELS))
        assert set(asked.tolist()) == set(USERS[user].items.tolist())
        if reading.support is not None:
            supports += 1
            assert reading.ratings() == truth, "then every rating of the user is read, of the support as well"
    all_of_them = average_exposures(found)
    assert (all_of_them.read, all_of_them.precision, all_of_them.recall) == (1.0, 1.0, 1.0)
    assert all_of_them.guessed < 0.5
    assert supports > 20


@pytest.mark.parametrize(
    ("settings", "hyperparameters"),
    [
        ({"biases": False}, {}),
        ({"epochs": 4}, {}),
        ({"epochs": 3, "weight_decay": 0.05}, {"mu": 0.2}),
        ({"epochs": 3, "biases": False}, {}),
        ({"loss": "weighted"}, {}),
        ({"loss": "weighted", "negative_weight": 0.3, "negatives": 3}, {}),
        ({"loss": "weighted", "biases": False}, {}),
        ({"loss": "bpr"}, {}),
        ({"loss": "bpr", "biases": False, "negatives": 3}, {}),
    ],
)
def test_other_settings_give_no_less(settings: dict[str, Any], hyperparameters: dict[str, float]) -> None:
    method = method_of(**{"ridge": 1.0 if "loss" in settings else 10.0, **settings})
    attacker = Attacker(method, mu=hyperparameters.get("mu", 0.0), prior=None if method.implicit else PRIOR.shares)
    for user in list(USERS)[:4]:
        asked = ask(method, user, "rows").extras[ITEMS]
        reading = attacker(model_of(method), ask(method, user, **hyperparameters).arrays, asked)
        assert reading.is_sure
        truth = truth_of(method, user)
        assert reading.ratings() == {i: truth[i] for i in reading.ratings()}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), lr=st.floats(0.01, 1.0), bias=st.floats(-1.0, 1.0))
def test_an_update_written_out_by_hand_is_read(seed: int, lr: float, bias: float) -> None:
    """x_i + lr e_i (1, v), by the formula and nothing of ours."""
    draw = np.random.default_rng(seed)
    items, v = draw.normal(0, 0.3, (40, 8)), draw.normal(0, 0.5, 8)
    v[0] = 1.0
    ratings = np.concatenate([[1.0, 5.0], draw.integers(1, 6, 10)])  # with both ends nothing is ambiguous
    rows = np.sort(draw.choice(40, 12, replace=False)).astype(np.int32)
    errors = ratings - (3.0 + bias + items[rows] @ v)
    moved = items[rows] + lr * errors[:, None] * v
    attacker = Attacker(FedRecon(items=40, dimension=8, lr=lr))
    reading = attacker({ITEMS: items}, {ITEMS: moved, ITEM_ROWS: rows})
    np.testing.assert_allclose(reading.vector[1:], v[1:], rtol=1e-6, atol=1e-7)
    assert reading.values.tolist() == ratings.tolist()


def test_clipping_alone_hides_nothing() -> None:
    method, clip = method_of(), 0.5
    for user in list(USERS)[:6]:
        sent, plain = model_of(method), ask(method, user).arrays
        update, scale = clip_update(sent, to_dense(sent, plain), clip)
        assert scale < 1
        moved = {ITEMS: sent[ITEMS] + update[ITEMS]}
        reading = Attacker(method, clip=clip, prior=PRIOR.shares)(sent, moved)
        truth = truth_of(method, user)
        assert reading.is_sure
        assert set(reading.rows.tolist()) == set(plain[ITEM_ROWS].tolist())
        right = np.mean([truth[i] == v for i, v in reading.ratings().items()])
        assert right > 0.9 or len(set(reading.values)) < 4, "of a user with few kinds of ratings the bias is a guess"


@pytest.mark.parametrize("noise", [0.02, 1.0])
def test_noise_hides_by_its_size(noise: float) -> None:
    method = method_of()
    attacker = Attacker(method, noise=noise, prior=PRIOR.shares, popularity=PRIOR.popularity)
    found = []
    for user in list(USERS)[:20]:
        sent, plain = model_of(method), ask(method, user).arrays
        full = to_dense(sent, plain)[ITEMS] + np.random.default_rng(int(user)).normal(0, noise, (250, 50))
        reading: Reading = attacker(sent, {ITEMS: full})
        truth = truth_of(method, user)
        query = {i: truth[i] for i in plain[ITEM_ROWS].tolist()}
        found.append(measure_exposure(query, list(query), reading.ratings(), list(query), PRIOR, LEVELS))
    together = average_exposures(found)
    if noise == 0.02:
        assert together.read > together.usual + 0.15
    else:
        assert abs(together.read - together.usual) < 0.03, "what people rate in general is all that is known"


def test_rows_that_one_user_alone_touched_are_read_in_a_sum() -> None:
    method = method_of()
    sent, total, truth = model_of(method), np.zeros((250, 50)), dict[int, list[float]]()
    for user in list(USERS)[:4]:
        reply, mine = ask(method, user).arrays, truth_of(method, user)
        rows = reply[ITEM_ROWS]
        total[rows] += reply[ITEMS].astype(np.float64) - sent[ITEMS][rows]
        for item in rows.tolist():
            truth.setdefault(item, []).append(mine[item])
    alone = {i for i, values in truth.items() if len(values) == 1}
    read = {i for reading in read_sum(Attacker(method, prior=PRIOR.shares), sent, total) for i in reading.rows.tolist()}
    assert read <= alone
    assert len(read) > 0.9 * len(alone)
    noised = total + np.random.default_rng(0).normal(0, 1.0, total.shape)
    assert not read_sum(Attacker(method, prior=PRIOR.shares), sent, noised)
