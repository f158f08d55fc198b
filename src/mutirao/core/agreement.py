"""What all parties must have in common, by digest: told with every request, and compared by each with its own.

A handler says it with `agreed()`, such as `{"frozen": digest}`: weights that do not travel, columns and categories, a
class list. The server's own handler says what is asked for; a site with another one refuses, and both are told.

What is not known beforehand is agreed on before the first round (`agree_on`): clients answer `profile`, the server
joins the answers and sends what came of it with `agree`, and from then on it goes along with every request (`Agreed`).
So a site keeps nothing, and one that comes late or has lost its state needs no second agreement.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from mutirao.config import Scalar
from mutirao.core.arrays import Arrays
from mutirao.core.checks import fault_of_extras, sift
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Wrapper
from mutirao.errors import ConfigError, Refused

log = logging.getLogger("mutirao")

AGREED = "agreed."  # how the names of such settings begin in a request
PROFILE, AGREE = "profile", "agree"
AWAY = {"late", "gone"}  # failures of clients that may come back: they are told again with the next request
SHOWN = 5  # of those who differ, in an error
Join = Callable[[Mapping[ClientId, Reply]], bytes]  # what all agree on, from what each told; the order must not matter


def tell_agreed(agreed: Mapping[str, str]) -> dict[str, Scalar]:
    """What a request says of it.

    >>> tell_agreed({"frozen": "a1b2"})
    {'agreed.frozen': 'a1b2'}
    """
    return {f"{AGREED}{name}": digest for name, digest in agreed.items()}


def hold_agreed(config: Mapping[str, Scalar], own: Mapping[str, str]) -> None:
    """Refused, with its name, if the request speaks of something that this site has not, or has another of."""
    for key, asked in config.items():
        name = key.removeprefix(AGREED)
        if name != key and own.get(name) != asked:
            here = f"here it is {own[name][:12]}" if name in own else "there is none here"
            raise Refused(key, f"{name} {str(asked)[:12]} is agreed on, {here}")


def digest_of(content: bytes) -> str:
    """sha256 of what was agreed on."""
    return hashlib.sha256(content).hexdigest()


def as_extra(name: str, content: bytes) -> Arrays:
    """Bytes as they go along with a request or a reply."""
    return {name: np.frombuffer(content, np.uint8)}


def in_extras(name: str, extras: Arrays) -> bytes:
    """The bytes of that name; empty if there are none."""
    found = extras.get(name)
    return found.tobytes() if found is not None and found.dtype == np.uint8 else b""


class Agreed(Wrapper):
    """A fleet whose every request carries what was agreed on, and its digest."""

    def __init__(self, fleet: Fleet, name: str, content: bytes) -> None:
        super().__init__(fleet)
        self.extras, self.told = as_extra(name, content), tell_agreed({name: digest_of(content)})

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each request with it; clients that share one request still do."""
        made: dict[int, Request] = {}
        for request in requests.values():
            if id(request) not in made:
                config, extras = {**request.config, **self.told}, {**request.extras, **self.extras}
                made[id(request)] = replace(request, config=config, extras=extras)
        return self.fleet.ask({c: made[id(r)] for c, r in requests.items()})


def agree_on(fleet: Fleet, name: str, config: Mapping[str, Scalar], join: Join) -> bytes:
    """What comes of the clients' profiles, as it is sent to all."""
    answers = sift(fleet.ask({c: Request(PROFILE, {}, config) for c in fleet.clients()}), fault_of_extras)
    for client, why in answers.failures.items():
        log.warning("%s told no profile: %s", client, why)
    if not answers.replies:
        raise ConfigError(f"no client told its profile, so that there is no {name}{first_of(answers.failures)}")
    return join(answers.replies)


def find_odd(fleet: Fleet, name: str, config: Mapping[str, Scalar], content: bytes) -> list[ClientId]:
    """Send what is agreed on to every client: those who cannot keep to it, who are told why by their own code.

    One of them cannot stop the others; if they are more than half of those asked, the run is refused.
    """
    asked = {c: Request(AGREE, {}, config) for c in fleet.clients()}
    failures = sift(Agreed(fleet, name, content).ask(asked), fault_of_extras).failures
    odd = {c: str(why) for c, why in failures.items() if why.kind not in AWAY}
    leave_out(name, odd, len(asked))
    return sorted(odd)


def leave_out(name: str, odd: Mapping[ClientId, str], asked: int) -> None:
    """Say of each client why it takes no part; ConfigError if those are more than half of the clients asked."""
    if 2 * len(odd) > asked:
        shown = "; ".join(f"{c}: {why}" for c, why in sorted(odd.items())[:SHOWN])
        raise ConfigError(f"{len(odd)} of {asked} clients have another {name}, or cannot tell: {shown}")
    for client, why in sorted(odd.items()):
        log.warning("%s takes no part: %s", client, why)


def first_of(failures: Mapping[ClientId, Failure]) -> str:
    """The first of these failures, for an error."""
    return next((f"; {client}: {why}" for client, why in sorted(failures.items())), "")
