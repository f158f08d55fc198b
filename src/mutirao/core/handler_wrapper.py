"""A handler around another one: the base of all that clients do before and after they train.

A wrapper says what happens to one client; this module has the only loop over the clients of a batch, and isolates the
failure of one of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.needs import Capabilities
from mutirao.core.parts import AnyHandler, Many, as_handler


@dataclass(frozen=True)
class Forward:
    """What the inner handler gets, and a note of `before` for `after`.

    Without a request of its own the client gets the one that `rewrite` made for all.

    >>> Forward(Site("ana"), note="noise charged").note
    'noise charged'
    """

    site: Site
    note: Any = None
    request: Request | None = None


class HandlerWrapper:
    """A handler around `handler`; it forwards everything that a subclass does not change.

    Like the inner handler it answers for many clients at once, or only one by one. Private training and personal models
    are not forwarded: they would return a handler without this wrapper, such as updates that nobody masks.

    >>> class Counting(HandlerWrapper):
    ...     def after(self, request, site, reply, note):
    ...         site.state["rounds"] = site.state.get("rounds", np.array(0)) + 1
    ...         return reply
    >>> import numpy as np
    >>> site = Site("ana")
    >>> Counting(lambda request, site: Reply({}, n=3))(Request("train", {}), site).n, int(site.state["rounds"])
    (3, 1)
    """

    def __init__(self, handler: AnyHandler) -> None:
        self.handler = as_handler(handler)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner handler."""
        return self.handler.capabilities

    @property
    def private(self) -> bool:
        """Whether the inner handler protects its clients' privacy itself."""
        return self.handler.private

    @property
    def schedule(self) -> Callable[[int], float] | None:
        """The inner handler's learning rate by round."""
        return self.handler.schedule

    @property
    def many(self) -> Many | None:
        """The answers for many clients at once, if the inner handler can give them; None if not."""
        if self.handler.many is None:
            return None
        return self._many

    def agreed(self) -> Mapping[str, str]:
        """What all clients of the inner handler must have in common."""
        return self.handler.agreed()

    def agree(self, request: Request, site: Site) -> None:
        """The inner handler's check of what was sent with a request to agree."""
        self.handler.agree(request, site)

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """The inner handler's check of model and clients before the first round."""
        self.handler.check(arrays, population)

    def rewrite(self, request: Request) -> Request:
        """The request for the inner handler, which is the same for all clients that share this one."""
        return request

    def before(self, request: Request, site: Site) -> Forward | Reply:
        """What the inner handler gets for this client, or an answer without it. Refused refuses this client alone."""
        return Forward(site)

    def after(self, request: Request, site: Site, reply: Reply, note: Any) -> Reply:
        """The answer, from the inner handler's reply to what `before` forwarded with this note."""
        return reply

    def __call__(self, request: Request, site: Site) -> Reply:
        """One client's answer."""
        begun = self.before(request, site)
        if isinstance(begun, Reply):
            return begun
        reply = self.handler(begun.request or self.rewrite(request), begun.site)
        return self.after(request, site, require_reply(reply), begun.note)

    def _many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        outcomes: dict[ClientId, Reply | Failure] = {}
        forwarded: dict[ClientId, Forward] = {}
        # Rewritten once for each request and not for each client: the engine trains those together that share one.
        rewritten: dict[int, Request] = {}
        inner: dict[ClientId, Request] = {}
        for client, request in requests.items():
            try:
                begun = self.before(request, sites[client])
                if isinstance(begun, Reply):
                    outcomes[client] = begun
                    continue
                if begun.request is None and id(request) not in rewritten:
                    rewritten[id(request)] = self.rewrite(request)
                inner[client] = begun.request or rewritten[id(request)]
                forwarded[client] = begun
            except Exception as error:  # a failure of this client alone
                outcomes[client] = failure_of(error)
        many = self.handler.many
        if not forwarded or many is None:
            return outcomes
        answers = many(inner, {c: begun.site for c, begun in forwarded.items()})
        for client, answer in answers.items():
            if client not in forwarded:
                continue
            if isinstance(answer, Failure):
                outcomes[client] = answer
                continue
            try:
                reply = require_reply(answer)
                outcomes[client] = self.after(requests[client], sites[client], reply, forwarded[client].note)
            except Exception as error:
                outcomes[client] = failure_of(error)
        return outcomes


def require_reply(answer: Any) -> Reply:
    """The answer, if it is a Reply: anything else could not be masked, noised or encoded, and must not leave."""
    if isinstance(answer, Reply):
        return answer
    raise TypeError(f"the handler answered with {type(answer).__name__}, not with a Reply")
