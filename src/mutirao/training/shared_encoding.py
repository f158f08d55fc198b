"""What clients that agree on something before they train have in common: it comes with each request, and none keeps it.

What all agree on is bytes (a schema of tables, a scale of features) beside their digest; a client reads them, makes of
its data what they say, and hands the bare request on to a trainer.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mutirao.core.agreement import AGREE, AGREED, PROFILE, bytes_from_extra, check_agreed, digest_of
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.errors import Refused

Plan = TypeVar("Plan", bound=Hashable)  # what the bytes say


def agreed_content(request: Request, name: str, own: bytes) -> bytes:
    """What goes with a request under that name, if it is what was agreed on; a party with its own takes no other."""
    content = bytes_from_extra(name, request.extras) or own
    if not content:
        raise Refused(AGREED + name, f"no {name} came with the request, and there is none here")
    check_agreed({k: v for k, v in request.config.items() if k == AGREED + name}, {name: digest_of(content)})
    if own:
        check_agreed({AGREED + name: digest_of(content)}, {name: digest_of(own)})
    return content


def without_agreement(request: Request, name: str) -> Request:
    """The request as a trainer understands it, without what was agreed on."""
    config = {k: v for k, v in request.config.items() if k != AGREED + name}
    return replace(request, config=config, extras={k: v for k, v in request.extras.items() if k != name})


def answer_many(
    alone: AnyHandler,
    prepare: Callable[[Request, Site], tuple[Plan, Request, Site]],
    trainer: Callable[[Plan], AnyHandler],
    requests: Mapping[ClientId, Request],
    sites: Mapping[ClientId, Site],
    is_alone: Callable[[Request, Site], bool] = lambda request, site: request.do in (PROFILE, AGREE),
) -> dict[ClientId, Any]:
    """The same answers as one by one, all clients of one plan at once; `alone` answers what no trainer is asked."""
    out: dict[ClientId, Reply | Failure] = {}
    ready: dict[Plan, tuple[dict[ClientId, Request], dict[ClientId, Site]]] = {}
    # Clients with one request are judged in one pass
    shared: dict[int, Request] = {}
    for client, request in sorted(requests.items()):
        try:
            if is_alone(request, sites[client]):
                out[client] = alone(request, sites[client])
                continue
            plan, asked, samples = prepare(request, sites[client])
        except Exception as error:  # it is this client's failure alone
            out[client] = failure_of(error)
            continue
        asking, at = ready.setdefault(plan, ({}, {}))
        asking[client] = shared.setdefault(id(request), asked)
        at[client] = samples
    for plan, (asking, at) in ready.items():
        many = as_handler(trainer(plan)).many
        out |= many(asking, at) if many is not None else {}
    return dict(sorted(out.items()))
