"""Filters: honest replies stay, odd ones go with a reason, whatever the order."""

from typing import Any

import numpy as np
import pytest

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply
from mutirao.robustness import filters
from mutirao.robustness.filters import NormFilter

CURRENT: Arrays = {"w": np.zeros((2, 3), np.float32), "steps": np.zeros((), np.int64)}


def good(**changes: Any) -> Reply:
    arrays = {"w": np.ones((2, 3), np.float32), "steps": np.ones((), np.int64)}
    return Reply(**{"arrays": arrays, "metrics": {"loss": 0.5}, "n": 10} | changes)


def with_w(w: Any) -> Reply:
    return good(arrays={**good().arrays, "w": w})


def test_norm_filter_drops_long_updates_and_says_why() -> None:
    lengths = {"ana": 1.0, "bia": 1.1, "caio": 0.9, "dora": 50.0}
    replies = {c: with_w(np.full((2, 3), x, np.float32)) for c, x in lengths.items()}
    kept, dropped = NormFilter(factor=3.0)({**CURRENT, "steps": np.ones((), np.int64)}, replies)
    assert list(kept) == ["ana", "bia", "caio"]
    assert list(dropped) == ["dora"]
    assert "3 times the median" in dropped["dora"]
    assert NormFilter()(CURRENT, {}) == ({}, {})
    same = {c: good() for c in lengths}
    assert NormFilter()(CURRENT, same) == (same, {})


def updates(seed: int, n: int, agreement: float, size: int = 400) -> dict[str, Reply]:
    """Replies that share a direction; the cosine between two of them is about `agreement`."""
    draw = np.random.default_rng(seed)
    shared = draw.normal(size=(20, size // 20))
    ends = [np.sqrt(agreement) * shared + np.sqrt(1 - agreement) * draw.normal(size=shared.shape) for _ in range(n)]
    return {f"c{i:02d}": Reply({"0.weight": w.astype(np.float32)}, n=1) for i, w in enumerate(ends)}


ZERO: Arrays = {"0.weight": np.zeros((20, 20), np.float32)}


@pytest.mark.parametrize("name", ["norm", "distance", "copies", "cosine", "robust"])
@pytest.mark.parametrize("agreement", [0.1, 0.5, 0.9])
def test_filters_keep_honest_replies_in_any_order(name: str, agreement: float) -> None:
    for seed in range(10):
        replies = updates(seed, 10, agreement)
        kept, rejected = filters.NAMES[name]()(ZERO, replies)  # type: ignore[operator]
        assert not rejected
        again, _ = filters.NAMES[name]()(ZERO, dict(reversed(replies.items())))  # type: ignore[operator]
        assert kept.keys() == again.keys()


def test_alignment_is_the_cosine_of_updates_layer_by_layer() -> None:
    draw = np.random.default_rng(0)
    here = {"a.weight": draw.normal(size=(3, 4)), "b.weight": draw.normal(size=(2, 3)), "b.bias": draw.normal(size=2)}
    replies = [Reply({k: v + s * draw.normal(size=v.shape) for k, v in here.items()}, n=1) for s in (1, 1, 50)]

    def unit(v: np.ndarray) -> np.ndarray:
        return v.ravel() / np.linalg.norm(v)

    rows = [
        np.concatenate([unit(r.arrays["a.weight"] - here["a.weight"]), unit(r.arrays["b.weight"] - here["b.weight"])])
        for r in replies
    ]
    by_hand = np.array([[p @ q / 2 for q in rows] for p in rows])
    assert filters.alignment(here, replies) == pytest.approx(by_hand)
    last = [unit(r.arrays["b.weight"] - here["b.weight"]) for r in replies]
    heads = np.array([[p @ q for q in last] for p in last])
    assert filters.alignment(here, replies, "b") == pytest.approx(0.75 * by_hand + 0.25 * heads)


def test_agreement_is_the_cosine_with_the_core_without_oneself() -> None:
    replies = list(updates(3, 9, 0.6).values())
    found = filters.with_core(filters.alignment(ZERO, replies))
    rows = np.stack([r.arrays["0.weight"].ravel() / np.linalg.norm(r.arrays["0.weight"]) for r in replies])
    agreement = [np.median([rows[i] @ rows[j] for j in range(9) if j != i]) for i in range(9)]
    for _ in range(filters.CORE_ITERATIONS):  # the same with vectors, where the filter only has their products
        core = sorted(range(9), key=lambda i: -agreement[i])[:5]
        means = [rows[[j for j in core if j != i]].mean(0) for i in range(9)]
        agreement = [rows[i] @ means[i] / np.linalg.norm(means[i]) for i in range(9)]
    assert found == pytest.approx(np.array(agreement), abs=1e-6)


def test_what_is_far_away_copied_or_turned_is_dropped_with_a_reason() -> None:
    replies = updates(1, 10, 0.7)
    w = {c: r.arrays["0.weight"] for c, r in replies.items()}
    far = {**replies, "c03": Reply({"0.weight": 9 * w["c03"]}, n=1)}
    assert set(filters.DistanceFilter()(ZERO, far)[1]) == {"c03"}
    copied = {**replies, "c05": Reply({"0.weight": w["c02"] * 1.001}, n=1)}
    assert filters.CopyFilter()(ZERO, copied)[1] == {
        "c02": "update nearly the same as that of c05",
        "c05": "update nearly the same as that of c02",
    }
    turned = {**replies, "c01": Reply({"0.weight": -w["c01"]}, n=1)}
    assert "below" in filters.CosineFilter()(ZERO, turned)[1]["c01"]
    assert set(filters.Robust()(ZERO, turned)[1]) == {"c01"}


def test_of_few_replies_all_are_kept() -> None:
    replies = updates(0, 4, 0.9)
    replies["c00"] = Reply({"0.weight": -50 * replies["c00"].arrays["0.weight"]}, n=1)
    for part in (filters.DistanceFilter(), filters.CopyFilter(), filters.CosineFilter(), filters.Robust()):
        assert part(ZERO, replies) == (replies, {})
    assert filters.keep_all(ZERO, replies) == (replies, {})


def test_updates_of_no_length_are_kept() -> None:
    replies = {f"c{i}": Reply({"0.weight": ZERO["0.weight"].copy()}, n=1) for i in range(8)}
    assert not filters.Robust()(ZERO, replies)[1]


def rounds_of(liars: set[str], count: int, agreement: float) -> list[dict[str, Reply]]:
    """Rounds of ten clients, some of whom send the opposite of what they found."""
    out = []
    for seed in range(count):
        replies = updates(seed, 10, agreement)
        out.append(
            {
                c: Reply({k: -v for k, v in r.arrays.items()} if c in liars else r.arrays, n=1)
                for c, r in replies.items()
            }
        )
    return out


def test_what_one_round_cannot_tell_several_do() -> None:
    """Where hardly anybody agrees, one round says little of anybody, and the same client time and again says much."""
    liars = {"c02", "c05", "c07"}
    rounds = rounds_of(liars, 12, agreement=0.03)
    alone = [set(filters.Robust()(ZERO, replies)[1]) for replies in rounds]
    memory: Arrays = {}
    together = [set(filters.Robust()(ZERO, replies, memory)[1]) for replies in rounds]
    assert sum(rejected == liars for rejected in alone) <= 2
    assert all(rejected == liars for rejected in together[6:])
    assert set(memory) == {"robust.clients", "robust.agreed", "robust.typical", "robust.length"}
    assert len(memory["robust.clients"]) == 10


def test_who_begins_to_lie_late_loses_its_standing() -> None:
    memory: Arrays = {}
    screen = filters.Robust()
    for replies in rounds_of(set(), 8, agreement=0.5):
        assert not screen(ZERO, replies, memory)[1]
    rejected = [set(screen(ZERO, replies, memory)[1]) for replies in rounds_of({"c04"}, 12, agreement=0.5)]
    assert rejected[-1] == {"c04"}
    assert rejected.index({"c04"}) < 8


def test_standing_goes_on_from_a_copy_of_memory_and_holds_for_who_was_away() -> None:
    rounds = rounds_of({"c03"}, 4, agreement=0.3)
    memory: Arrays = {}
    filters.Robust()(ZERO, rounds[0], memory)
    before, copy = dict(memory), {k: v.copy() for k, v in memory.items()}
    some = {c: r for c, r in rounds[1].items() if c not in ("c03", "c08")}
    filters.Robust()(ZERO, some, memory)
    assert all(np.array_equal(before[k], copy[k]) for k in copy)  # replaced, never changed in place
    for name in ("c03", "c08"):
        assert filters.load_standings(memory, [name]) == filters.load_standings(copy, [name])
    assert filters.load_standings(memory, ["new"]) == (0.0, 0.0)
    again = {k: v.copy() for k, v in memory.items()}
    assert filters.Robust()(ZERO, rounds[2], memory)[1] == filters.Robust()(ZERO, rounds[2], again)[1]


def test_who_is_kept_counts_no_more_than_the_others() -> None:
    replies = updates(2, 10, 0.8)
    w = {c: r.arrays["0.weight"] for c, r in replies.items()}
    replies |= {"c01": Reply({"0.weight": 1.4 * w["c01"]}, n=10**12), "c02": Reply({"0.weight": w["c02"]}, n=2)}
    kept, rejected = filters.Robust(samples=3.0)(ZERO, replies)
    assert not rejected
    assert [kept[c].n for c in ("c00", "c01", "c02")] == [1, 3, 2]
    lengths = filters.lengths_of(ZERO, replies)
    assert max(filters.lengths_of(ZERO, kept).values()) == pytest.approx(np.median(list(lengths.values())))
    turned = np.vdot(kept["c01"].arrays["0.weight"], w["c01"]) / np.linalg.norm(kept["c01"].arrays["0.weight"])
    assert turned == pytest.approx(np.linalg.norm(w["c01"]), rel=1e-5)  # shorter, in the same direction


def test_counters_are_neither_measured_nor_cut() -> None:
    here = {**ZERO, "ids": np.array([2**62 + 1, 0])}
    replies = {
        c: Reply({"0.weight": (1 + i / 20) * r.arrays["0.weight"], "ids": np.array([2**62 + 1, 10**i])}, n=1)
        for i, (c, r) in enumerate(updates(4, 10, 0.8).items())
    }
    kept, rejected = filters.Robust()(here, replies)
    assert not rejected
    assert not filters.NormFilter()(here, replies)[1]
    assert all(np.array_equal(kept[c].arrays["ids"], replies[c].arrays["ids"]) for c in replies)


def test_never_more_than_two_fifths_are_rejected_for_their_direction() -> None:
    rounds = rounds_of({f"c{i:02d}" for i in range(6)}, 5, agreement=0.6)  # the liars are the majority
    memory: Arrays = {}
    assert all(len(filters.Robust()(ZERO, replies, memory)[1]) <= 4 for replies in rounds)


def test_lengths_that_differ_among_honest_clients_are_no_crime() -> None:
    """As among clients with unequal data; where all are alike, twice the median is too long."""
    unequal, equal = updates(5, 10, 0.9), updates(5, 10, 0.9)
    scales = [0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 1.9, 2.2]
    unequal = {
        c: Reply({"0.weight": s * r.arrays["0.weight"]}, n=1) for s, (c, r) in zip(scales, unequal.items(), strict=True)
    }
    assert not filters.Robust()(ZERO, unequal)[1]
    equal["c00"] = Reply({"0.weight": 2 * equal["c00"].arrays["0.weight"]}, n=1)
    assert list(filters.Robust()(ZERO, equal)[1]) == ["c00"]
    assert "update of length " in filters.Robust()(ZERO, equal)[1]["c00"]


def test_too_few_left_to_judge_are_kept() -> None:
    replies = updates(1, 7, 0.5)
    same_ = replies["c00"].arrays["0.weight"]
    replies |= {c: Reply({"0.weight": same_ * (1 + 1e-6 * i)}, n=1) for i, c in enumerate(("c00", "c01", "c02"))}
    kept, rejected = filters.Robust()(ZERO, replies, {})
    assert set(rejected) == {"c00", "c01", "c02"}
    assert len(kept) == 4


@pytest.mark.parametrize("wrong", [{"least": 0.5}, {"least": 4.0}, {"samples": 0.0}, {"memory": 1.5}, {"share": -1.0}])
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))} is .*, but must be at least [01] and at most "):
        filters.Robust(**wrong)  # type: ignore[arg-type]


def scaled(replies: dict[str, Reply], lengths: dict[str, float], usual: float) -> dict[str, Reply]:
    return {
        c: Reply({k: np.float32(lengths.get(c, usual)) * v for k, v in r.arrays.items()}, n=1)
        for c, r in replies.items()
    }


def test_who_still_errs_where_the_others_have_learnt_all_they_can_is_no_liar() -> None:
    """As on Fashion-MNIST with two classes a client: updates of 0.02 in the middle, where they once were 4, and 1.5."""
    screen, memory = filters.Robust(), dict[str, Any]()
    for seed in range(4):
        assert not screen(ZERO, updates(seed, 10, 0.6), memory)[1]
    for seed in range(4, 12):
        late = scaled(updates(seed, 10, 0.0), {"c03": 0.3, "c06": 0.1}, 0.01)
        kept, rejected = screen(ZERO, late, memory)
        assert not rejected
        lengths = filters.lengths_of(ZERO, kept)
        assert lengths["c03"] <= 1.001 * np.median(list(filters.lengths_of(ZERO, late).values()))  # it cannot shout
    assert list(screen(ZERO, scaled(updates(12, 10, 0.0), {"c03": 9.0}, 0.01), memory)[1]) == ["c03"]
    fresh = scaled(updates(4, 10, 0.6), {"c03": 0.3}, 0.01)
    assert list(screen(ZERO, fresh, {})[1]) == ["c03"]  # in a first round nobody can know that
