import doctest
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mutirao.clustering.signature_handler import SignatureHandler
from mutirao.compression.int8 import Int8
from mutirao.compression.methods import EncodingHandler
from mutirao.core import handler_wrapper
from mutirao.core.agreement import AgreedHandler
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.handler_wrapper import Forward, HandlerWrapper
from mutirao.core.needs import Capabilities
from mutirao.core.parts import Handler, as_handler
from mutirao.errors import ConfigError, Refused
from mutirao.personalization import FedPer
from mutirao.privacy import DPSGD, Local, LocalPrivacyHandler
from mutirao.robustness.attacks import Attacked, SignFlip
from mutirao.simulation.drift import DriftContext, DriftHandler, Swap

NAMES = ("ana", "bia", "caio")
ABLE = Capabilities(metrics={"loss"}, config={"mu"})


class Inner:
    """A handler that has something of its own for everything a handler may have."""

    capabilities = ABLE
    private = False

    def __init__(self) -> None:
        self.batches: list[dict[str, Request]] = []
        self.agreements: list[str] = []

    def schedule(self, round: int) -> float:
        return 0.5**round

    def agreed(self) -> Mapping[str, str]:
        return {"frozen": "f1"}

    def agree(self, request: Request, site: Site) -> None:
        self.agreements.append(site.id)

    def check(self, arrays: Any, population: Any) -> None:
        raise ConfigError("these clients cannot train this model")

    def private_training(self, privacy: Any) -> Any:
        return ("private", privacy)

    def personal_training(self, personal: Any) -> Any:
        return ("personal", personal)

    def __call__(self, request: Request, site: Site) -> Reply:
        return Reply({"w": request.arrays["w"] + site.data}, metrics={"loss": 1.0}, n=2)

    def many(self, requests: Mapping[str, Request], sites: Mapping[str, Site]) -> dict[str, Reply | Failure]:
        self.batches.append(dict(requests))
        return {c: self(requests[c], sites[c]) for c in requests}


class OneByOne(Inner):
    many = None  # type: ignore[assignment]


def request() -> Request:
    return Request("train", {"w": np.zeros(2)}, {"seed": 0, "round": 1})


def sites() -> dict[str, Site]:
    return {c: Site(c, float(i)) for i, c in enumerate(NAMES)}


WRAPPERS = {
    "plain": HandlerWrapper,
    "agreement": lambda inner: AgreedHandler(inner, {}),
    "compression": lambda inner: EncodingHandler(inner, Int8()),
    "drift": lambda inner: DriftHandler(inner, Swap(at=3), DriftContext(dict.fromkeys(NAMES, 0.0), 0)),
    "privacy": lambda inner: LocalPrivacyHandler(inner, Local()),
    "signature": lambda inner: SignatureHandler(inner, inner, None),
    "attack": lambda inner: Attacked(inner, frozenset({"ana"}), SignFlip()),
}


def test_the_example_holds() -> None:
    result = doctest.testmod(handler_wrapper)
    assert result.attempted
    assert result.failed == 0


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_forwards_what_it_does_not_change(name: str) -> None:
    inner = Inner()
    wrapper = WRAPPERS[name](inner)
    wrapper.agree(request(), Site("ana"))
    assert inner.agreements == ["ana"]  # the handler that encodes had none of this, and so agreed to anything
    assert wrapper.agreed() == {"frozen": "f1"}
    assert wrapper.schedule(2) == 0.25
    assert wrapper.capabilities.config == ABLE.config
    with pytest.raises(ConfigError, match="these clients cannot train this model"):
        wrapper.check({}, {})


def test_a_wrapper_has_every_attribute_of_a_handler_but_those_that_would_drop_it() -> None:
    wanted = {name for name in vars(Handler) if not name.startswith("_")}
    there = {name for name in vars(HandlerWrapper) if not name.startswith("_")}
    assert wanted - there == {"private_training", "personal_training"}


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_private_or_personal_training_drops_a_wrapper(name: str) -> None:
    wrapper = as_handler(WRAPPERS[name](Inner()))
    with pytest.raises(ConfigError, match="is for tasks whose clients are a Trainer"):
        wrapper.private_training(DPSGD())
    with pytest.raises(ConfigError, match="is for tasks whose clients are a Trainer"):
        wrapper.personal_training(FedPer())


class Doubling(HandlerWrapper):
    """Rewrites the request, answers for one client itself, and fails for another before or after."""

    def __init__(self, handler: Any, own: str = "", before: str = "", after: str = "") -> None:
        super().__init__(handler)
        self.own = own
        self.failing = (before, after)
        self.rewrites = 0

    def rewrite(self, request: Request) -> Request:
        self.rewrites += 1
        return Request(request.do, {"w": request.arrays["w"] + 10}, request.config)

    def before(self, request: Request, site: Site) -> Forward | Reply:
        assert not request.arrays["w"].any()  # as the server sent it
        if site.id == self.failing[0]:
            raise Refused("asked.requests", "not here")
        if site.id == self.own:
            return Reply({}, n=7)
        return Forward(Site(site.id, 2 * site.data, site.state), note=site.id)

    def after(self, request: Request, site: Site, reply: Reply, note: Any) -> Reply:
        assert note == site.id
        if site.id == self.failing[1]:
            raise ValueError("a bug")
        return Reply(reply.arrays, metrics={"noted": 1.0}, n=reply.n)


def test_one_client_and_many_get_the_same_and_one_request_is_rewritten_once() -> None:
    inner = Inner()
    wrapper = Doubling(inner, own="bia")
    shared = request()
    together = wrapper.many(dict.fromkeys(NAMES, shared), sites())  # type: ignore[misc]
    assert wrapper.rewrites == 1
    assert len({id(r) for r in inner.batches[0].values()}) == 1  # an engine trains them together
    assert list(inner.batches[0]) == ["ana", "caio"]
    for client, site in sites().items():
        alone = Doubling(OneByOne(), own="bia")(shared, site)
        found = together[client]
        assert isinstance(found, Reply)
        assert (alone.n, alone.metrics) == (found.n, found.metrics)
        for name, array in alone.arrays.items():
            np.testing.assert_array_equal(found.arrays[name], array)
    assert Doubling(OneByOne()).many is None


def test_the_failure_of_one_client_leaves_the_others_alone() -> None:
    wrapper = Doubling(Inner(), before="ana", after="caio")
    outcomes = wrapper.many(dict.fromkeys(NAMES, request()), sites())  # type: ignore[misc]
    kinds = {c: o.kind if isinstance(o, Failure) else "replied" for c, o in outcomes.items()}
    assert kinds == {"ana": "refused", "bia": "replied", "caio": "raised"}


def test_nobody_is_asked_if_all_are_refused() -> None:
    inner = Inner()
    outcomes = Doubling(inner, before="ana").many({"ana": request()}, sites())  # type: ignore[misc]
    assert isinstance(outcomes["ana"], Failure)
    assert inner.batches == []


def test_what_is_no_reply_goes_no_further() -> None:
    with pytest.raises(TypeError, match="the handler answered with list, not with a Reply"):
        HandlerWrapper(lambda request, site: [1.0])(request(), Site("ana"))  # type: ignore[arg-type, return-value]
    together = Doubling(Sloppy()).many(dict.fromkeys(NAMES, request()), sites())  # type: ignore[misc]
    reasons = {str(outcome) for outcome in together.values()}
    assert reasons == {"raised: TypeError: the handler answered with list, not with a Reply"}


class Sloppy(Inner):
    def many(self, requests: Mapping[str, Request], sites: Mapping[str, Site]) -> dict[str, Any]:
        return {client: [1.0] for client in requests}
