"""What must hold for every aggregator, whatever the replies."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mutirao.aggregation import (
    NAMES,
    RFA,
    CenteredClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedOpt,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    Mean,
    MultiKrum,
)
from mutirao.aggregation.fedbuff import FedBuff
from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged, as_aggregator

SHAPES = {"body.weight": (3, 2), "body.bias": (2,), "scale": (), "steps": (), "table": (4,), "mask": (3,)}
KINDS: dict[str, Any] = {
    "body.weight": np.float32,
    "body.bias": np.float64,
    "scale": np.float32,
    "steps": np.int64,
    "table": np.uint8,
    "mask": np.bool_,
}
PARTS = [
    FedAvg(),
    FedAvgM(),
    FedAvgM(lr=0.5, momentum=0.0),
    FedProx(mu=0.9),
    FedOpt(lr=0.3),
    FedAdam(),
    FedYogi(),
    FedAdagrad(),
    FedMedian(),
    FedTrimmedAvg(),
    FedTrimmedAvg(beta=0.45),
    Krum(),
    Krum(malicious=2),
    MultiKrum(malicious=1, keep=3),
    RFA(),
    CenteredClipping(),
    FedBuff(),
    Mean(),
    Mean(lr=0.5, momentum=0.9),
]
# The aggregators that need nothing of the clients but their models.
CLASSIC: dict[str, Any] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedprox": FedProx,
    "fedopt": FedOpt,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "mean": Mean,
    "fedmedian": FedMedian,
    "fedtrimmedavg": FedTrimmedAvg,
    "krum": Krum,
    "multikrum": MultiKrum,
    "rfa": RFA,
    "centeredclipping": CenteredClipping,
}
every_part = pytest.mark.parametrize("part", PARTS, ids=repr)
FAITHFUL = [FedAvg(), FedProx(), FedOpt(), Mean(), FedMedian(), FedTrimmedAvg(), Krum(), MultiKrum(keep=3), RFA()]
CONVEX = [FedAvg(), FedMedian(), FedTrimmedAvg(), FedTrimmedAvg(beta=0.4), Krum(malicious=1), MultiKrum(keep=2), RFA()]


CORNERS = np.array([0.0, -0.0, 1.0, -1.0, 1e-30, 1e3, -1e3, 0.1, 2.5])


def model_of(rng: np.random.Generator) -> Arrays:
    """Numbers of all sizes with corner cases among them; coarse ones, so that clients agree here and there."""
    out = {}
    for name, shape in SHAPES.items():
        if KINDS[name] in (np.float32, np.float64):
            values = np.where(rng.random(shape) < 0.3, rng.choice(CORNERS, shape), rng.normal(size=shape))
        else:
            values = rng.integers(0, 200 if name != "mask" else 2, shape)
        out[name] = np.asarray(values).astype(KINDS[name])
    return out


# Hypothesis draws how many, who and a seed; NumPy fills the arrays, because that is a hundred times quicker.
generators = st.integers(0, 2**32).map(np.random.default_rng)
models = generators.map(model_of)


@st.composite
def fleets(draw: st.DrawFn, least: int = 1, most: int = 7) -> dict[str, Reply]:
    names = draw(st.lists(st.text(min_size=1, max_size=3), min_size=least, max_size=most, unique=True))
    rng = draw(generators)
    few = draw(st.booleans())  # clients that are copies of one another
    kinds = [model_of(rng) for _ in range(2 if few else most)]
    return {
        c: Reply({k: v.copy() for k, v in kinds[rng.integers(len(kinds))].items()}, n=int(rng.integers(1, 10**6)))
        for c in names
    }


def same(a: Merged, b: Merged) -> bool:
    return digest(a.arrays) == digest(b.arrays) and a.weights == b.weights and a.figures == b.figures


def random_replies(rng: np.random.Generator, clients: int = 6) -> dict[str, Reply]:
    return {f"c{i}": Reply(model_of(rng), n=int(rng.integers(1, 100))) for i in range(clients)}


@every_part
@given(current=models, replies=fleets(), data=st.data())
@settings(max_examples=25)
def test_order_of_replies_and_of_names_changes_no_bit(
    part: Any, current: Arrays, replies: dict[str, Reply], data: st.DataObject
) -> None:
    shuffled = {}
    for c in data.draw(st.permutations(list(replies))):
        keys = data.draw(st.permutations(list(current)))
        shuffled[c] = Reply({k: replies[c].arrays[k] for k in keys}, n=replies[c].n)
    one: Arrays = {}
    two: Arrays = {}
    assert same(part(current, replies, one), part(current, shuffled, two))
    assert digest(one) == digest(two)


@every_part
@given(current=models, replies=fleets(), factor=st.integers(2, 1000))
@settings(max_examples=15)
def test_only_the_ratio_of_sample_counts_matters(
    part: Any, current: Arrays, replies: dict[str, Reply], factor: int
) -> None:
    more = {c: dataclasses.replace(r, n=r.n * factor) for c, r in replies.items()}
    assert same(part(current, replies, {}), part(current, more, {}))


@pytest.mark.parametrize("part", [p for p in FAITHFUL if not isinstance(p, FedOpt | Mean)], ids=repr)
@given(current=models, client=models, n=st.integers(1, 10**9))
@settings(max_examples=25)
def test_a_single_client_is_given_back_to_the_bit(part: Any, current: Arrays, client: Arrays, n: int) -> None:
    merged = part(current, {"ana": Reply(client, n=n)}, {})
    assert digest(merged.arrays) == digest(client)
    assert merged.weights == {"ana": 1.0}


@pytest.mark.parametrize("part", FAITHFUL, ids=repr)
@given(current=models, client=models, counts=st.lists(st.integers(1, 10**6), min_size=2, max_size=7))
@settings(max_examples=25)
def test_equal_clients_give_that_client(part: Any, current: Arrays, client: Arrays, counts: list[int]) -> None:
    merged = part(current, {f"c{i}": Reply(client, n=n) for i, n in enumerate(counts)}, {})
    for name, value in client.items():
        # x + (mean - x) may be off by the rounding of the sum, which is of the size of the larger of the two
        scale = max(1e-300, float(np.abs(current[name].astype(float)).max()), float(np.abs(value.astype(float)).max()))
        gap = np.abs(merged.arrays[name].astype(float) - value.astype(float))
        assert gap.max() <= 8 * np.finfo(np.float64).eps * scale


@pytest.mark.parametrize("part", CONVEX, ids=repr)
@given(current=models, replies=fleets(least=2))
@settings(max_examples=25)
def test_the_result_lies_between_the_clients(part: Any, current: Arrays, replies: dict[str, Reply]) -> None:
    merged = part(current, replies, {})
    for name, value in merged.arrays.items():
        all_of = np.stack([r.arrays[name].astype(float) for r in replies.values()])
        slack = 8 * np.finfo(np.float64).eps * np.abs(all_of).max()
        assert (value.astype(float) >= all_of.min(axis=0) - slack).all()
        assert (value.astype(float) <= all_of.max(axis=0) + slack).all()


@every_part
@given(current=models, replies=fleets())
@settings(max_examples=15)
def test_types_shapes_and_names_stay(part: Any, current: Arrays, replies: dict[str, Reply]) -> None:
    memory: Arrays = {}
    for _ in range(2):
        merged = part(current, replies, memory)
        assert list(merged.arrays) == list(current)
        for name, value in merged.arrays.items():
            assert (value.dtype, value.shape) == (current[name].dtype, current[name].shape)
            assert isinstance(value, np.ndarray)
    assert all(isinstance(v, np.ndarray) for v in memory.values())
    assert not any(buffer in key for key in memory for buffer in ("steps", "table", "mask"))


@every_part
@given(current=models, replies=fleets())
@settings(max_examples=15)
def test_weights_are_shares_of_all_clients(part: Any, current: Arrays, replies: dict[str, Reply]) -> None:
    merged = part(current, replies, {})
    assert list(merged.weights) == sorted(replies)
    assert sum(merged.weights.values()) == pytest.approx(1.0)
    assert all(0 <= w <= 1 for w in merged.weights.values())


@every_part
def test_going_on_from_a_copy_of_memory_gives_the_same_bits(part: Any) -> None:
    rng = np.random.default_rng(7)
    rounds = [random_replies(rng) for _ in range(6)]
    current = random_replies(rng)["c0"].arrays
    memory: Arrays = {}
    saved: tuple[Arrays, Arrays] | None = None
    for i, replies in enumerate(rounds):
        if i == 3:
            saved = current, {k: v.copy() for k, v in memory.items()}
        current = part(current, replies, memory).arrays
    assert saved is not None
    again, remembered = saved
    for replies in rounds[3:]:
        again = part(again, replies, remembered).arrays
    assert digest(again) == digest(current)
    assert digest(remembered) == digest(memory)


@every_part
def test_nothing_handed_over_is_changed_in_place(part: Any) -> None:
    rng = np.random.default_rng(8)
    replies, current = random_replies(rng), random_replies(rng)["c0"].arrays
    memory: Arrays = {}
    part(current, replies, memory)
    before = digest(current), {c: digest(r.arrays) for c, r in replies.items()}
    kept = dict(memory)
    bits = digest(kept)
    merged = part(current, replies, memory)
    assert before == (digest(current), {c: digest(r.arrays) for c, r in replies.items()})
    assert digest(kept) == bits, "arrays in memory are replaced, so that a shallow copy is a checkpoint"
    for r in replies.values():
        assert not any(np.shares_memory(merged.arrays[k], r.arrays[k]) for k in current)


def test_memory_lies_under_a_prefix_of_its_own() -> None:
    rng = np.random.default_rng(9)
    replies, current = random_replies(rng), random_replies(rng)["c0"].arrays
    keys = {}
    for name, make in CLASSIC.items():
        memory: Arrays = {}
        make()(current, replies, memory)
        assert all(k.startswith(f"{name}.") for k in memory)
        keys[name] = set(memory)
    floats = {"body.weight", "body.bias", "scale"}
    assert keys.pop("fedadam") == {"fedadam.step"} | {f"fedadam.{x}.{k}" for x in "mv" for k in floats}
    assert keys.pop("fedyogi") == {f"fedyogi.{x}.{k}" for x in "mv" for k in floats}
    assert keys.pop("fedadagrad") == {f"fedadagrad.v.{k}" for k in floats}
    assert keys.pop("fedavgm") == {f"fedavgm.v.{k}" for k in floats}
    assert keys.pop("centeredclipping") == {f"centeredclipping.v.{k}" for k in floats}
    assert set(map(len, keys.values())) == {0}


def test_adams_step_counter_is_an_integer_array() -> None:
    current = {"w": np.zeros(2, np.float32)}
    memory: Arrays = {}
    for t in (1, 2, 3):
        FedAdam()(current, {"ana": Reply({"w": np.ones(2, np.float32)}, n=1)}, memory)
        assert memory["fedadam.step"].dtype == np.int64
        assert memory["fedadam.step"].shape == ()
        assert memory["fedadam.step"] == t


@given(replies=fleets(), beta=st.floats(0, 0.49))
@settings(max_examples=50)
def test_trimmed_mean_is_scipys(replies: dict[str, Reply], beta: float) -> None:
    current = next(iter(replies.values())).arrays
    merged = FedTrimmedAvg(beta)(current, replies, {}).arrays
    for name in ("body.weight", "body.bias", "scale"):
        stack = np.stack([r.arrays[name] for r in replies.values()]).astype(np.float64)
        right = scipy.stats.trim_mean(stack, beta, axis=0)
        tight = 1e-6 if KINDS[name] is np.float32 else 1e-12
        np.testing.assert_allclose(merged[name], right, rtol=tight, atol=tight * 1e3)


@given(replies=fleets())
@settings(max_examples=50)
def test_median_is_numpys_and_integers_are_rounded(replies: dict[str, Reply]) -> None:
    current = next(iter(replies.values())).arrays
    merged = FedMedian()(current, replies, {}).arrays
    for name, value in merged.items():
        right = np.median(np.stack([r.arrays[name] for r in replies.values()]).astype(np.float64), axis=0)
        if value.dtype.kind in "iu":
            right = np.rint(right)
        if value.dtype.kind == "b":
            right = right >= 0.5
        np.testing.assert_array_equal(value, np.asarray(right).astype(value.dtype))


def test_integer_buffers_take_the_rounded_mean_and_are_never_stepped() -> None:
    current = {"w": np.zeros(1, np.float32), "steps": np.array(10, np.int64)}
    replies = {
        "ana": Reply({"w": np.ones(1, np.float32), "steps": np.array(20, np.int64)}, n=3),
        "bia": Reply({"w": np.ones(1, np.float32), "steps": np.array(25, np.int64)}, n=1),
    }
    for part in (FedAvg(), FedAvgM(), FedProx(), FedOpt(lr=5.0), FedAdam(), FedYogi(), FedAdagrad()):
        memory: Arrays = {}
        for _ in range(3):
            assert part(current, replies, memory).arrays["steps"] == 21  # 21.25, rounded
    assert FedMedian()(current, replies, {}).arrays["steps"] == 22  # 22.5, halves to even
    assert FedTrimmedAvg()(current, replies, {}).arrays["steps"] == 22


@pytest.mark.parametrize("part", [FedAvg(), FedAvgM(), FedMedian(), FedTrimmedAvg(), Krum()], ids=repr)
def test_large_integers_that_all_clients_agree_on_survive(part: Any) -> None:
    ids = np.array([2**63 - 1, -(2**63), 2**53 + 1], np.int64)
    current = {"w": np.zeros(1, np.float32), "ids": ids}
    merged = part(current, {c: Reply({"w": np.ones(1, np.float32), "ids": ids.copy()}, n=3) for c in "abc"}, {})
    np.testing.assert_array_equal(merged.arrays["ids"], ids)


def test_weights_say_what_each_client_really_had() -> None:
    current = {"w": np.zeros(1, np.float32)}
    far = {"ana": (0.0, 1), "bia": (0.1, 3), "caio": (0.15, 4), "dora": (9.0, 92)}
    replies = {c: Reply({"w": np.array([x], np.float32)}, n=n) for c, (x, n) in far.items()}
    assert FedAvg()(current, replies, {}).weights == {"ana": 0.01, "bia": 0.03, "caio": 0.04, "dora": 0.92}
    assert FedMedian()(current, replies, {}).weights == dict.fromkeys(replies, 0.25)
    assert FedTrimmedAvg()(current, replies, {}).weights == dict.fromkeys(replies, 0.25)
    assert Krum()(current, replies, {}).weights == {"ana": 0.0, "bia": 1.0, "caio": 0.0, "dora": 0.0}
    merged = MultiKrum(keep=2)(current, replies, {})
    assert merged.weights == {"ana": 0.0, "bia": 0.5, "caio": 0.5, "dora": 0.0}  # whatever n they declare
    assert merged.arrays["w"][0] == pytest.approx((0.1 + 0.15) / 2)
    assert MultiKrum(keep=99)(current, replies, {}).weights == dict.fromkeys(replies, 0.25)


def brute_force_scores(points: np.ndarray, malicious: int) -> list[float]:
    """Krum's score as the paper writes it, in exact steps: every other client, the k - f - 2 nearest of them."""
    out = []
    for i, a in enumerate(points):
        others = sorted(float(((a - b) ** 2).sum()) for j, b in enumerate(points) if j != i)
        out.append(sum(others[: max(1, len(points) - malicious - 2)]))
    return out


@given(hnp.arrays(np.float64, st.tuples(st.integers(2, 8), st.just(3)), elements=st.integers(-9, 9)), st.integers(0, 3))
@settings(max_examples=50)
def test_krum_is_the_papers_with_ties_broken_by_name(points: np.ndarray, f: int) -> None:
    """Whole numbers make all scores exact, and ties and duplicates common."""
    replies = {f"c{i}": Reply({"w": p.copy()}, n=1) for i, p in enumerate(points)}
    merged = Krum(malicious=f)({"w": np.zeros(3)}, replies, {})
    scores = brute_force_scores(points, f)
    assert [merged.figures[c]["krum_score"] for c in replies] == scores
    best = scores.index(min(scores))  # the first of equals
    assert merged.weights == {c: float(i == best) for i, c in enumerate(replies)}
    np.testing.assert_array_equal(merged.arrays["w"], points[best])


def test_krum_compares_large_models_whole() -> None:
    """Distances are summed block by block; the last, shorter block counts too."""
    size = 3 * 4096 + 5
    models_ = [np.zeros(size, np.float32) for _ in range(4)]
    for i, position in enumerate((0, 5000, 9000, size - 1)):
        models_[i][position] = 1 + i / 10
    replies = {f"c{i}": Reply({"w": m}, n=1) for i, m in enumerate(models_)}
    figures = Krum()({"w": np.zeros(size, np.float32)}, replies, {}).figures
    right = brute_force_scores(np.stack(models_).astype(float), 0)
    assert [figures[c]["krum_score"] for c in replies] == pytest.approx(right, rel=1e-12)


def test_krum_looks_at_parameters_not_at_counters() -> None:
    """A counter of batches differs by hundreds between honest clients and would drown the parameters."""
    current = {"w": np.zeros(2, np.float32), "batches": np.array(0, np.int64)}
    honest = {f"c{i}": (0.01 * i, 100 * i) for i in range(5)}
    replies = {c: Reply({"w": np.full(2, x, np.float32), "batches": np.array(b)}, n=1) for c, (x, b) in honest.items()}
    replies["liar"] = Reply({"w": np.full(2, 50.0, np.float32), "batches": np.array(200)}, n=1)
    assert Krum(malicious=1)(current, replies, {}).weights["liar"] == 0.0
    counters = {c: Reply({"batches": r.arrays["batches"]}, n=1) for c, r in replies.items()}
    assert Krum()({"batches": current["batches"]}, counters, {}).weights["c2"] == 1.0  # nothing else to compare


points = hnp.arrays(np.float64, st.tuples(st.integers(3, 9), st.just(4)), elements=st.integers(-50, 50))


@given(points)
@settings(max_examples=10)
def test_rfa_is_the_geometric_median_that_scipy_finds(ends: np.ndarray) -> None:
    replies = {f"c{i}": Reply({"w": p.copy()}, n=i + 1) for i, p in enumerate(ends)}
    merged = RFA(iterations=5000)({"w": np.zeros(4)}, replies, {})

    def far(z: np.ndarray) -> float:
        return float(np.linalg.norm(ends - z, axis=1).sum())

    starts = [ends.mean(0), *ends]  # the sum has a kink at every point
    found = min(scipy.optimize.minimize(far, z, method="Nelder-Mead", options={"maxiter": 1000}).fun for z in starts)
    assert far(merged.arrays["w"]) <= found * (1 + 1e-4) + 1e-6
    weighted = np.sum([merged.weights[c] * r.arrays["w"] for c, r in replies.items()], axis=0)
    assert merged.arrays["w"] == pytest.approx(weighted, abs=1e-9)


@given(st.lists(points, min_size=1, max_size=3), st.integers(1, 4), st.floats(0.1, 3))
@settings(max_examples=40)
def test_centred_clipping_is_a_loop_by_hand(rounds: list[np.ndarray], iterations: int, radius: float) -> None:
    part, memory, v, here = CenteredClipping(radius, iterations), dict[str, np.ndarray](), np.zeros(4), np.ones(4)
    for ends in rounds:
        merged = part({"w": here}, {f"c{i}": Reply({"w": p.copy()}, n=10**i) for i, p in enumerate(ends)}, memory)
        for _ in range(iterations):
            away = ends - here - v
            lengths = np.linalg.norm(away, axis=1)
            tau = radius * np.median(lengths)
            short = [d if size <= tau else d * tau / size for d, size in zip(away, lengths, strict=True)]
            v = v + np.mean(short, axis=0)
        assert merged.arrays["w"] == pytest.approx(here + v, abs=1e-5)
        here = merged.arrays["w"]


@pytest.mark.parametrize("clients", [4, 5, 11])
def test_robust_parts_withstand_a_liar_and_the_mean_does_not(clients: int) -> None:
    rng = np.random.default_rng(clients)
    current = {"w": np.zeros(50, np.float32)}
    replies = {f"c{i}": Reply({"w": rng.normal(size=50).astype(np.float32)}, n=10) for i in range(clients)}
    replies["liar"] = Reply({"w": np.full(50, 1e6, np.float32)}, n=10)
    known = (FedMedian(), FedTrimmedAvg(beta=0.25), Krum(malicious=1), MultiKrum(malicious=1, keep=2))
    for part in (*known, RFA(), CenteredClipping()):
        assert np.abs(part(current, replies, {}).arrays["w"]).max() < 5
    assert np.abs(FedAvg()(current, replies, {}).arrays["w"]).max() > 1e4


def test_fedprox_tells_the_clients_its_mu_and_the_others_tell_nothing() -> None:
    assert FedProx(mu=0.9).needs.request_config() == {"mu": 0.9}
    assert all(as_aggregator(make()).needs == Needs() for name, make in CLASSIC.items() if name != "fedprox")


def test_server_rates_and_momentum_by_hand() -> None:
    current = {"w": np.array([1.0])}
    reply = {"ana": Reply({"w": np.array([3.0])}, n=1)}
    assert FedOpt(lr=0.5)(current, reply, {}).arrays["w"] == 2.0
    memory: Arrays = {}
    part = FedAvgM(lr=0.5, momentum=0.5)
    assert part(current, reply, memory).arrays["w"] == 2.0  # v = 2
    assert part(current, reply, memory).arrays["w"] == 2.5  # v = 0.5 * 2 + 2
    # Adagrad: v = 4, then 8; step 0.1 * 2 / (sqrt(v) + 0.001)
    memory = {}
    for v in (4.0, 8.0):
        moved = FedAdagrad()(current, reply, memory).arrays["w"][0]
        assert moved == pytest.approx(1 + 0.1 * 2 / (v**0.5 + 1e-3), rel=1e-12)


def test_overflow_of_a_narrow_type_becomes_infinity_for_the_round_to_name() -> None:
    current = {"w": np.array([6e4], np.float16)}
    reply = {"ana": Reply({"w": np.array([6.5e4], np.float16)}, n=1)}
    assert np.isinf(FedOpt(lr=10.0)(current, reply, {}).arrays["w"][0])


BAD = [
    (FedAvgM, {"lr": 0.0}),
    (FedAvgM, {"momentum": 1.0}),
    (FedAvgM, {"momentum": -0.1}),
    (FedProx, {"mu": -1.0}),
    (FedOpt, {"lr": -1.0}),
    (FedOpt, {"lr": float("inf")}),
    (FedOpt, {"lr": float("nan")}),
    (FedAdam, {"beta1": 1.0}),
    (FedAdam, {"beta2": 1.5}),
    (FedAdam, {"tau": 0.0}),
    (FedYogi, {"beta1": float("nan")}),
    (FedAdagrad, {"lr": 0}),
    (FedTrimmedAvg, {"beta": 0.5}),
    (FedTrimmedAvg, {"beta": -0.1}),
    (Krum, {"malicious": -1}),
    (MultiKrum, {"keep": 0}),
    (RFA, {"iterations": 0}),
    (RFA, {"nu": 0.0}),
    (CenteredClipping, {"radius": 0.0}),
]


@pytest.mark.parametrize(("make", "wrong"), BAD, ids=lambda x: getattr(x, "__name__", repr(x)))
def test_settings_out_of_range_are_refused_in_one_line_that_names_them(make: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))} is .*, but must be (above|at least) [^\n]*$"):
        make(**wrong)


def test_names_are_those_of_the_contract_and_repr_is_the_configuration() -> None:
    for name, make in CLASSIC.items():
        assert NAMES[name] is make
        assert make.__name__.lower() == name
    assert repr(FedAdam(tau=0.1)) == "FedAdam(lr=0.1, beta1=0.9, beta2=0.99, tau=0.1)"
    for a, b in itertools.combinations(PARTS, 2):
        assert repr(a) != repr(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FedAvgM().lr = 2.0  # type: ignore[misc]
