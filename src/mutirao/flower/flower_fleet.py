"""The nodes of a Flower federation as a fleet.

Node ids are random, so a node is known by the name it declares.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Scalar, collect, reply_fingerprint
from mutirao.core.roster import Roster
from mutirao.flower.async_requests import AsyncRequests, Mailbox, Read, SentRequest
from mutirao.flower.compat import flower_message, flower_reply_in, required_extras
from mutirao.flower.messages import (
    CLOCK_TOLERANCE,
    audit_head_in,
    error_in_agreed_digests,
    name_in,
    node_tag,
    pack,
    pack_together,
    reply_in,
    request_message,
    without_arrays,
)

log = logging.getLogger("mutirao")

IsEntitled = Callable[[ClientId, int], bool]  # whether the node of that number may have that name
KeepsTrail = Callable[[ClientId], bool]  # whether a client's site is known to keep an audit trail

NAME_TIMEOUT = 120.0  # seconds after which a node without an answer is asked for its name again
RETRY_AFTER_ERROR = 10.0  # the same for a node that answered with an error
NAME_QUERY = "query.name"

T = TypeVar("T")


@dataclass(frozen=True)
class CheckedAnswer:
    """The reply in an answer, and the answer without its arrays."""

    reply: Reply
    rest: Message


class FlowerFleet(Fleet):
    """The nodes of a Flower federation, by the names they declare.

    A request not answered after `timeout` seconds is late. A node seen for the first time is asked for its name,
    and `clients()` waits for it, once, for at most `greet` seconds. Two nodes may not have one name, and none may have
    one that `is_entitled` denies it. A client that `keeps_trail`, or has shown once that it does, must send the head of
    its trail with every reply. `admitted` says with how many samples clients were admitted, if that is known.

    A `plain` fleet talks to Flower's own ClientApps, which know nothing of us: a client is called by the number of its
    node, and says how many samples it has as `num-examples`.

    Over any of Flower's grids, such as the one that a ServerApp is given:

    >>> class EmptyGrid:  # without nodes
    ...     def get_node_ids(self):
    ...         return []
    >>> FlowerFleet(EmptyGrid()).clients()
    []
    """

    def __init__(
        self,
        grid: Grid,
        timeout: float = 600.0,
        greet: float = 60.0,
        is_entitled: IsEntitled = lambda name, node: True,
        keeps_trail: KeepsTrail = lambda name: False,
        admitted: Mapping[ClientId, int] | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self.grid = grid
        self.timeout = timeout
        self.greet = greet
        self.is_entitled = is_entitled
        self.keeps_trail = keeps_trail
        self.admitted = dict(admitted or {})
        self.plain = plain
        self._clients: list[ClientId] = []
        self._nodes: dict[ClientId, int] = {}  # who holds a name
        self._claims: dict[int, ClientId | None] = {}  # what each node declared; None: nothing usable
        self._asked: dict[str, int] = {}  # questions for names that are under way
        self._again: dict[int, float] = {}  # when a node may be asked for its name again
        self._warned: set[int] = set()
        self._closed = threading.Event()
        self._where: Callable[[], Mapping[str, Scalar]] = dict
        self._heads: dict[ClientId, dict[str, Scalar]] = {}
        self._keepers: set[ClientId] = set()  # who has sent a head
        self._async: AsyncRequests[Reply | Failure | CheckedAnswer] | None = None

    def clients(self) -> list[ClientId]:
        """The names of the nodes that are connected; the same list while nothing changed."""
        here = set(self.grid.get_node_ids())
        self._forget_all_but(here)
        if self.plain:
            self._nodes = {str(node): node for node in here}
        else:
            self._ask_names(here)
            self._settle_names()
        if (names := sorted(self._nodes)) != self._clients:
            self._clients = names
        return self._clients

    def declare(self, roster: Roster) -> None:
        """With how many samples clients were admitted."""
        for client, samples in self.admitted.items():
            if client in roster:
                roster.first_n[roster.row(client)] = samples

    def keys(self) -> dict[ClientId, str]:
        """The node each client is: a SuperLink that authenticates its nodes gives one key one node, and no more."""
        return {name: str(node) for name, node in self._nodes.items()}

    def stagger(self, buffer: int, at_once: int) -> None:
        """Let requests to train return with the first answers; the others are taken when they come."""
        mailbox = Mailbox(self.grid, lambda i, answer: self._read(pending.sent[i], answer))
        pending = AsyncRequests(buffer, at_once, self.timeout, mailbox, self._send, self._check_answer, self._closed)
        self._async = pending

    def awaited(self) -> frozenset[ClientId]:
        """Who was asked to train and has not answered, in time or at all."""
        if self._async is not None:
            return self._async.clients()
        return frozenset()

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each client its request and wait at most `timeout` seconds for the answers."""
        if self._async is not None and all(request.do == "train" for request in requests.values()):
            return self._async.ask(requests)
        return collect(requests, self._outcomes(requests))

    def trail(self, where: Callable[[], Mapping[str, Scalar]]) -> None:
        """Say with every request where the server's audit trail stands; sites that keep one of their own note it."""
        self._where = where

    def heads(self) -> dict[ClientId, dict[str, Scalar]]:
        """Where the sites' own audit trails stood when they last answered, of those who did since this was called.

        `reply` holds the fingerprints of all that a site replied meanwhile.
        """
        heads = self._heads
        self._heads = {}
        return heads

    def close(self) -> None:
        """Stop waiting for answers."""
        self._closed.set()
        if self._async is not None:
            self._async.mailbox.close()

    def _outcomes(self, requests: Mapping[ClientId, Request]) -> Iterator[tuple[ClientId, Reply | Failure]]:
        sent, failed = self._send(requests)
        yield from failed.items()
        for message_id, answer in self._listen(sent, self.timeout, lambda i, answer: self._read(sent[i], answer)):
            yield sent[message_id].client, self._check_answer(sent[message_id], answer)

    def _send(self, requests: Mapping[ClientId, Request]) -> tuple[dict[str, SentRequest], dict[ClientId, Failure]]:
        """Push the requests; what is on its way by the number of its message, and who cannot be reached."""
        messages: dict[ClientId, Message] = {}
        failed: dict[ClientId, Failure] = {}
        # A round sends one model to all clients: it is packed once, known by its identity.
        records: dict[int, ArrayRecord] = {}
        as_record = pack_together
        if self.plain:
            as_record = pack

        def pack_once(arrays: Arrays) -> ArrayRecord:
            if id(arrays) not in records:
                records[id(arrays)] = as_record(arrays)
            return records[id(arrays)]

        for client, request in sorted(requests.items()):
            if client not in self._nodes:
                failed[client] = Failure("gone", "is not connected")
                continue
            node = self._nodes[client]
            content = {"arrays": pack_once(request.arrays)}
            if self.plain:
                messages[client] = flower_message(request, content["arrays"], node, ttl=self.timeout + CLOCK_TOLERANCE)
                continue
            if request.extras:
                content["extras"] = pack_once(request.extras)
            messages[client] = request_message(request, content, node, self.timeout, self._where())
        taken = set(self.grid.push_messages(list(messages.values())))
        sent: dict[str, SentRequest] = {}
        for client, message in messages.items():
            about = message.metadata
            if about.message_id in taken:
                # A model may be large, and is not needed any more once it was sent.
                sent[about.message_id] = SentRequest(client, about.dst_node_id, replace(requests[client], arrays={}))
            else:
                failed[client] = Failure("gone", "the SuperLink did not take the message")
        return sent, failed

    def _read(self, sent: SentRequest, answer: Message) -> Reply | Failure | CheckedAnswer:
        """What an answer to a request holds."""
        if self.plain:
            return flower_reply_in(answer, sent.node, required_extras(sent.request))
        reply = reply_in(answer, sent.node)
        if isinstance(reply, Failure):
            return reply
        return CheckedAnswer(reply, without_arrays(answer))

    def _check_answer(self, sent: SentRequest, answer: Reply | Failure | CheckedAnswer) -> Reply | Failure:
        if isinstance(answer, CheckedAnswer):
            return self._approve(sent.client, answer, sent.request)
        return answer

    def _approve(self, client: ClientId, opened: CheckedAnswer, request: Request) -> Reply | Failure:
        """The reply in an answer, if it comes with what was agreed on, and with the head of its site's trail if due."""
        reply = opened.reply
        answer = opened.rest
        if (wrong := error_in_agreed_digests(answer, request)) is not None:
            return wrong
        if head := audit_head_in(answer, "audit"):
            earlier = str(self._heads.get(client, {}).get("reply", ""))
            self._heads[client] = head | {"reply": f"{earlier} {reply_fingerprint(reply)}".strip()}
            self._keepers.add(client)
        elif "audit" in answer.content or client in self._keepers or self.keeps_trail(client):
            return Failure("malformed", "the reply comes without a sound head of its site's audit trail")
        return reply

    def _listen(self, ids: Iterable[str], seconds: float, read: Read[T]) -> Iterator[tuple[str, T | Failure]]:
        """Pass on what is read in answers that come in time."""
        mailbox = Mailbox(self.grid, read)
        began = time.monotonic()
        mailbox.expect(ids)
        try:
            while mailbox.waiting and not self._closed.is_set():
                yield from mailbox.look()
                passed = time.monotonic() - began
                if passed >= seconds:
                    return
                if mailbox.waiting:
                    self._closed.wait(min(mailbox.pause(passed), seconds - passed))
        finally:
            mailbox.close()

    def _forget_all_but(self, here: set[int]) -> None:
        self._claims = {n: name for n, name in self._claims.items() if n in here}
        self._nodes = {name: n for name, n in self._nodes.items() if n in here}
        self._asked = {i: n for i, n in self._asked.items() if n in here}
        self._again = {n: when for n, when in self._again.items() if n in here}
        self._warned &= here

    def _ask_names(self, here: set[int]) -> None:
        now = time.monotonic()
        due = sorted(n for n in here - self._claims.keys() if self._again.get(n, now) <= now)
        earlier = {i: n for i, n in self._asked.items() if n not in due}
        first = [n for n in due if n not in self._again]
        questions = [Message(RecordDict(), n, NAME_QUERY, ttl=NAME_TIMEOUT + CLOCK_TOLERANCE) for n in due]
        taken: set[str] = set()
        if questions:
            taken = set(self.grid.push_messages(questions))
        self._again |= dict.fromkeys(due, now + NAME_TIMEOUT)
        new = {q.metadata.message_id: n for q, n in zip(questions, due, strict=True) if q.metadata.message_id in taken}
        self._asked = earlier | new
        self._hear_names([i for i, n in new.items() if n in first], self.greet)
        # The others took longer than one call of clients() may wait: their answers are taken without waiting.
        self._hear_names(list(self._asked), 0)

    def _hear_names(self, ids: list[str], seconds: float) -> None:
        for message_id, answer in self._listen(ids, seconds, lambda _, answer: answer):
            node = self._asked.pop(message_id, None)
            if node is None:
                continue
            name = answer if isinstance(answer, Failure) else name_in(answer, node)
            if isinstance(name, str):
                self._claims[node] = name
                continue
            self._again[node] = time.monotonic() + RETRY_AFTER_ERROR
            # A node with an unusable name is refused for as long as it stays; other failures may pass.
            if name.kind == "malformed":
                self._claims[node] = None
            self._warn([node], f"node {node_tag(node)} is no client until it declares its name: {name}")

    def _settle_names(self) -> None:
        """Give each free name to the one node that claims it; refuse all others."""
        claimants: dict[ClientId, list[int]] = {}
        for node, name in sorted(self._claims.items()):
            if name is None or self._nodes.get(name) == node:
                continue
            if self.is_entitled(name, node):
                claimants.setdefault(name, []).append(node)
            else:
                self._warn([node], f"node {node_tag(node)} calls itself {name!r}, and its key is another's: refused")
        for name, nodes in claimants.items():
            if name in self._nodes:
                self._warn(nodes, f"{name!r} is connected already: another node of that name is refused for now")
            elif len(nodes) > 1:
                self._warn(nodes, f"{len(nodes)} nodes call themselves {name!r}: refused until only one is left")
            else:
                self._nodes[name] = nodes[0]

    def _warn(self, nodes: list[int], text: str) -> None:
        if not self._warned.issuperset(nodes):
            log.warning(text)
        self._warned.update(nodes)
