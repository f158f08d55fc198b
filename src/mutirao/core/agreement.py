"""What all parties must have in common, compared by digest before the first round and with every request.

A handler lists its digests in `agreed()`, such as `{"frozen": digest}`: frozen weights that are not sent,
preprocessing, columns. A client's data may do the same, such as for a class list. The server's own handler gives the
reference.

Before the first round every remote client is asked to `agree`: it compares the digests with its own, and answers only
that they are the same, or refuses. A client that differs, or may not answer, takes no part; it is named with the
reason. A client that was away, or has come back as another node, is asked again before it gets any other request. The
digests are sent with every request all the same, and a site compares them each time.

What is not known in advance is found first (`agree_on`): clients answer `profile`, the server combines the answers, and
the result is sent with every request, beside its digest. So a site stores nothing, and a client that joins late or has
lost its state needs no second agreement.

The installed versions of Python and of the packages on which results depend are reported, too.
"""

import hashlib
import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mutirao.config import Scalar
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Site, Wrapper, traffic
from mutirao.core.handler_wrapper import Forward, HandlerWrapper
from mutirao.core.parts import AnyHandler
from mutirao.core.records import Round
from mutirao.core.validation import fault_of_extras, sift
from mutirao.errors import ConfigError, Refused, TooFewClients

PACKAGES = ("mutirao", "flwr", "torch", "numpy")  # must be the same for results to repeat bit for bit


def versions() -> dict[str, str]:
    """The versions of Python and of these packages, without importing them; empty if not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


log = logging.getLogger("mutirao")

AGREED = "agreed."  # prefix of digests in the config of a request
PROFILE = "profile"
AGREE = "agree"
# what a client may report when it agrees: samples by class, packages
COUNTS = "counts"
VERSIONS = "versions"
AWAY = {"late", "gone"}  # failures of clients that may come back
PAUSED = "paused"  # the rule by which a site refuses all requests for a while
SHOWN = 5  # clients that are named in an error
MOST_COUNTED = 10**12  # of a class: larger counts are not plausible
HINTS = {
    "data": "; this recipe divides one data set: a site with its own data needs cytology, images, ranking or tabular",
    "body": "; are weights and their package the same?",
    "classes": "; do the class folders, or labels, have the same names?",
}
Combine = Callable[[Mapping[ClientId, Reply]], bytes]  # the common content from all profiles, in any order


def agreement_config(agreed: Mapping[str, str]) -> dict[str, Scalar]:
    """The digests as settings of a request.

    >>> agreement_config({"frozen": "a1b2"})
    {'agreed.frozen': 'a1b2'}
    """
    return {f"{AGREED}{name}": digest for name, digest in agreed.items()}


def check_agreed(config: Mapping[str, Scalar], own: Mapping[str, str], must: Collection[str] = ()) -> None:
    """Refuse a request with a digest that this site does not have, or has another of.

    The request has to name all that `must` be agreed on.
    """
    for key, asked in config.items():
        name = key.removeprefix(AGREED)
        if name != key and own.get(name) != asked:
            here = "there is none here"
            if name in own:
                here = f"here it is {own[name][:12]}"
            raise Refused(key, f"{name} {str(asked)[:12]} is agreed on, {here}{HINTS.get(name, '')}")
    for name in sorted(must):
        if AGREED + name not in config:
            raise Refused(AGREED + name, f"the request does not say which {name} is agreed on")


def agreed_of(data: Any) -> dict[str, str]:
    """The digests of a client's data, such as of its class list, if it has any."""
    own = getattr(data, "agreed", None)
    if callable(own):
        return dict(own())
    return {}


def digest_of(content: bytes) -> str:
    """The sha256 digest of some content."""
    return hashlib.sha256(content).hexdigest()


def bytes_to_extra(name: str, content: bytes) -> Arrays:
    """Bytes as an extra of a request or a reply."""
    return {name: np.frombuffer(content, np.uint8)}


def bytes_from_extra(name: str, extras: Arrays) -> bytes:
    """The bytes of the extra of that name; empty if there is none."""
    found = extras.get(name)
    if found is not None and found.dtype == np.uint8:
        return found.tobytes()
    return b""


def json_from_extra(name: str, extras: Arrays) -> dict[str, Any]:
    """The table that a client sent as JSON; empty if there is none that can be read."""
    # A client may send anything: the text is cut, and deeply nested JSON raises RecursionError.
    try:
        found = json.loads(bytes_from_extra(name, extras)[:100_000] or b"{}")
    except (ValueError, RecursionError):
        return {}
    if isinstance(found, dict):
        return found
    return {}


class AgreementFleet(Wrapper):
    """A fleet of the clients that agree: each new client is asked first, and every request carries the digests.

    `digests`: what is agreed on, by name.
    `extras`: content that is sent with every request.
    `config`: settings of the request to agree.
    `ask_clients`: False for clients in the server's process, which have what the server has.
    `spent`: bytes down and up that it took to find the common content; they go into the record of the next round.
    """

    def __init__(
        self,
        fleet: Fleet,
        digests: Mapping[str, str],
        extras: Arrays | None = None,
        config: Mapping[str, Scalar] | None = None,
        ask_clients: bool = True,
        spent: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(fleet)
        self.names = sorted(digests)
        self.digests = agreement_config(digests)
        self.extras = dict(extras or {})
        self.config = dict(config or {})
        self.ask_clients = ask_clients
        self.spent = spent
        self.asked: dict[ClientId, str] = {}  # clients asked since they connected, with their keys
        self.refused: dict[ClientId, Failure] = {}  # clients that take no part until they connect again
        self.silent: set[ClientId] = set()  # clients that were away, and are asked again after the round
        self._unrecorded: dict[ClientId, Failure] = {}
        self._versions: dict[ClientId, dict[str, str]] = {}  # reported since the last round
        self._here: list[ClientId] | None = None
        self._keys: dict[ClientId, str] = {}
        self._left: list[ClientId] = []

    def clients(self) -> list[ClientId]:
        """The clients that are present and agree; the same list while nothing has changed."""
        here = self.fleet.clients()
        if not self.ask_clients:
            return here
        keys = self.fleet.keys()
        if here is not self._here or keys != self._keys:
            present = set(here)
            self.asked = {c: k for c, k in self.asked.items() if c in present and keys.get(c, "") == k}
            if new := [c for c in here if c not in self.asked]:
                self._agree(new, keys)
            left = [c for c in here if c not in self.refused and c not in self.silent]
            # The same list object while nothing has changed: `Roster.meet` then has nothing to do.
            if left != self._left:
                self._left = left
            self._here = here
            self._keys = keys
        return self._left

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each request with the digests; a client that refuses them takes no part from now on."""
        open_to = {c: r for c, r in requests.items() if c not in self.refused}
        answers = self._send(open_to)
        if not self.ask_clients:
            return answers
        for client, why in answers.failures.items():
            if why.kind == "gone":
                self._forget(client)
            elif is_disagreement(why):
                self._refuse(client, why)
        if len(open_to) == len(requests):
            return answers
        known = {c: self.refused[c] for c in requests if c not in open_to}
        return Answers(answers.replies, dict(sorted({**answers.failures, **known}.items())), answers.carried)

    def record(self, done: Round) -> None:
        """Add a row for each client that was refused since the last round; silent clients are asked again."""
        self.fleet.record(done)
        for key, count in zip(("bytes_down", "bytes_up"), self.spent, strict=True):
            done.row[key] = done.row.get(key, 0) + count
        self.spent = 0, 0
        lines = {row["client"] for row in done.clients}
        blank = {"replied": 0, "n": 0, "weight": 0.0, "age": 0}
        for client, why in sorted(self._unrecorded.items()):
            if client not in lines:
                row = {"round": done.row["round"], "client": client, "try": 0, **blank}
                done.clients.append({**row, "failure": str(why), "rejected": ""})
        self._unrecorded = {}
        done.versions.update(sorted(self._versions.items()))
        self._versions = {}
        for client in self.silent:
            self._forget(client)

    def begin(self) -> list[ClientId]:
        """Agree with all present clients; return those that take no part.

        ConfigError if most clients differ, so that one alone cannot stop the others; TooFewClients if none is left. A
        client with a policy that does not allow the question counts as neither.
        """
        left = self.clients()
        differ = {c: why for c, why in self.refused.items() if why.kind != "refused" or is_disagreement(why)}
        shown = "; ".join(f"{c}: {why}" for c, why in sorted((differ or self.refused).items())[:SHOWN])
        if 2 * len(differ) > len(left) + len(differ):
            count = f"{len(differ)} of {len(left) + len(differ)} clients"
            raise ConfigError(f"{count} do not agree on {', '.join(self.names)}: {shown}")
        if self.refused and not left:
            raise TooFewClients(f"none of {len(self.refused)} clients takes part: {shown}")
        return sorted({*self.refused, *self.silent})

    def _agree(self, new: list[ClientId], keys: Mapping[ClientId, str]) -> None:
        """Ask new clients; those that may not answer, or differ, are logged and left out."""
        self.refused = {c: why for c, why in self.refused.items() if c in self.asked}
        self.silent &= self.asked.keys()
        request = Request(AGREE, {}, self.config)
        answers = sift(self._send(dict.fromkeys(new, request)), fault_of_extras)
        self.asked |= {c: keys.get(c, "") for c in new}
        for client, reply in answers.replies.items():
            log_client_report(client, reply.extras)
            if reported := versions_in(reply.extras):
                self._versions[client] = reported
        for client, why in answers.failures.items():
            if is_away(why):
                self.silent.add(client)
                if why.kind == "refused":
                    self._unrecorded[client] = why
                log.warning("%s was asked what it agrees on, and is away: %s", client, why)
            else:
                self._refuse(client, why)

    def _refuse(self, client: ClientId, why: Failure) -> None:
        self.refused[client] = self._unrecorded[client] = why
        self._here = None
        log.warning("%s takes no part: %s", client, why)

    def _forget(self, client: ClientId) -> None:
        self.asked.pop(client, None)
        self._here = None

    def _send(self, requests: Mapping[ClientId, Request]) -> Answers:
        # Clients that share one request still share it afterwards, so that it is serialized once.
        made: dict[int, Request] = {}
        for request in requests.values():
            if id(request) not in made:
                config = {**request.config, **self.digests}
                extras = {**request.extras, **self.extras}
                made[id(request)] = replace(request, config=config, extras=extras)
        asked = {c: made[id(r)] for c, r in requests.items()}
        if asked or self.fleet.awaited():
            return self.fleet.ask(asked)
        return Answers({}, {})


def is_disagreement(why: Failure) -> bool:
    """Whether a client refuses because it differs in what is agreed on."""
    return why.kind == "refused" and why.reason.startswith(AGREED)


def is_away(why: Failure) -> bool:
    """Whether a client may answer later: it cannot be reached, or its operators have paused it."""
    return why.kind in AWAY or (why.kind == "refused" and why.reason.startswith(f"{PAUSED}:"))


def versions_in(extras: Arrays) -> dict[str, str]:
    """The versions of the relevant packages, as a client reports them."""
    reported = json_from_extra(VERSIONS, extras)
    return {name: str(reported[name])[:40] for name in versions() if name in reported}


def log_client_report(client: ClientId, extras: Arrays) -> None:
    """Log what a client reported when it agreed: counts, and other versions, which are not a reason to refuse it."""
    here = versions()
    there = json_from_extra(VERSIONS, extras)
    other = [f"{k} {str(there[k])[:20]!r} ({v} here)" for k, v in here.items() if v and there.get(k, v) != v]
    if other:
        log.warning("%s has other versions, so that results may not repeat bit for bit: %s", client, ", ".join(other))
    counts = {
        str(k)[:40]: v
        for k, v in json_from_extra(COUNTS, extras).items()
        if isinstance(v, int) and 0 <= v < MOST_COUNTED
    }
    if counts:
        shown = ", ".join(f"{name!r} {count}" for name, count in list(counts.items())[:20])
        # A warning, although nothing is wrong, so that the run's log has it.
        log.warning("%s has %d samples: %s", client, sum(counts.values()), shown)


def agree_on(fleet: Fleet, name: str, config: Mapping[str, Scalar], combine: Combine) -> tuple[bytes, tuple[int, int]]:
    """The common content made from the clients' profiles, and how many bytes these took down and up."""
    asked = {c: Request(PROFILE, {}, config) for c in fleet.clients()}
    heard = fleet.ask(asked)
    answers = sift(heard, fault_of_extras)
    for client, why in answers.failures.items():
        log.warning("%s sent no profile: %s", client, why)
    if not answers.replies:
        first = next((f"; {client}: {why}" for client, why in sorted(answers.failures.items())), "")
        raise ConfigError(f"no client sent its profile, so there is no {name}{first}")
    return combine(answers.replies), traffic(asked, heard)


def own_digests(agreed: Mapping[str, str], request: Request) -> dict[str, str]:
    """The site's digests of what a request names; what the request itself carries has the digest of its content."""
    names = [key.removeprefix(AGREED) for key in request.config if key.startswith(AGREED)]
    received = {name: digest_of(bytes_from_extra(name, request.extras)) for name in names if name in request.extras}
    return {name: digest for name, digest in {**received, **agreed}.items() if name in names}


class AgreedHandler(HandlerWrapper):
    """A handler that answers `agree`, and refuses requests that assume something else than what the site has.

    `digests`: the digests that every request must name.
    `basis`: digests that a request may leave out, such as that of a set that is divided among all clients.
    `reports_counts`: whether a client may report its number of samples by class when it agrees, besides its versions.
    """

    def __init__(
        self,
        handler: AnyHandler,
        digests: Mapping[str, str],
        basis: Callable[[], Mapping[str, str]] = dict,
        reports_counts: bool = True,
    ) -> None:
        super().__init__(handler)
        self.digests = digests
        self.basis = basis
        self.reports_counts = reports_counts

    def rewrite(self, request: Request) -> Request:
        """The request without digests: the inner handler need not support agreements."""
        return replace(request, config={k: v for k, v in request.config.items() if not k.startswith(AGREED)})

    def before(self, request: Request, site: Site) -> Forward | Reply:
        """Compare the digests; a request to agree is answered here."""
        own = {**self.digests, **agreed_of(site.data)}
        required = () if request.do == PROFILE else own.keys()
        check_agreed(request.config, own_digests({**self.basis(), **own}, request), required)
        if request.do != AGREE:
            return Forward(site)
        self.handler.agree(self.rewrite(request), site)
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
