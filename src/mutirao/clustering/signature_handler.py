"""The client of any task in groups: it sends a signature of its warm-up, and the task's handler does everything else.

The warm-up trains the test model as the task does. Only the signature of the result leaves the client: no update, no
metric, no state.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mutirao.clustering.signatures import add_noise, generator, noise_of
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, Site, failure_of
from mutirao.core.handler_wrapper import HandlerWrapper
from mutirao.core.needs import Capabilities
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.core.sparse_rows import to_dense
from mutirao.errors import Refused
from mutirao.privacy import RELEASES, AtClient, Central, NoPrivacy

WARM = "warm"
FIT = "fit"
MOST_TIMES = 10_000  # rounds that a client may be asked to train alone
SIGNS = Capabilities(extras={"signature"})  # of handlers that send signatures


class SignatureHandler(HandlerWrapper):
    """Wraps the task's own `handler`, with its privacy; `plain`, the same without privacy, trains the test model.

    `warm_up_config`: epochs and learning rate of the warm-up. `privacy`: the client's own privacy mechanism.
    """

    def __init__(
        self,
        handler: AnyHandler,
        plain: AnyHandler,
        signature: Any,
        warm_up_config: Mapping[str, Scalar] | None = None,
        privacy: Any = None,
    ) -> None:
        super().__init__(handler)
        self.plain = plain
        self.signature = signature
        self.warm_up_config = dict(warm_up_config or {})
        self.privacy = privacy or NoPrivacy()

    @property
    def capabilities(self) -> Capabilities:
        """Those of the task's handler, and a signature."""
        return self.handler.capabilities | SIGNS

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer to one request."""
        if request.do == FIT:
            return self.fit(request, site)
        if request.do != WARM:
            return self.handler(request, site)
        self.permit()
        return self.sign(request, site, self.plain(self.inner(request), Site(site.id, site.data)))

    def _many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        rest = {c: r for c, r in requests.items() if r.do not in (WARM, FIT)}
        out: dict[ClientId, Reply | Failure] = {
            c: reply_or_failure(partial(self.fit, r, sites[c])) for c, r in requests.items() if r.do == FIT
        }
        if rest and (many := self.handler.many) is not None:
            out |= many(rest, {c: sites[c] for c in rest})
        warm = {c: r for c, r in requests.items() if r.do == WARM}
        made = self._warm(warm, sites) if warm else {}
        for client, reply in made.items():
            out[client] = reply
            if isinstance(reply, Reply):
                out[client] = reply_or_failure(partial(self.sign, warm[client], sites[client], reply))
        return dict(sorted(out.items()))

    def _warm(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> Mapping[ClientId, Reply | Failure]:
        try:
            self.permit()
        except Refused as error:
            return dict.fromkeys(requests, failure_of(error))
        # Clients that share one request go on sharing it, so that an engine may train them together.
        inner: dict[int, Request] = {}
        for request in requests.values():
            inner.setdefault(id(request), self.inner(request))
        fresh = {c: Site(c, sites[c].data) for c in requests}  # a warm-up does not change a client's state
        many = as_handler(self.plain).many
        asked = {c: inner[id(r)] for c, r in requests.items()}
        if many:
            return many(asked, fresh)
        return {c: reply_or_failure(partial(self.plain, asked[c], fresh[c])) for c in asked}

    def permit(self) -> None:
        """Refuse a signature without noise where only noised updates may leave."""
        if has_local_privacy(self.privacy) and not self.signature.epsilon:
            raise Refused("privacy", "signatures need noise with this privacy: set signature.epsilon")

    def inner(self, request: Request) -> Request:
        """The request to the handler: to train the test model."""
        return replace(request, do="train", config={**request.config, **self.warm_up_config})

    def fit(self, request: Request, site: Site) -> Reply:
        """Train a model alone for `times` rounds, and report its metrics on the client's own test data."""
        if has_local_privacy(self.privacy):
            raise Refused("privacy", "metrics of fitted models are not reported")
        told = {k: v for k, v in request.config.items() if k not in ("times", "round")}
        # a copy: the state must not change
        arrays = request.arrays
        alone = Site(site.id, site.data, dict(site.state))
        times = request.config.get("times", 0)
        if not isinstance(times, int) or not 0 <= times <= MOST_TIMES:
            raise Refused("told.times", f"it is {str(times)[:40]!r}, but must be a whole number up to {MOST_TIMES}")
        for number in range(1, 1 + times):
            asked = replace(request, do="train", arrays=arrays, config={**told, "round": number})
            arrays = to_dense(arrays, self.plain(asked, alone).arrays)
        asked = replace(request, do="evaluate", arrays=arrays, config={**told, "round": request.config["round"]})
        found = self.plain(asked, alone)
        return Reply({}, metrics=found.metrics, n=found.n)

    def sign(self, request: Request, site: Site, made: Reply) -> Reply:
        """The reply with the signature, and noise if it has an epsilon."""
        part = self.signature
        after = to_dense(request.arrays, made.arrays)
        vector = part(request.arrays, after, find_last_layer(request.arrays))
        table = charge_signature(self.privacy, site, part) if has_local_privacy(self.privacy) else None
        if part.epsilon:
            draw = generator(part.repeatable, int(request.config["seed"]), int(request.config["round"]), site.id)
            vector = add_noise(vector, part.epsilon, part.clip, draw)
        if table is not None:
            site.state[RELEASES] = table
        n = made.n
        if part.epsilon:
            # With a noised signature nothing is sent in the clear, not even the number of samples.
            n = 1
        return Reply({}, {"signature": vector.astype(np.float32)}, {}, n)


def reply_or_failure(answer: Callable[[], Reply]) -> Reply | Failure:
    """A client's reply, or its failure."""
    try:
        return answer()
    except Exception as error:  # only this client fails
        return failure_of(error)


def has_local_privacy(privacy: Any) -> bool:
    """Whether nothing but noised updates and signatures may leave a client."""
    return not isinstance(privacy, NoPrivacy | Central)


def charge_signature(privacy: Any, site: Site, signature: Any) -> Any:
    """The site's privacy account with a signature added; Refused without an account or above the budget."""
    if not isinstance(privacy, AtClient):
        raise Refused("privacy", f"{privacy!r} has no privacy account for signatures")
    return privacy.charge(site, noise_of(signature), 1.0, 1)


def find_last_layer(arrays: Arrays) -> str:
    """The last dense layer, by its arrays: the last two-dimensional `NAME.weight` with a `NAME.bias` of its length."""
    found = ""
    for name, array in arrays.items():
        layer, _, last = name.rpartition(".")
        bias = arrays.get(f"{layer}.bias".lstrip("."))
        if last == "weight" and array.ndim == 2 and bias is not None and bias.shape == array.shape[:1]:
            found = layer
    return found
