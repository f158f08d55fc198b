"""A site's side of the agreement: a handler around a handler that looks at what the site has before it does a thing."""

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
    """What a site has of what a request speaks of; what came with the request is known by the digest of what came."""
    told = [key.removeprefix(AGREED) for key in request.config if key.startswith(AGREED)]
    came = {name: digest_of(content_of(name, request.extras)) for name in told if name in request.extras}
    return {name: digest for name, digest in {**came, **agreed}.items() if name in told}


@dataclass(frozen=True)
class AgreedHandler:
    """A handler that answers `agree`, and refuses whatever builds on something else than what the site has.

    `agreed` is what a request must speak of; of the `basis`, such as a set that is dealt to all, it may say nothing.
    `tells`: whether a client may tell how many samples of each class it has, besides its versions, when it agrees.
    """

    handler: AnyHandler
    agreed: Mapping[str, str]
    basis: Callable[[], Mapping[str, str]] = dict
    tells: bool = True

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer of the handler, which need not know of agreements."""
        held = {**self.agreed, **agreed_of(site.data)}
        check_agreed(
            request.config,
            own_digests({**self.basis(), **held}, request),
            () if request.do == PROFILE else held.keys(),
        )
        config = {k: v for k, v in request.config.items() if not k.startswith(AGREED)}
        plain = replace(request, config=config)
        if request.do != AGREE:
            return self.handler(plain, site)
        as_handler(self.handler).agree(plain, site)
        return Reply({}, self.tell(site), n=1)

    def tell(self, site: Site) -> Arrays:
        """What may be told besides; a policy says whether it leaves."""
        told: dict[str, Mapping[str, object]] = {VERSIONS: versions()}
        counted = getattr(site.data, "counts", None)
        if self.tells and callable(counted) and (counts := counted()):
            told[COUNTS] = counts
        return {
            k: v for name, facts in told.items() for k, v in bytes_to_extra(name, json.dumps(facts).encode()).items()
        }
