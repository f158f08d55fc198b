"""Asynchronous training requests: a round ends with its first replies; later ones count when they arrive.

Answers are pulled as they come, so that one that is damaged or slow holds up no other.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from mutirao.core.fleet import Answers, ClientId, Failure, Reply, Request, collect, failure_of
from mutirao.flower.messages import clean_line

POLL_INTERVAL = 0.1  # seconds between two looks for answers, at first; a SuperNode takes half a second to send one

T = TypeVar("T")
Read = Callable[[str, Message], T]  # what an answer to the message of that number holds


class Mailbox(Generic[T]):
    """Where answers to messages are waited for; each is read as it is pulled, and none is lost between two looks."""

    def __init__(self, grid: Grid, read: Read[T]) -> None:
        self.grid = grid
        self.read = read
        self.waiting: set[str] = set()
        self._pulls: dict[Future[list[T | Failure]], str] = {}
        self._pool = ThreadPoolExecutor(32, "mutirao-answers")

    def expect(self, ids: Iterable[str]) -> None:
        """Look out for answers to these messages, too."""
        self.waiting |= set(ids)

    def forget(self, message_id: str) -> None:
        """Do not look for answers to this one any more."""
        self.waiting.discard(message_id)

    def look(self) -> list[tuple[str, T | Failure]]:
        """What is there by now, with the number of the message that it answers; a slow pull is left for later."""
        found: list[tuple[str, T | Failure]] = []
        pulled = self.waiting.difference(self._pulls.values())
        self._pulls |= {self._pool.submit(self._pull, i): i for i in pulled}
        for pull in wait(self._pulls, timeout=1.0).done:
            message_id = self._pulls.pop(pull)
            answers = pull.result()
            if answers:
                self.waiting.discard(message_id)
            found += [(message_id, answer) for answer in answers]
        return found

    def pause(self, passed: float) -> float:
        """How long to wait before the next look, in seconds, if so many have passed already.

        A twentieth of what was waited adds little to it; a SuperLink with many clients is spared.
        """
        return min(max(POLL_INTERVAL, passed / 20), 0.5) + len(self.waiting) / 50

    def close(self) -> None:
        """Stop looking."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _pull(self, message_id: str) -> list[T | Failure]:
        """What is read in the answers to one message: pulled together, a single undecodable one would cost them all.

        They are read here, at once, so that what Flower holds of one is gone before the next comes.
        """
        try:
            found = self.grid.pull_messages([message_id])
            return [self.read(message_id, m) for m in found if m.metadata.reply_to_message_id == message_id]
        except Exception as error:  # whatever a client sent must stay that client's failure
            return [Failure("malformed", f"the answer cannot be read: {clean_line(failure_of(error).reason)}")]


@dataclass(frozen=True)
class SentRequest:
    """A request that was sent, without its arrays: its client, its node, and when."""

    client: ClientId
    node: int
    request: Request
    at: float = field(default_factory=time.monotonic)


class AsyncRequests(Generic[T]):
    """Keeps at most `at_once` requests open; returns the first `buffer` replies, and the others later.

    A request without an answer for `timeout` seconds is late, and makes room for another. Late and duplicate answers
    are ignored.
    """

    def __init__(
        self,
        buffer: int,
        at_once: int,
        timeout: float,
        mailbox: Mailbox[T],
        send: Callable[[Mapping[ClientId, Request]], tuple[dict[str, SentRequest], dict[ClientId, Failure]]],
        check: Callable[[SentRequest, T | Failure], Reply | Failure],
        closed: threading.Event,
    ) -> None:
        self.buffer = buffer
        self.at_once = at_once
        self.timeout = timeout
        self.mailbox = mailbox
        self.send = send
        self.check = check
        self.closed = closed
        self.queue: dict[ClientId, Request] = {}
        self.sent: dict[str, SentRequest] = {}
        self.come: deque[tuple[ClientId, Reply | Failure]] = deque()  # and not returned yet

    def clients(self) -> frozenset[ClientId]:
        """Who was asked and has not been returned yet."""
        return frozenset({*self.queue, *(one.client for one in self.sent.values()), *(c for c, _ in self.come)})

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask these as soon as there is room, and return when the next `buffer` replies are in."""
        awaited = self.clients()
        began = time.monotonic()
        self.queue |= {c: r for c, r in requests.items() if c not in awaited}
        found: dict[ClientId, Reply | Failure] = {}
        self._send()
        while not self.closed.is_set():
            while self.come and sum(isinstance(one, Reply) for one in found.values()) < self.buffer:
                client, outcome = self.come.popleft()
                found[client] = outcome
            # Ends before the next clients begin: they get the model that is made of these replies.
            if sum(isinstance(one, Reply) for one in found.values()) >= self.buffer or not self.clients():
                break
            self._send()
            if not self._look():
                self.closed.wait(self.mailbox.pause(time.monotonic() - began))
        return collect(found, found.items())

    def _send(self) -> None:
        while self.queue and len(self.sent) < self.at_once:
            names = list(self.queue)[: self.at_once - len(self.sent)]
            sent, failed = self.send({c: self.queue.pop(c) for c in names})
            self.sent |= sent
            self.come += failed.items()
            self.mailbox.expect(sent)

    def _look(self) -> bool:
        """Take in what has come, and what is too late; whether there was anything."""
        found: dict[str, T | Failure] = {}
        for message_id, answer in self.mailbox.look():
            if message_id in found:
                answer = Failure("twice", "answered more than once")
            found[message_id] = answer
        now = time.monotonic()
        for message_id, one in self.sent.items():
            if message_id not in found and now - one.at > self.timeout:
                found[message_id] = Failure("late", "no answer in time")
                self.mailbox.forget(message_id)
        known = [(self.sent.pop(i), answer) for i, answer in found.items() if i in self.sent]
        # The order in which a look finds answers is by chance: the earliest request comes first.
        known.sort(key=lambda pair: (pair[0].at, pair[0].client))
        self.come += [(one.client, self.check(one, answer)) for one, answer in known]
        return bool(known)
