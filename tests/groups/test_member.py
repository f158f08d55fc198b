"""What a client does in groups: its class map, what it judges by, and what leaves it."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from mutirao.core.fleet import Request, Site
from mutirao.groups.member import Holdout, Member, class_map, held, last_layer, renamed
from mutirao.groups.signature import Bias
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer


def net(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, outputs))


def member() -> Member:
    return Member(cache(lambda outputs: Trainer(lambda: net(outputs), lr=0.1)), 5, Bias(), 3, "0")


def samples(seed: int, labels: list[int]) -> Samples:
    x = np.random.default_rng(seed).normal(size=(len(labels), 4)).astype(np.float32)
    return Samples(x, np.array(labels))


def site(train: list[int], test: list[int]) -> Site:
    return Site("ana", Holdout(samples(0, train), samples(1, test)))


def test_a_class_map_names_the_outputs() -> None:
    assert class_map({"classes": "1,4"}, 5) == [1, 4]
    assert class_map({}, 5) == [0, 1, 2, 3, 4]


def test_samples_are_renamed_and_those_without_an_output_left_out() -> None:
    given = samples(0, [4, 1, 0, 4, 2])
    some = renamed(given, [1, 4], 5)
    x, y = some.batch(slice(0, len(some)))
    assert y.tolist() == [1, 0, 1]
    assert torch.equal(x, given.x[[0, 1, 3]])
    assert held(given, 5).tolist() == [True, True, True, False, True]


def test_judging_is_what_numpy_says_and_known_classes_are_those_held() -> None:
    me, where = member(), site([1, 1, 4], [1, 4, 3, 1, 4, 2])
    names = [1, 3, 4]  # the client holds no 3, and the head no 2
    arrays = me.trainers(3).initial(7)
    metrics = me(Request("evaluate", arrays, {"classes": "1,3,4"}), where).metrics
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
    with pytest.raises(ValueError, match="no samples to judge by"):
        member()(Request("evaluate", member().trainers(5).initial(0)), site([1], []))
    with pytest.raises(ValueError, match="no dense layer"):
        last_layer(nn.Sequential(nn.Conv2d(1, 1, 3)))
    assert last_layer(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == "2"
