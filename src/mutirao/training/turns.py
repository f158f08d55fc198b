"""One client after the other: what a handler does for many that gains nothing from seeing them at once."""

from collections.abc import Mapping

from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.parts import AnyHandler


def attempt(handler: AnyHandler, request: Request, site: Site) -> Reply | Failure:
    """One client's answer, or why there is none."""
    try:
        return handler(request, site)
    except Exception as error:  # a client may raise anything: it is its own failure alone
        return failure_of(error)


def answer_in_turn(
    handler: AnyHandler, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
) -> dict[ClientId, Reply | Failure]:
    """What each client answers, sorted by client."""
    return {client: attempt(handler, requests[client], sites[client]) for client in sorted(requests)}
