import json

import numpy as np
import pytest

from mutirao.core.agreement import (
    AgreedHandler,
    agreement_config,
    bytes_from_extra,
    bytes_to_extra,
    digest_of,
    own_digests,
)
from mutirao.core.fleet import Reply, Request, Site
from mutirao.errors import Refused
from mutirao.training.samples import ClientData, agreed_classes

HELD = ClientData(
    (np.zeros((4, 2), np.float32), np.array([0, 0, 1, 0])), (np.zeros((1, 2), np.float32), np.array([1])), ("a", "b")
)
CLASSES = agreed_classes(("a", "b"))


def seen(request: Request, site: Site) -> Reply:
    return Reply({}, bytes_to_extra("config", json.dumps(dict(request.config)).encode()), n=3)


def ask(do: str, told: dict[str, str], sworn: AgreedHandler) -> Reply:
    return sworn(Request(do, {}, {"round": 1, **agreement_config(told)}), Site("ana", HELD))


def test_a_request_on_the_same_ground_is_done_and_the_handler_need_not_know_of_agreements() -> None:
    sworn = AgreedHandler(seen, {"body": "b1"}, lambda: {"data": "d1"})
    for told in ({"body": "b1", **CLASSES}, {"body": "b1", "data": "d1", **CLASSES}):
        assert json.loads(bytes_from_extra("config", ask("train", told, sworn).extras)) == {"round": 1}


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        ({"body": "b2", **CLASSES}, "agreed.body"),
        ({"body": "b1", **agreed_classes(("a", "columnar_normal"))}, "agreed.classes"),
        ({"body": "b1", **agreed_classes(("b", "a"))}, "agreed.classes"),
        ({"body": "b1", "data": "d2", **CLASSES}, "agreed.data"),
        ({"body": "b1", "columns": "c1", **CLASSES}, "agreed.columns"),
        ({"body": "b1"}, "agreed.classes"),  # omitted
        (CLASSES, "agreed.body"),
        ({}, "agreed.body"),
    ],
)
@pytest.mark.parametrize("do", ["train", "evaluate", "agree"])
def test_a_request_on_other_ground_or_on_none_is_refused_by_name(do: str, told: dict[str, str], rule: str) -> None:
    with pytest.raises(Refused) as refused:
        ask(do, told, AgreedHandler(seen, {"body": "b1"}, lambda: {"data": "d1"}))
    assert refused.value.rule == rule


def test_whoever_agrees_tells_its_versions_and_counts_unless_its_training_is_private() -> None:
    told = {"body": "b1", **CLASSES}
    reply = ask("agree", told, AgreedHandler(seen, {"body": "b1"}))
    assert (reply.arrays, reply.metrics, reply.n) == ({}, {}, 1)
    assert json.loads(bytes_from_extra("counts", reply.extras)) == {"a": 3, "b": 2}
    assert "python" in json.loads(bytes_from_extra("versions", reply.extras))
    assert list(ask("agree", told, AgreedHandler(seen, {"body": "b1"}, reports_counts=False)).extras) == ["versions"]


def test_what_came_with_a_request_is_known_by_its_own_digest_and_never_by_what_the_request_says_of_it() -> None:
    told, extras = agreement_config({"schema": digest_of(b"one"), "body": "b2"}), bytes_to_extra("schema", b"another")
    found = own_digests({"body": "b1", "unasked": "u"}, Request("train", {}, told, extras))
    assert found == {"schema": digest_of(b"another"), "body": "b1"}
    with pytest.raises(Refused, match=r"agreed\.schema"):
        AgreedHandler(seen, {})(Request("train", {}, told, extras), Site("ana"))
