"""FedRisk's forms, signs and memories against the formulas written out, and against clients that send nonsense."""

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.aggregation import NAMES, FedRisk
from mutirao.config import Part, build, complete_part, resolve
from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Group, Patience, Run, step
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import find
from mutirao.risk import geo_risk, ideal_risk
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet

DRAW = np.random.default_rng(0)
CURRENT: Arrays = {"w": DRAW.normal(size=(3, 2)), "n": np.array(4, np.int64)}
ERRORS = np.array([[0, 1, 0, 4], [1, 9, 16, 4], [0, 0, 1, 0]], np.uint8)


def replies(errors: np.ndarray = ERRORS) -> dict[str, Reply]:
    return {
        f"c{k}": Reply(
            {"w": CURRENT["w"] + k + 1, "n": np.array(4 + k, np.int64)},
            {"squared_errors": row, "batch_sizes": np.array([len(row)], np.int32)},
            n=10 * (k + 1),
        )
        for k, row in enumerate(errors)
    }


RISK = float(ideal_risk(ERRORS)) - geo_risk(ERRORS, 2.0)


def test_the_published_sign_raises_the_weight_of_clients_with_large_errors() -> None:
    merged = FedRisk()(CURRENT, replies(), {})
    assert [merged.figures[f"c{k}"]["risk"] for k in range(3)] == pytest.approx(RISK.tolist(), abs=1e-12)
    assert merged.weights["c1"] > merged.weights["c0"] > merged.weights["c2"]
    described = FedRisk(sign="described")(CURRENT, replies(), {})
    assert described.weights["c1"] < described.weights["c0"] < described.weights["c2"]


def test_the_forms_are_the_formulas() -> None:
    x, models = CURRENT["w"], [CURRENT["w"] + k + 1 for k in range(3)]
    trust = 1 - RISK
    updates = 0.7 * x + 0.5 * sum(t * (m - x) for t, m in zip(trust, models, strict=True)) / 3
    parameters = 0.7 * x + 0.5 * sum(t * m for t, m in zip(trust, models, strict=True)) / 3
    normalised = (0.7 * x + 0.5 * sum(t * m for t, m in zip(trust, models, strict=True)) / trust.sum()) / 1.2
    for form, expected in (("updates", updates), ("parameters", parameters), ("normalised", normalised)):
        merged = FedRisk(alpha=0.5, beta=0.7, form=form)(CURRENT, replies(), {})  # type: ignore[arg-type]
        np.testing.assert_allclose(merged.arrays["w"], expected, rtol=1e-12)
        assert merged.arrays["n"].dtype == np.int64
        assert merged.arrays["n"] == 5  # the plain mean: a counter has no risk


def test_momentum_gathers_the_weighted_updates() -> None:
    memory: Arrays = {}
    part = FedRisk(memory="momentum")
    d = sum(t * (k + 1) for k, t in enumerate(1 - RISK)) / 3
    first = part(CURRENT, replies(), memory).arrays["w"]
    np.testing.assert_allclose(first, CURRENT["w"] + d, rtol=1e-12)
    second = part(CURRENT, replies(), memory).arrays["w"]
    np.testing.assert_allclose(second, CURRENT["w"] + 1.9 * d, rtol=1e-12)
    assert set(memory) == {"fedrisk.v.w"}


def test_the_order_of_replies_changes_no_bit() -> None:
    forward = FedRisk()(CURRENT, replies(), {}).arrays
    backward = FedRisk()(CURRENT, dict(reversed(replies().items())), {}).arrays
    assert digest(forward) == digest(backward)


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"squared_errors": np.zeros(4, np.uint8)},
        {"squared_errors": np.zeros(4, np.uint8), "batch_sizes": np.array([5], np.int32)},
        {"squared_errors": np.zeros(4, np.uint8), "batch_sizes": np.array([-1, 5], np.int32)},
        {"squared_errors": np.zeros(4, np.float32), "batch_sizes": np.array([4], np.int32)},
        {"squared_errors": np.zeros((2, 2), np.uint8), "batch_sizes": np.array([4], np.int32)},
        {"squared_errors": np.zeros(0, np.uint8), "batch_sizes": np.array([2**31 - 1], np.int32)},
    ],
)
def test_nonsense_from_a_client_leaves_it_without_risk(extras: Arrays) -> None:
    odd = replies()
    odd["c1"] = Reply(odd["c1"].arrays, extras, n=20)
    merged = FedRisk()(CURRENT, odd, {})
    assert merged.figures["c1"]["risk"] == 0.0
    assert all(math.isfinite(w) for w in merged.weights.values())


LIE = {"squared_errors": np.full(4, 255, np.uint8), "batch_sizes": np.array([4], np.int32)}


def with_liar(errors: int, honest: int = 9) -> dict[str, Reply]:
    """Nine clients that are wrong by a grade now and then, and one that tells an error everywhere."""
    draw = np.random.default_rng(1)
    told = [*draw.binomial(1, 0.3, (honest, 40)), np.full(40, errors)]
    return replies(np.array(told, np.uint8))


def test_errors_that_no_grade_can_have_made_a_liar_the_model_and_are_now_not_believed() -> None:
    liar = "c9"
    lied = FedRisk(clamp=False)(CURRENT, with_liar(255), {}).weights
    assert lied[liar] > 0.89  # as it was: the liar is nine tenths of the model, and the others pull backwards
    assert sum(w < 0 for c, w in lied.items() if c != liar) == 9
    graded = FedRisk(classes=5)
    assert graded.largest == 16
    told = graded.fault(with_liar(255)[liar])
    assert told is not None
    assert str(told) == "too_large: sent a squared error of 255; between 5 classes at most 16 is possible"
    merged = graded(CURRENT, with_liar(255), {})  # without a round to refuse it, it counts as having told nothing
    assert merged.weights[liar] == pytest.approx(0.1)
    assert min(merged.weights.values()) > 0.05


def test_a_liar_with_the_largest_errors_there_can_be_still_weighs_as_much_as_several() -> None:
    shares = FedRisk(classes=5)(CURRENT, with_liar(16), {}).weights
    others = [w for c, w in shares.items() if c != "c9"]
    assert shares["c9"] / np.median(others) > 3  # it is no defence
    assert shares["c9"] <= (1 + 4) / 10  # 1 + GeoRisk at most, which is sqrt(16)
    assert min(others) >= 0


def test_a_round_refuses_who_tells_impossible_errors_and_goes_on() -> None:
    def handler(request: Request, site: Site) -> Reply:
        reply = replies()["c0"]
        extras = LIE if site.id == "liar" else reply.extras
        return Reply({"w": request.arrays["w"] + 1.0, "n": request.arrays["n"]}, extras, n=4)

    run, fleet = Run(CURRENT), LocalFleet(handler, dict.fromkeys(["ana", "bia", "liar"]))
    done = step(run, fleet, [Group(everyone, FedRisk(classes=5))], patience=Patience(wait=0.0))
    assert [row["failure"].partition(":")[0] for row in done.clients] == ["", "", "too_large"]
    assert run.round == 1


@pytest.mark.parametrize("form", ["updates", "parameters", "normalised"])
@pytest.mark.parametrize("sign", ["published", "described"])
@given(seed=st.integers(0, 2**32 - 1), liars=st.integers(0, 3), aversion=st.floats(0, 9))
def test_no_share_is_below_zero_whatever_is_told(
    form: Literal["updates", "parameters", "normalised"],
    sign: Literal["published", "described"],
    seed: int,
    liars: int,
    aversion: float,
) -> None:
    errors = np.random.default_rng(seed).integers(0, 17, (6, 12)).astype(np.uint8)
    errors[:liars] = 255
    shares = FedRisk(form=form, sign=sign, aversion=aversion)(CURRENT, replies(errors), {}).weights
    assert min(shares.values()) >= 0
    if form == "normalised":
        assert sum(shares.values()) == pytest.approx(1.0)


def test_the_clamp_changes_nothing_where_no_share_was_below_zero() -> None:
    for form in ("updates", "normalised"):
        clamped, free = (FedRisk(form=form, clamp=c)(CURRENT, replies(), {}) for c in (True, False))  # type: ignore[arg-type]
        assert digest(clamped.arrays) == digest(free.arrays)


def test_settings_are_checked() -> None:
    assert NAMES["fedrisk"] is FedRisk
    with pytest.raises(ConfigError, match="'risky' is not one of published, described"):
        complete_part("aggregate", Part("fedrisk", {"sign": "risky"}))
    for settings in ({"alpha": -1.0}, {"alpha": 0.0, "beta": 0.0}, {"memory": "momentum", "form": "parameters"}):
        with pytest.raises(ConfigError, match="fedrisk"):
            build("aggregate", Part("fedrisk", settings))
    huge = np.array([[255, 0, 255], [0, 255, 0]], np.uint8)
    with pytest.raises(MutiraoError, match="sum to 0 or less"):
        FedRisk(form="normalised", sign="described", aversion=9.0, clamp=False)(CURRENT, replies(huge), {})


@pytest.mark.parametrize("form", ["parameters", "normalised"])
def test_a_form_alone_goes_without_the_momentum_that_the_recipe_would_choose(form: str) -> None:
    config = find("ranking").config
    part = resolve(config, {}, [("aggregate.form", form)]).aggregate
    assert (part.settings["form"], part.settings["memory"]) == (form, "previous")
    assert build("aggregate", part) == FedRisk(form=form)  # type: ignore[arg-type]
    assert resolve(config, {}, [("aggregate.beta", 0.5)]).aggregate.settings["memory"] == "momentum"
    both = resolve(config, {}, [("aggregate.form", form), ("aggregate.memory", "momentum")])
    with pytest.raises(ConfigError, match="memory=momentum goes with form=updates only"):
        build("aggregate", both.aggregate)  # who asks for both is told
