"""What liars send, and that the filter catches it while honest clients stay."""

from typing import Literal

import numpy as np
import pytest

from mutirao.aggregation import RFA, CenteredClipping, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from mutirao.core.arrays import flat
from mutirao.core.fleet import Reply, Request, Site
from mutirao.robustness.attacks import (
    NAMES,
    Attacked,
    Backdoor,
    Inflated,
    LabelFlip,
    MinMax,
    Sybils,
    detection_rates,
    malicious_among,
)
from mutirao.robustness.filters import Robust
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import Samples, poison

CURRENT = {
    "0.weight": np.zeros((20, 10), np.float32),
    "2.weight": np.ones((4, 20), np.float32),
    "n": np.zeros((), np.int64),
}
SENT = {"config": {"seed": 0, "round": 1}}
NAMED = [f"c{i}" for i in range(10)]


def honest(request: Request, site: Site) -> Reply:
    """A common direction and some chance."""
    common, own = np.random.default_rng(7), np.random.default_rng(int(site.id[1:]))
    moved = {
        k: (v + 0.1 * common.normal(size=v.shape) + 0.1 * own.normal(size=v.shape)).astype(v.dtype)
        for k, v in request.arrays.items()
    }
    return Reply(moved, extras={"signature": own.normal(size=3).astype(np.float32)}, n=5)


def answers(attack: str, liars: frozenset[str], do: str = "train") -> dict[str, Reply]:
    part = NAMES[attack]
    handler = Attacked(honest, liars, part() if isinstance(part, type) else part, poison)
    return LocalFleet(handler, dict.fromkeys(NAMED)).ask({c: Request(do, CURRENT, **SENT) for c in NAMED}).replies


def update(reply: Reply) -> np.ndarray:
    return flat(reply.arrays) - flat(CURRENT)


LIARS = frozenset({"c1", "c4", "c8"})
SUBTLE = {"none", "label_flip", "backdoor", "inflated", "fake_signature"}  # not to be told from one such update


@pytest.mark.parametrize("attack", [a for a in NAMES if a not in SUBTLE])
def test_liars_lie_and_the_filter_catches_them_all(attack: str) -> None:
    plain, replies = answers("none", LIARS), answers(attack, LIARS)
    for c in NAMED:
        assert (c in LIARS) != np.array_equal(update(replies[c]), update(plain[c]))
        assert {k: v.dtype for k, v in replies[c].arrays.items()} == {k: v.dtype for k, v in CURRENT.items()}
    kept, rejected = Robust(head="2")(CURRENT, replies)
    assert set(rejected) == LIARS
    assert sorted(kept) == sorted(set(NAMED) - LIARS)
    assert all(rejected.values())


def test_each_lie_is_what_it_says() -> None:
    plain = answers("none", LIARS)
    assert update(answers("sign_flip", LIARS)["c4"]) == pytest.approx(-update(plain["c4"]), abs=1e-6)
    mean = np.mean([update(plain[c]) for c in sorted(LIARS)], axis=0)
    deviation = np.std([update(plain[c]) for c in sorted(LIARS)], axis=0)
    assert update(answers("inner_product", LIARS)["c1"]) == pytest.approx(-mean, abs=1e-6)
    assert update(answers("colluding", LIARS)["c8"]) == pytest.approx(mean - deviation, abs=1e-6)
    length = np.linalg.norm(update(plain["c1"]))
    assert np.linalg.norm(update(answers("constant", LIARS)["c1"])) == pytest.approx(length, rel=0.02)
    assert np.linalg.norm(update(answers("noise", LIARS)["c1"])) == pytest.approx(3 * length, rel=0.2)


@pytest.mark.parametrize("own", [0.0, 0.3])
@pytest.mark.parametrize("along", ["mean", "deviation"])
def test_min_max_goes_as_far_as_its_distances_allow(along: Literal["mean", "deviation"], own: float) -> None:
    plain = answers("none", LIARS)
    honest = {c: plain[c] for c in sorted(LIARS)}
    lies = MinMax(along, own)(CURRENT, honest, np.random.default_rng(0))
    updates = [update(r) for r in honest.values()]
    mean, widest = np.mean(updates, axis=0), max(np.linalg.norm(u - v) for u in updates for v in updates)
    away = -mean / np.linalg.norm(mean) if along == "mean" else -np.std(updates, axis=0)
    bases = [mean + own * (u - mean) for u in updates]

    def fits(g: float) -> bool:
        return max(np.linalg.norm(b + g * away - u) for b in bases for u in updates) <= widest

    low, high = 0.0, 100.0  # the search by halves of the paper
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    assert low > 0
    for reply, base in zip(lies.values(), bases, strict=True):
        assert update(reply) == pytest.approx(base + low * away, abs=1e-5)
    alone = MinMax(along, own)(CURRENT, {"c1": plain["c1"]}, np.random.default_rng(0))
    assert update(alone["c1"]) == pytest.approx(update(plain["c1"]), abs=1e-6)  # who knows nobody has no room


def test_no_robust_part_is_taken_over_by_a_lie_about_n() -> None:
    lone = frozenset({"c4"})
    replies = LocalFleet(Attacked(honest, lone, Inflated(times=10**12, scale=-1.0)), dict.fromkeys(NAMED)).ask(
        {c: Request("train", CURRENT, **SENT) for c in NAMED}
    )
    assert replies.replies["c4"].n == 10**12
    parts = (FedMedian(), FedTrimmedAvg(), Krum(malicious=1), MultiKrum(malicious=1, keep=8), RFA(), CenteredClipping())
    for part in parts:
        assert part(CURRENT, replies.replies, {}).weights["c4"] <= 0.1
    assert FedAvg()(CURRENT, replies.replies, {}).weights["c4"] > 0.99
    kept, rejected = Robust()(CURRENT, replies.replies)
    assert set(rejected) == lone
    assert {r.n for r in kept.values()} == {5}


def test_an_honest_update_with_a_false_n_is_kept_for_what_it_is_worth() -> None:
    replies = answers("inflated", LIARS)
    assert replies["c1"].n == 5 * 10**6
    kept, rejected = Robust()(CURRENT, replies)
    assert not rejected
    assert {r.n for r in kept.values()} == {5, 7}
    weights = FedAvg()(CURRENT, kept, {}).weights
    assert sum(weights[c] for c in LIARS) == pytest.approx(21 / 56)


def test_a_backdoor_marks_every_second_sample_and_is_sent_boosted() -> None:
    door = Backdoor(target=3, size=2, value=9.0, boost=2.0)
    x, y = door.poison(np.zeros((4, 2, 3), np.float32), np.array([0, 1, 2, 0]))
    assert y.tolist() == [0, 3, 2, 3]
    assert x[:, 0].tolist() == [[0, 0, 0], [0, 9, 9], [0, 0, 0], [0, 9, 9]]
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    data = Samples(np.zeros((6, 3), np.float32), np.arange(6), np.array([1, 2, 5]))
    changed = poison(data, door.poison)
    assert changed.y.tolist() == [1, 3, 5]  # type: ignore[union-attr]
    assert not data.x.any()  # the client's own samples stay as they are
    plain = {"c1": answers("none", LIARS)["c1"]}
    sent = door(CURRENT, plain, np.random.default_rng(0))["c1"]
    assert update(sent)[:-1] == pytest.approx(2 * update(plain["c1"])[:-1], abs=1e-6)


def test_a_lone_liar_lies_the_same_over_a_network() -> None:
    handler = Attacked(honest, LIARS, NAMES["sign_flip"]())
    reply = handler(Request("train", CURRENT, **SENT), Site("c1"))
    assert np.array_equal(update(reply), update(answers("sign_flip", LIARS)["c1"]))


def test_false_labels_are_of_the_clients_own_classes_and_only_in_training() -> None:
    data = Samples(np.zeros((6, 2), np.float32), np.array([2, 2, 5, 7, 7, 9]), np.array([0, 2, 3, 4]))
    assert poison(data, LabelFlip().poison).y.tolist() == [7, 5, 2, 2]  # type: ignore[union-attr]
    seen = []

    def look(request: Request, site: Site) -> Reply:
        seen.append(site.data)
        return Reply({}, n=1)

    handler = Attacked(look, frozenset({"c1"}), LabelFlip(), poison)
    for do in ("train", "evaluate"):
        handler(Request(do, {}, **SENT), Site("c1", data))
    handler(Request("train", {}, **SENT), Site("c2", data))
    assert [d is data for d in seen] == [False, True, True]
    with pytest.raises(ValueError, match=r"^LabelFlip\(\) poisons data"):
        Attacked(look, frozenset({"c1"}), LabelFlip())


def test_a_faked_signature_is_somebody_elses() -> None:
    plain, faked = answers("none", LIARS, "warm"), answers("fake_signature", LIARS, "warm")
    others = [plain[c].extras["signature"] for c in NAMED if c not in LIARS]
    for c in LIARS:
        near = min(np.abs(faked[c].extras["signature"] - s).max() for s in others)
        assert near < 0.1
        assert not np.array_equal(faked[c].extras["signature"], plain[c].extras["signature"])


def test_liars_are_drawn_from_every_group() -> None:
    groups = {f"c{i:02d}": i % 3 for i in range(30)}
    liars = malicious_among(groups, 0.3, seed=1)
    assert [sum(groups[c] == g for c in liars) for g in range(3)] == [3, 3, 3]
    assert liars == malicious_among(dict(reversed(groups.items())), 0.3, seed=1)
    assert not malicious_among(groups, 0.0, seed=1)


def test_verdicts_are_means_over_rounds() -> None:
    def row(client: str, rejected: str) -> dict[str, object]:
        return {"client": client, "rejected": rejected, "try": 1, "replied": 1}

    first = detection_rates([row("a", ""), row("b", "odd"), row("x", "odd")], frozenset("x"), [])
    assert first == {"false_rejections": 0.5, "caught": 1.0}
    second = detection_rates([row("a", ""), row("x", "")], frozenset("x"), [first])
    assert second == {"false_rejections": 0.25, "caught": 0.5}


def test_a_swarm_answers_under_all_its_names() -> None:
    fleet = Sybils(LocalFleet(honest, dict.fromkeys(NAMED)), "c3", names=4)
    assert len(fleet.clients()) == 14
    assert len(set(fleet.keys().values())) == 10
    replies = fleet.ask({c: Request("train", CURRENT, **SENT) for c in ("c1", "c3~0", "c3~2")}).replies
    assert sorted(replies) == ["c1", "c3~0", "c3~2"]
    assert np.array_equal(update(replies["c3~0"]), update(replies["c3~2"]))
