"""What all parties must have in common, by digest: told with every request, and compared by each with its own.

A handler says it with `agreed()`, such as `{"frozen": digest}`: weights that do not travel, preprocessing, columns; a
client's data say it in the same way, such as their class list. The server's own handler says what is asked for.

Before the first round every client that is another party is asked to `agree`: it looks at what it has, and answers with
no more than that it is the same, or refuses (`core/agreed_handler.py`). Whoever differs, or may not answer, takes no
part, by name and with the reason. Whoever was away, or has come back as another node, is asked again before it is asked
for anything else. The digests go with every request all the same, and a site looks at its own each time.

What is not known beforehand is found before that (`agree_on`): clients answer `profile`, the server joins the answers,
and what came of it goes with every request, beside its digest. So a site keeps nothing, and one that comes late or has
lost its state needs no second agreement.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mutirao.config import Scalar
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Wrapper, traffic
from mutirao.core.records import Round
from mutirao.core.validation import fault_of_extras, sift
from mutirao.core.versions import versions
from mutirao.errors import ConfigError, Refused, TooFewClients

log = logging.getLogger("mutirao")

AGREED = "agreed."  # how the names of such settings begin in a request
PROFILE, AGREE = "profile", "agree"
COUNTS, VERSIONS = "counts", "versions"  # what a client may tell when it agrees: samples by class, packages
AWAY = {"late", "gone"}  # failures of clients that may come back
PAUSED = "paused"  # the rule by which a site refuses everything for a while
SHOWN = 5  # of those who differ, in an error
MANY = 10**12  # samples of a class that nobody has
HINTS = {
    "data": "; one set is dealt to all here: a site with data of its own needs cytology, images, ranking or tabular",
    "body": "; are weights and their package the same?",
    "classes": "; are the class folders, or labels, called the same?",
}
Join = Callable[[Mapping[ClientId, Reply]], bytes]  # what all agree on, from what each told; the order must not matter


def agreement_config(agreed: Mapping[str, str]) -> dict[str, Scalar]:
    """What a request says of it.

    >>> agreement_config({"frozen": "a1b2"})
    {'agreed.frozen': 'a1b2'}
    """
    return {f"{AGREED}{name}": digest for name, digest in agreed.items()}


def check_agreed(config: Mapping[str, Scalar], own: Mapping[str, str], must: Collection[str] = ()) -> None:
    """Refused, with its name, if the request speaks of something that this site has not, or has another of.

    Of what `must` be agreed on it has to speak.
    """
    for key, asked in config.items():
        name = key.removeprefix(AGREED)
        if name != key and own.get(name) != asked:
            here = f"here it is {own[name][:12]}" if name in own else "there is none here"
            raise Refused(key, f"{name} {str(asked)[:12]} is agreed on, {here}{HINTS.get(name, '')}")
    for name in sorted(must):
        if AGREED + name not in config:
            raise Refused(AGREED + name, f"the request does not say which {name} is agreed on")


def agreed_of(data: Any) -> dict[str, str]:
    """What a client's data say of themselves, by digest: a class list, if they have one."""
    said = getattr(data, "agreed", None)
    return dict(said()) if callable(said) else {}


def digest_of(content: bytes) -> str:
    """sha256 of what was agreed on."""
    return hashlib.sha256(content).hexdigest()


def bytes_to_extra(name: str, content: bytes) -> Arrays:
    """Bytes as they go along with a request or a reply."""
    return {name: np.frombuffer(content, np.uint8)}


def bytes_from_extra(name: str, extras: Arrays) -> bytes:
    """The bytes of that name; empty if there are none."""
    found = extras.get(name)
    return found.tobytes() if found is not None and found.dtype == np.uint8 else b""


def json_from_extra(name: str, extras: Arrays) -> dict[str, Any]:
    """The table that a client tells as JSON; empty if there is none that can be read."""
    try:
        found = json.loads(bytes_from_extra(name, extras)[:100_000] or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class AgreementFleet(Wrapper):
    """A fleet of those who agree: whoever is new to it is asked first, and every request carries what is agreed on.

    `told` are digests by name, `extras` what goes along besides. With `asks` False nobody is asked: clients of this
    very process have what the server has, and refuse by themselves what they have otherwise. `spent` are the bytes,
    down and up, that it took to find what is agreed on: they go into the record of the next round.
    """

    def __init__(
        self,
        fleet: Fleet,
        told: Mapping[str, str],
        extras: Arrays | None = None,
        config: Mapping[str, Scalar] | None = None,
        ask_clients: bool = True,
        spent: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(fleet)
        self.names, self.told, self.extras = sorted(told), agreement_config(told), dict(extras or {})
        self.config = dict(config or {})
        self.ask_clients = ask_clients
        self.spent = spent
        self.asked: dict[ClientId, str] = {}  # who was asked since it came, and the key that it had
        self.refused: dict[ClientId, Failure] = {}  # who takes no part until it comes anew
        self.silent: set[ClientId] = set()  # who was away when asked, and is asked again after the round
        self._unrecorded: dict[ClientId, Failure] = {}
        self._versions: dict[ClientId, dict[str, str]] = {}  # told since the last round
        self._here: list[ClientId] | None = None
        self._keys: dict[ClientId, str] = {}
        self._left: list[ClientId] = []

    def clients(self) -> list[ClientId]:
        """Who is there and agrees; the same list while nothing changed."""
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
            self._left = self._left if left == self._left else left
            self._here, self._keys = here, keys
        return self._left

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each request with what is agreed on; whoever refuses it for that takes no part from now on."""
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
        """Add a line for each client that was refused since the last round; the silent ones are asked again."""
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
        """Agree with all who are here; who takes no part. ConfigError if most differ, TooFewClients if none is left.

        One cannot stop the others. One whose policy does not allow the question says nothing of who is right.
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
        """Ask those who are new; those who may not answer, or differ, are named and left out."""
        self.refused = {c: why for c, why in self.refused.items() if c in self.asked}
        self.silent &= self.asked.keys()
        request = Request(AGREE, {}, self.config)
        answers = sift(self._send(dict.fromkeys(new, request)), fault_of_extras)
        self.asked |= {c: keys.get(c, "") for c in new}
        for client, reply in answers.replies.items():
            log_client_report(client, reply.extras)
            if told := versions_in(reply.extras):
                self._versions[client] = told
        for client, why in answers.failures.items():
            if is_away(why):
                self.silent.add(client)
                self._unrecorded |= {client: why} if why.kind == "refused" else {}
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
        made: dict[int, Request] = {}  # clients that share one request still do
        for request in requests.values():
            if id(request) not in made:
                config, extras = {**request.config, **self.told}, {**request.extras, **self.extras}
                made[id(request)] = replace(request, config=config, extras=extras)
        asked = {c: made[id(r)] for c, r in requests.items()}
        return self.fleet.ask(asked) if asked or self.fleet.awaited() else Answers({}, {})


def is_disagreement(why: Failure) -> bool:
    """Whether a client refuses because it has something else than what is agreed on."""
    return why.kind == "refused" and why.reason.startswith(AGREED)


def is_away(why: Failure) -> bool:
    """Whether a client may answer later: it cannot be reached, or those who run it have paused it."""
    return why.kind in AWAY or (why.kind == "refused" and why.reason.startswith(f"{PAUSED}:"))


def versions_in(extras: Arrays) -> dict[str, str]:
    """The versions of those packages that matter, as a client tells them."""
    told = json_from_extra(VERSIONS, extras)
    return {name: str(told[name])[:40] for name in versions() if name in told}


def log_client_report(client: ClientId, extras: Arrays) -> None:
    """Say in the log what a client told when it agreed: counts, and other versions, for which nobody is refused."""
    here, there = versions(), json_from_extra(VERSIONS, extras)
    other = [f"{k} {str(there[k])[:20]!r} ({v} here)" for k, v in here.items() if v and there.get(k, v) != v]
    if other:
        log.warning("%s has other versions, so that results may not repeat bit for bit: %s", client, ", ".join(other))
    counts = {
        str(k)[:40]: v for k, v in json_from_extra(COUNTS, extras).items() if isinstance(v, int) and 0 <= v < MANY
    }
    if counts:
        shown = ", ".join(f"{name!r} {count}" for name, count in list(counts.items())[:20])
        log.warning("%s has %d samples: %s", client, sum(counts.values()), shown)  # so that the run's log has it


def agree_on(fleet: Fleet, name: str, config: Mapping[str, Scalar], join: Join) -> tuple[bytes, tuple[int, int]]:
    """What comes of the clients' profiles, as it is sent to all, and how many bytes these took down and up."""
    asked = {c: Request(PROFILE, {}, config) for c in fleet.clients()}
    heard = fleet.ask(asked)
    answers = sift(heard, fault_of_extras)
    for client, why in answers.failures.items():
        log.warning("%s told no profile: %s", client, why)
    if not answers.replies:
        first = next((f"; {client}: {why}" for client, why in sorted(answers.failures.items())), "")
        raise ConfigError(f"no client told its profile, so that there is no {name}{first}")
    return join(answers.replies), traffic(asked, heard)
