"""Any task's handler that signs: what leaves in a warm-up, and that nothing else of the handler changes."""

from typing import Any

import numpy as np
import pytest
from torch import nn

from mutirao.clustering.signature_handler import SignatureHandler, find_last_layer
from mutirao.clustering.signatures import Bias, Projection, Weights
from mutirao.core.arrays import digest
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.needs import Capabilities
from mutirao.errors import Refused
from mutirao.privacy import Local
from mutirao.training.samples import ClientData, Samples
from mutirao.training.trainer import Trainer

TRAINER = Trainer(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), lr=0.1)
FIRST = TRAINER.initial(0)
CONFIG = {"seed": 5, "round": 0}


def site(name: str) -> Site:
    x = np.random.default_rng(len(name)).normal(size=(20, 3)).astype(np.float32)
    held = Samples(x, (x[:, 0] > 0).astype(np.int64))
    return Site(name, ClientData(held, held))


def signing(signature: Any = Bias(), **more: Any) -> SignatureHandler:  # noqa: B008
    return SignatureHandler(TRAINER, TRAINER, signature, {"epochs": 3, "lr": 0.2}, **more)


def test_only_the_signature_of_the_trained_test_model_leaves() -> None:
    here = site("ana")
    reply = signing()(Request("warm", FIRST, CONFIG), here)
    trained = TRAINER(Request("train", FIRST, {**CONFIG, "epochs": 3, "lr": 0.2}), site("ana"))
    np.testing.assert_array_equal(reply.extras["signature"], trained.arrays["2.bias"] - FIRST["2.bias"])
    assert (reply.arrays, list(reply.extras), reply.metrics, reply.n) == ({}, ["signature"], {}, 20)
    assert here.state == {}


@pytest.mark.parametrize("do", ["train", "evaluate", "warm"])
def test_many_at_once_answer_as_one_by_one(do: str) -> None:
    part, request = signing(Projection(16)), Request(do, FIRST, CONFIG)
    assert part.many is not None
    names = ["ana", "bento", "caio!!"]
    together = part.many(dict.fromkeys(names, request), {c: site(c) for c in names})
    for name in names:
        alone, one = part(request, site(name)), together[name]
        assert isinstance(one, Reply)
        assert digest(one.arrays) == digest(alone.arrays)
        assert one.metrics == pytest.approx(alone.metrics)
        assert all(np.array_equal(one.extras[k], v) for k, v in alone.extras.items())


def test_what_is_not_a_warm_up_is_the_handlers_own() -> None:
    request = Request("train", FIRST, {"seed": 1, "round": 2})
    assert digest(signing()(request, site("ana")).arrays) == digest(TRAINER(request, site("ana")).arrays)
    assert signing().capabilities == TRAINER.capabilities | Capabilities(extras={"signature"})


def test_where_nothing_may_leave_without_noise_no_signature_does() -> None:
    private = Local(noise=5.0, clip=1.0)
    part = SignatureHandler(private.at_client(TRAINER), TRAINER, Bias(), {}, private)
    with pytest.raises(Refused, match=r"signature\.epsilon"):
        part(Request("warm", FIRST, CONFIG), site("ana"))
    assert part.many is not None
    answers = part.many({"ana": Request("warm", FIRST, CONFIG)}, {"ana": site("ana")})
    assert isinstance(answers["ana"], Failure)


def test_a_noised_signature_is_charged_and_tells_no_number_of_samples() -> None:
    private, here = Local(noise=5.0, clip=1.0), site("ana")
    part = SignatureHandler(private.at_client(TRAINER), TRAINER, Bias(epsilon=10.0), {}, private)
    first, again = (part(Request("warm", FIRST, CONFIG), here) for _ in range(2))
    assert first.n == again.n == 1
    assert not np.array_equal(first.extras["signature"], again.extras["signature"])  # noise of the system's
    spent = [private.cost(table) for table in (here.state["privacy.releases"],)]
    assert 10 < spent[0] <= 20.1  # two signatures of epsilon 10, accounted together


def test_the_head_is_the_last_dense_layer() -> None:
    assert find_last_layer(FIRST) == "2"
    assert find_last_layer(Trainer(lambda: nn.Linear(3, 2)).initial(0)) == ""
    lone = Trainer(lambda: nn.Linear(3, 2)).initial(0)
    moved = {k: v + 1 for k, v in lone.items()}
    assert Bias()(lone, moved, "").tolist() == [1.0, 1.0]
    assert len(Weights()(lone, moved, "")) == 6
