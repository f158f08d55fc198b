"""Data encodings that clients agree on before training, such as a table schema; each request carries the encoding.

The agreed content is bytes with a digest. A client decodes it, encodes its data accordingly, and passes the request
without the content on to a trainer. No client has to keep it.
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
    """The agreed content under that name in a request; a party with content of its own accepts no other."""
    content = bytes_from_extra(name, request.extras) or own
    if not content:
        raise Refused(AGREED + name, f"no {name} came with the request, and there is none here")
    check_agreed({k: v for k, v in request.config.items() if k == AGREED + name}, {name: digest_of(content)})
    if own:
        check_agreed({AGREED + name: digest_of(content)}, {name: digest_of(own)})
    return content


def without_agreement(request: Request, name: str) -> Request:
    """The request without the agreed content, as a trainer expects it."""
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
    """The replies of many clients, trained together by plan; `alone` answers requests that involve no trainer."""
    out: dict[ClientId, Reply | Failure] = {}
    ready: dict[Plan, tuple[dict[ClientId, Request], dict[ClientId, Site]]] = {}
    # Clients with the same request are evaluated in one pass.
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
        if many is not None:
            out |= many(asking, at)
    return dict(sorted(out.items()))
