"""Answers to messages, pulled as they come: one that is damaged or slow holds up no other."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from mutirao.core.fleet import Failure, failure_of
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
