"""What a client does in groups: its class map, what it judges by, and what leaves it."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mutirao.clustering.signatures import Bias, gaussian_sigma
from mutirao.core.arrays import digest
from mutirao.core.fleet import Failure, Reply, Request, Scalar, Site
from mutirao.core.needs import Capabilities
from mutirao.experiments.group_client import GroupMember, class_map, classes_in, last_layer, relabel
from mutirao.privacy import DPSGD, RELEASES, Central, Local, NoPrivacy
from mutirao.privacy.accounting import add_releases, epsilon
from mutirao.training.plain import answer_or_failure
from mutirao.training.samples import ClientData, Samples
from mutirao.training.trainer import CAPABILITIES, Trainer


def net(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, outputs))


def member(privacy: Any = NoPrivacy(), epsilon: float = 0.0) -> GroupMember:  # noqa: B008  # it is frozen
    signature = Bias(epsilon, clip=2.0, repeatable=True)
    return GroupMember(cache(lambda outputs: Trainer(lambda: net(outputs), lr=0.1)), 5, signature, 3, "0", privacy)


def samples(seed: int, labels: list[int]) -> Samples:
    x = np.random.default_rng(seed).normal(size=(len(labels), 4)).astype(np.float32)
    return Samples(x, np.array(labels))


def site(train: list[int], test: list[int]) -> Site:
    return Site("ana", ClientData(samples(0, train), samples(1, test)))


def test_a_class_map_names_the_outputs() -> None:
    assert class_map({"classes": "1,4"}, 5) == [1, 4]
    assert class_map({}, 5) == [0, 1, 2, 3, 4]


def test_samples_are_renamed_and_those_without_an_output_left_out() -> None:
    given = samples(0, [4, 1, 0, 4, 2])
    some = relabel(given, [1, 4], 5)
    x, y = some.batch(slice(0, len(some)))
    assert y.tolist() == [1, 0, 1]
    assert torch.equal(x, given.x[[0, 1, 3]])
    assert classes_in(given, 5).tolist() == [True, True, True, False, True]


def test_judging_is_what_numpy_says_and_known_classes_are_those_held() -> None:
    me, where = member(), site([1, 1, 4], [1, 4, 3, 1, 4, 2])
    names = [1, 3, 4]  # the client holds no 3, and the head no 2
    arrays = me.trainers(3).initial(7)
    reply = me(Request("evaluate", arrays, {"classes": "1,3,4"}), where)
    metrics = reply.metrics
    assert reply.n == 5  # the loss is over those whose class the head has
    outputs = where.data.test.x.numpy() @ arrays["0.weight"].T + arrays["0.bias"]
    y = where.data.test.y.numpy()
    assert metrics["accuracy"] == pytest.approx(np.mean(np.array(names)[outputs.argmax(1)] == y))
    assert metrics["accuracy_known"] == pytest.approx(np.mean(np.array([1, 4])[outputs[:, [0, 2]].argmax(1)] == y))
    seen = y != 2
    log = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
    assert metrics["loss"] == pytest.approx(-np.mean([log[i, names.index(y[i])] for i in np.flatnonzero(seen)]))


def test_a_bias_says_which_classes_a_client_holds() -> None:
    me = member()
    reply = me(Request("warm", me.trainers(5).initial(0), {"seed": 0, "round": 0}), site([1] * 9 + [4] * 9, [1]))
    assert set(reply.extras) == {"signature"}  # which classes it holds is told only when asked for
    assert set(np.argsort(reply.extras["signature"])[-2:]) == {1, 4}


def test_a_model_taken_over_stays_with_the_client() -> None:
    me, where = member(), site([1, 4], [1, 4])
    arrays = me.trainers(2).initial(3)
    reply = me(Request("take", arrays, {"classes": "1,4"}), where)
    assert not reply.arrays
    assert all(np.array_equal(where.state[f"model.{k}"], v) for k, v in arrays.items())


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="no samples to evaluate on"):
        member()(Request("evaluate", member().trainers(5).initial(0)), site([1], []))
    with pytest.raises(ValueError, match="no dense layer"):
        last_layer(nn.Sequential(nn.Conv2d(1, 1, 3)))
    assert last_layer(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == "2"
    with pytest.raises(ValueError, match=r"give it ClientData\(train, test\)"):
        member()(Request("evaluate", member().trainers(5).initial(0)), Site("ana", samples(0, [1])))


def both_ways(me: GroupMember, request: Request, **more: Any) -> list[tuple[Reply | Failure, Site]]:
    """The answer of one client, asked alone and among many."""
    alone, among = site([1, 1, 4], [1, 4]), site([1, 1, 4], [1, 4])
    alone.state.update(more)
    among.state.update(more)
    return [(answer_or_failure(me, request, alone), alone), (me.many({"ana": request}, {"ana": among})["ana"], among)]


TOLD: dict[str, Scalar] = {"seed": 0, "round": 1}


@pytest.mark.parametrize("privacy", [Local(repeatable=True), DPSGD(repeatable=True)])
def test_where_clients_see_to_their_privacy_only_noised_updates_and_signatures_leave(privacy: Any) -> None:
    me = member(privacy, epsilon=1.0)
    arrays = me.trainers(5).initial(0)
    assert me.capabilities == Capabilities({"epsilon", "epsilon_next"}, {"signature"}, {"mu"})
    for do in ("evaluate", "probe", "take"):
        for answer, where in both_ways(me, Request(do, arrays, TOLD)):
            assert str(answer) == f"refused: privacy: only noised updates and signatures leave, no answer to {do!r}"
            assert not where.state
    for extra in ({"holdings": True}, {"classes": "0,1"}):
        for answer, _ in both_ways(me, Request("warm", arrays, TOLD | extra)):
            assert str(answer).startswith("refused: privacy: the classes of a client are not disclosed")
    expected = privacy.at_client(me.trainers(5))(Request("train", arrays, TOLD), site([1, 1, 4], [1]))
    for answer, where in both_ways(me, Request("train", arrays, TOLD)):
        assert isinstance(answer, Reply)
        assert digest(answer.arrays) == digest(expected.arrays)
        assert (answer.metrics, answer.extras) == (expected.metrics, {})
        assert len(where.state[RELEASES]) == 1


@pytest.mark.parametrize("kind", [Local, DPSGD])
def test_a_signature_is_entered_into_the_clients_own_account(kind: Any) -> None:
    request = Request("warm", member().trainers(5).initial(0), TOLD)
    for answer, _ in both_ways(member(kind()), request):
        assert str(answer).startswith("refused: privacy: signatures need noise with this privacy")
    before = add_releases(None, 1.5, 1.0, 2)
    for answer, where in both_ways(member(kind(), epsilon=0.7), request, **{RELEASES: before}):
        assert isinstance(answer, Reply)
        assert (set(answer.extras), answer.n, answer.arrays) == ({"signature"}, 1, {})
        own = where.state[RELEASES]
        assert own[0].tolist() == before[0].tolist()
        assert own[1].tolist() == pytest.approx([gaussian_sigma(0.7, 1e-5, 1.0), 1.0, 1.0])
        assert epsilon(own[1:], 1e-5) >= 0.7  # what it is noised for; the account adds up bounds that are looser
    for answer, where in both_ways(member(kind(budget=0.5), epsilon=0.7), request):
        assert str(answer).startswith("refused: privacy.budget")
        assert not where.state


def test_where_the_server_is_trusted_clients_answer_as_without_privacy() -> None:
    arrays = member().trainers(5).initial(0)
    for do in ("warm", "train", "evaluate", "probe"):
        trusting, plain = (both_ways(member(p), Request(do, arrays, TOLD))[1][0] for p in (Central(), NoPrivacy()))
        assert isinstance(trusting, Reply)
        assert isinstance(plain, Reply)
        assert (digest(trusting.arrays), trusting.metrics, trusting.n) == (digest(plain.arrays), plain.metrics, plain.n)
    every = CAPABILITIES | Capabilities(extras={"signature"}, requests={"evaluate"})
    assert member(Central()).capabilities == member().capabilities == every
