"""Any task's client in groups: it signs its warm-up, and all else is left to the handler that the task has.

To warm up is to train the test model as the task trains it. Of the result nothing leaves but the signature: no update,
no metric, no state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mutirao.clustering.signatures import add_noise, generator, noise_of
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, Site, failure_of
from mutirao.core.parts import AnyHandler, Many, as_handler
from mutirao.core.sparse_rows import to_dense
from mutirao.errors import Refused
from mutirao.privacy import RELEASES, AtClient, Central, NoPrivacy

WARM, FIT = "warm", "fit"
MOST_TIMES = 10_000  # that a client trains by itself when it is asked
SIGNS = "extras:signature"  # what a handler provides that signs by itself


@dataclass(frozen=True)
class SignatureHandler:
    """A handler around `handler`, the task's own, with privacy and all; `plain`, without, trains the test model."""

    handler: AnyHandler
    plain: AnyHandler
    signature: Any
    told: Mapping[str, Scalar] = field(default_factory=dict)  # how the test model is trained: epochs, rate
    privacy: Any = NoPrivacy()  # what each client does for its own

    @property
    def provides(self) -> frozenset[str]:
        """What the task's handler does, and a signature."""
        return as_handler(self.handler).provides | {SIGNS}

    @property
    def private(self) -> bool:
        """As the task's handler says."""
        return as_handler(self.handler).private

    @property
    def schedule(self) -> Callable[[int], float] | None:
        """The rate of the groups' models from round to round; the test model has one rate."""
        return as_handler(self.handler).schedule

    @property
    def many(self) -> Many | None:
        """For many clients at once, if the task's handler has such a way."""
        return None if as_handler(self.handler).many is None else self._many

    def agreed(self) -> Mapping[str, str]:
        """What all parties must have in common: what the task says."""
        return as_handler(self.handler).agreed()

    def agree(self, request: Request, site: Site) -> None:
        """As the task's handler does."""
        as_handler(self.handler).agree(request, site)

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """As the task's handler does."""
        as_handler(self.handler).check(arrays, population)

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
        if rest and (many := as_handler(self.handler).many) is not None:
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
        inner: dict[int, Request] = {}  # as a rule all have one request, and so it stays
        for request in requests.values():
            inner.setdefault(id(request), self.inner(request))
        fresh = {c: Site(c, sites[c].data) for c in requests}  # a warm-up leaves nothing in a client's state
        many = as_handler(self.plain).many
        asked = {c: inner[id(r)] for c, r in requests.items()}
        return (
            many(asked, fresh)
            if many
            else {c: reply_or_failure(partial(self.plain, asked[c], fresh[c])) for c in asked}
        )

    def permit(self) -> None:
        """Refuse to sign without noise where nothing else may leave."""
        if has_local_privacy(self.privacy) and not self.signature.epsilon:
            raise Refused("privacy", "a signature leaves only with noise, which signature.epsilon says how much of")

    def inner(self, request: Request) -> Request:
        """What the handler is asked: to train the test model."""
        return replace(request, do="train", config={**request.config, **self.told})

    def fit(self, request: Request, site: Site) -> Reply:
        """How a model does on the client's own test data after it has trained it by itself, `times` as in a round."""
        if has_local_privacy(self.privacy):
            raise Refused("privacy", "how a model does that is fitted here is not told")
        told = {k: v for k, v in request.config.items() if k not in ("times", "round")}
        arrays, alone = request.arrays, Site(site.id, site.data, dict(site.state))  # what it keeps stays as it is
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
        """What leaves the client: the signature, with noise if it asks for any."""
        part, after = self.signature, to_dense(request.arrays, made.arrays)
        vector = part(request.arrays, after, find_last_layer(request.arrays))
        table = charge_signature(self.privacy, site, part) if has_local_privacy(self.privacy) else None
        if part.epsilon:
            draw = generator(part.repeatable, int(request.config["seed"]), int(request.config["round"]), site.id)
            vector = add_noise(vector, part.epsilon, part.clip, draw)
        if table is not None:
            site.state[RELEASES] = table
        # Beside a noised signature nothing is told in clear, not even how many samples there are.
        return Reply({}, {"signature": vector.astype(np.float32)}, {}, 1 if part.epsilon else made.n)


def reply_or_failure(answer: Callable[[], Reply]) -> Reply | Failure:
    """A client's answer, or why there is none."""
    try:
        return answer()
    except Exception as error:  # it is this client's failure alone
        return failure_of(error)


def has_local_privacy(privacy: Any) -> bool:
    """Whether nothing but noised updates and signatures may leave a client."""
    return not isinstance(privacy, NoPrivacy | Central)


def charge_signature(privacy: Any, site: Site, signature: Any) -> Any:
    """The site's account with a signature in it; Refused if it cannot be, or the budget does not allow it."""
    if not isinstance(privacy, AtClient):
        raise Refused("privacy", f"{privacy!r} keeps no account that a signature could be entered into")
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
