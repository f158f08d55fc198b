"""The client's side of the agreement: a handler that compares digests before it answers a request."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mutirao.core.agreement import (
    AGREE,
    AGREED,
    COUNTS,
    PROFILE,
    VERSIONS,
    agreed_of,
    bytes_to_extra,
    check_agreed,
    digest_of,
)
from mutirao.core.agreement import bytes_from_extra as content_of
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.core.versions import versions


def own_digests(agreed: Mapping[str, str], request: Request) -> dict[str, str]:
    """The site's digests of what a request names; what the request itself carries has the digest of its content."""
    names = [key.removeprefix(AGREED) for key in request.config if key.startswith(AGREED)]
    received = {name: digest_of(content_of(name, request.extras)) for name in names if name in request.extras}
    return {name: digest for name, digest in {**received, **agreed}.items() if name in names}


@dataclass(frozen=True)
class AgreedHandler:
    """A handler that answers `agree`, and refuses requests that assume something else than what the site has.

    `agreed`: the digests that every request must name.
    `basis`: digests that a request may leave out, such as that of a set that is divided among all clients.
    `reports_counts`: whether a client may report its number of samples by class when it agrees, besides its versions.
    """

    handler: AnyHandler
    agreed: Mapping[str, str]
    basis: Callable[[], Mapping[str, str]] = dict
    reports_counts: bool = True

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer of the handler, which need not support agreements."""
        own = {**self.agreed, **agreed_of(site.data)}
        required = () if request.do == PROFILE else own.keys()
        check_agreed(request.config, own_digests({**self.basis(), **own}, request), required)
        config = {k: v for k, v in request.config.items() if not k.startswith(AGREED)}
        plain = replace(request, config=config)
        if request.do != AGREE:
            return self.handler(plain, site)
        as_handler(self.handler).agree(plain, site)
        return Reply({}, self.report(site), n=1)

    def report(self, site: Site) -> Arrays:
        """The versions and counts that a client may report; a policy decides whether they leave the site."""
        facts: dict[str, Mapping[str, object]] = {VERSIONS: versions()}
        counts = getattr(site.data, "counts", None)
        if self.reports_counts and callable(counts) and (found := counts()):
            facts[COUNTS] = found
        extras: Arrays = {}
        for name, table in facts.items():
            extras |= bytes_to_extra(name, json.dumps(table).encode())
        return extras
