"""Sums over fleets that lose clients before, during and after the masked upload."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parties import METRICS, MODEL, ask, handler, lossy, names, update_of

from mutirao.core.arrays import Arrays, weighted_mean
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.privacy.secure_aggregation import SecAggPlus
from mutirao.privacy.secure_aggregation.fixed_point import FixedPoint
from mutirao.privacy.secure_aggregation.settings import KEYS, MASKED, SHARES, STAGES, UNMASK
from mutirao.privacy.secure_aggregation.summing_fleet import draw_neighbours


def assert_mean_of(reply: Reply, clients: list[str], secure: SecAggPlus) -> None:
    """The reply is the plain mean over these clients, to the quantisation."""
    own = {c: update_of(c, MODEL) for c in clients}
    weights = {c: min(r.n, secure.most_samples) for c, r in own.items()}
    plain: Arrays = weighted_mean({c: r.arrays for c, r in own.items()}, weights)
    step = FixedPoint(secure, len(clients), METRICS).step
    for name, x in MODEL.items():
        assert reply.arrays[name].dtype == x.dtype
    np.testing.assert_allclose(reply.arrays["w"], plain["w"], atol=step / 2 + 1e-6, rtol=0)
    np.testing.assert_allclose(reply.arrays["b"], plain["b"], atol=step / 2 + 1e-12, rtol=0)
    assert abs(int(reply.arrays["steps"]) - int(plain["steps"])) == 0
    np.testing.assert_array_equal(reply.arrays["mask"], plain["mask"])
    for name in METRICS:
        mean = sum(weights[c] * r.metrics[name] for c, r in own.items()) / sum(weights.values())
        assert abs(reply.metrics[name] - mean) < 1e-6


@pytest.mark.parametrize(("count", "neighbours"), [(3, 24), (10, 24), (10, 4), (31, 6)])
def test_the_sum_is_the_plain_weighted_mean(count: int, neighbours: int) -> None:
    secure = SecAggPlus(neighbours=neighbours, most_samples=60)
    _, fleet = lossy(count, secure)
    answers = ask(fleet, names(count))
    assert list(answers.replies) == names(count)
    assert answers.failures == {}
    assert len({id(r) for r in answers.replies.values()}) == 1  # there is one reply, and it is everybody's
    assert_mean_of(answers.replies[names(1)[0]], names(count), secure)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("count", "lost"), [(3, 1), (10, 4)])
def test_clients_that_get_lost_at_any_stage_up_to_the_threshold_cost_only_themselves(
    stage: str, after: bool, count: int, lost: int
) -> None:
    secure = SecAggPlus(least=2)
    who = names(count)[1 : 1 + lost]
    inside, fleet = lossy(count, secure)
    (inside.after if after else inside.lose).update(dict.fromkeys(who, stage))  # type: ignore[attr-defined]
    answers = ask(fleet, names(count))
    in_sum = names(count) if stage == UNMASK else [c for c in names(count) if c not in who]
    assert list(answers.replies) == in_sum
    assert answers.failures == {c: Failure("late", "no answer in time") for c in names(count) if c not in in_sum}
    assert_mean_of(answers.replies[in_sum[0]], in_sum, secure)


@pytest.mark.parametrize("stage", [SHARES, MASKED, UNMASK])
@pytest.mark.parametrize(("count", "lost"), [(3, 2), (10, 5)])
def test_beyond_the_threshold_there_is_no_sum_and_everyone_has_a_typed_failure(
    stage: str, count: int, lost: int
) -> None:
    _, fleet = lossy(count, SecAggPlus(least=2), after=dict.fromkeys(names(count)[:lost], stage))
    answers = ask(fleet, names(count))
    assert answers.replies == {}
    kinds = Counter(f.kind for f in answers.failures.values())
    assert kinds["too_few"] == count - (0 if stage == UNMASK else lost)


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 12), st.data())
def test_whoever_gets_lost_whenever_the_sum_is_exact_or_there_is_none(count: int, data: st.DataObject) -> None:
    secure = SecAggPlus(neighbours=data.draw(st.sampled_from([2, 4, 24])), least=2)
    moments = st.sampled_from([None, None, None, *STAGES])
    lose = {c: when for c in names(count) if (when := data.draw(moments)) is not None}
    after = {c: when for c in names(count) if (when := data.draw(moments)) is not None}
    inside, fleet = lossy(count, secure, lose=lose, after=after)
    answers = ask(fleet, names(count))
    assert answers.replies.keys() | answers.failures.keys() == set(names(count))
    if answers.replies:
        in_sum = {c for c, request, _ in inside.seen if request.do == UNMASK}
        assert answers.replies.keys() == in_sum
        assert_mean_of(next(iter(answers.replies.values())), sorted(in_sum), secure)
    else:
        assert "too_few" in {f.kind for f in answers.failures.values()} or len(answers.failures) == count


def test_a_sum_of_fewer_clients_than_the_least_is_not_begun() -> None:
    inside, fleet = lossy(5, SecAggPlus(least=3))
    answers = ask(fleet, names(2))
    assert inside.seen == []
    assert {str(f) for f in answers.failures.values()} == {"too_few: 2 clients; a sum has at least 3"}


def test_several_models_are_several_sums_of_one_question_a_stage() -> None:
    secure = SecAggPlus()
    inside, fleet = lossy(8, secure)
    one, two = MODEL, {k: v.copy() for k, v in MODEL.items()}
    two["b"] = two["b"] + 1
    config = {"seed": 0, "round": 1}
    requests = {c: Request("train", one if i < 4 else two, config) for i, c in enumerate(names(8))}
    answers = fleet.ask(requests)
    assert_mean_of(answers.replies[names(8)[0]], names(8)[:4], secure)
    np.testing.assert_allclose(
        answers.replies[names(8)[7]].arrays["b"],
        weighted_mean(
            {c: update_of(c, two).arrays for c in names(8)[4:]}, {c: update_of(c, two).n for c in names(8)[4:]}
        )["b"],
        atol=1e-6,
    )
    assert len(inside.seen) == 4 * 8


def test_judgements_are_summed_too_each_client_counting_the_same() -> None:
    _, fleet = lossy(5, SecAggPlus())
    reply = next(iter(ask(fleet, names(5), "evaluate").replies.values()))
    assert reply.arrays == {}
    mean = np.mean([update_of(c, MODEL).metrics["loss"] for c in names(5)])
    assert abs(reply.metrics["loss"] - mean) < 1e-6


def test_sizes_are_masked_or_public_as_set() -> None:
    hidden = ask(lossy(4, SecAggPlus())[1], names(4))
    assert {r.n for r in hidden.replies.values()} == {round(np.mean([10, 13, 16, 19]))}
    told = ask(lossy(4, SecAggPlus(sizes="public"))[1], names(4))
    assert [r.n for r in told.replies.values()] == [10, 13, 16, 19]
    assert_mean_of(told.replies[names(1)[0]], names(4), SecAggPlus())


def test_a_client_that_claims_many_samples_counts_up_to_the_cap() -> None:
    def boastful(request: Request, site: Site) -> Reply:
        reply = handler(request, site)
        return Reply(reply.arrays, {}, reply.metrics, 10**12 if site.id == names(1)[0] else reply.n)

    secure = SecAggPlus(most_samples=10)  # everyone's weight is 10 then
    reply = next(iter(ask(lossy(4, secure, boastful)[1], names(4)).replies.values()))
    plain = np.mean([update_of(c, MODEL).arrays["b"] for c in names(4)], axis=0)
    np.testing.assert_allclose(reply.arrays["b"], plain, atol=1e-5)


def test_what_a_site_finds_wrong_with_its_own_update_is_told_as_without_masks() -> None:
    def broken(request: Request, site: Site) -> Reply:
        reply = handler(request, site)
        return Reply(reply.arrays | {"b": np.array([np.nan, 0])}) if site.id == names(1)[0] else reply

    answers = ask(lossy(5, SecAggPlus(), broken)[1], names(5))
    assert answers.failures[names(1)[0]].kind == "not_finite"
    assert_mean_of(answers.replies[names(5)[1]], names(5)[1:], SecAggPlus())


def test_the_bytes_of_all_stages_are_counted() -> None:
    inside, fleet = lossy(4, SecAggPlus())
    answers = ask(fleet, names(4))
    assert answers.carried is not None
    down = sum(v.nbytes for _, r, _ in inside.seen for v in (*r.arrays.values(), *r.extras.values()))
    assert answers.carried[0] == down > 4 * sum(v.nbytes for v in MODEL.values())


def test_a_client_that_sends_wrong_shares_ends_the_sum_and_does_not_spoil_it() -> None:
    def twist(client: str, request: Request, reply: Reply) -> Reply:
        if request.do != UNMASK or client != names(1)[0]:
            return reply
        shares = reply.extras["shares"].copy()
        shares[:, 4:20] ^= 0x5A  # the first block; number and padding stay as they should be
        return Reply({}, {"shares": shares}, {}, 1)

    answers = ask(lossy(3, SecAggPlus(), twist=twist)[1], names(3))
    assert answers.replies == {}
    assert "do not fit" in str(answers.failures[names(3)[1]])


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_sends_rubbish_is_lost_alone(stage: str) -> None:
    def twist(client: str, request: Request, reply: Reply) -> Reply:
        return Reply({}, {}, {}, 1) if request.do == stage and client == names(1)[0] else reply

    answers = ask(lossy(6, SecAggPlus(), twist=twist)[1], names(6))
    if stage != UNMASK:
        assert answers.failures.keys() == {names(1)[0]}
        assert answers.failures[names(1)[0]].kind == "malformed"
        assert_mean_of(answers.replies[names(6)[1]], names(6)[1:], SecAggPlus())
    else:
        assert_mean_of(answers.replies[names(6)[1]], names(6), SecAggPlus())


@pytest.mark.parametrize(
    "spoil", [lambda letters, masks: (letters, letters), lambda letters, masks: (letters * 0, masks)]
)
def test_a_client_with_keys_that_are_none_is_lost_alone(spoil: Any) -> None:
    def twist(client: str, request: Request, reply: Reply) -> Reply:
        if request.do != KEYS or client != names(1)[0]:
            return reply
        letters, masks = spoil(reply.extras["letters"], reply.extras["masks"])
        return Reply({}, {"letters": letters, "masks": masks}, {}, 1)

    answers = ask(lossy(6, SecAggPlus(), twist=twist)[1], names(6))
    assert {c: f.kind for c, f in answers.failures.items()} == {names(1)[0]: "malformed"}
    assert_mean_of(answers.replies[names(6)[1]], names(6)[1:], SecAggPlus())


@given(st.integers(2, 60), st.integers(2, 30))
def test_neighbours_are_mutual_distinct_and_as_many_as_asked(clients: int, count: int) -> None:
    near = draw_neighbours(names(clients), count)
    assert near.keys() == set(names(clients))
    for c, who in near.items():
        assert c not in who
        assert all(c in near[n] for n in who)
        assert len(set(who)) == len(who) >= min(count, clients - 1)
    reached, todo = set[str](), [names(1)[0]]
    while todo:
        reached.add(at := todo.pop())
        todo += [n for n in near[at] if n not in reached]
    assert reached == set(names(clients))


def test_no_two_sets_of_shares_that_unmask_can_be_had_of_one_neighbourhood() -> None:
    for threshold, party in itertools.product((0.5, 0.6, 0.9, 1.0), range(2, 40)):
        assert 2 * SecAggPlus(threshold=threshold).needed(party) > party
        assert SecAggPlus(threshold=threshold).needed(party) <= party


def test_the_same_question_gives_the_same_bytes_whatever_the_masks() -> None:
    replies = [next(iter(ask(lossy(7, SecAggPlus())[1], names(7)).replies.values())) for _ in range(2)]
    for name in MODEL:
        assert replies[0].arrays[name].tobytes() == replies[1].arrays[name].tobytes()
    assert replies[0].metrics == replies[1].metrics
