"""The seam: a fleet carries requests to clients and brings replies back; what it is made of is its own business."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mutirao.core.arrays import Arrays
from mutirao.errors import Refused

log = logging.getLogger("mutirao")

ClientId = str
Scalar = bool | int | float | str


@dataclass(frozen=True)
class Request:
    """What a client is asked to `do`, with the current model and settings (among them `seed` and `round`).

    `extras` travel down as those of a reply travel up: arrays beside the model.
    """

    do: str
    arrays: Arrays
    config: Mapping[str, Scalar] = field(default_factory=dict)
    extras: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """All that ever leaves a client; `extras` (error vectors, biases) are never averaged."""

    arrays: Arrays
    extras: Arrays = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    n: int = 0


@dataclass
class Site:
    """A client's own place: its data, and a state that outlives the request and never leaves."""

    id: ClientId
    data: Any = None
    state: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why there is no usable reply: a `kind` from a short list and a `reason` for people."""

    # raised, refused, late, twice, gone, empty, malformed, unknown_key, missing_key, shape, dtype, not_finite,
    # too_large, count
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True)
class Answers:
    """Replies and typed failures, both sorted by client: every client asked is in exactly one of them."""

    replies: dict[ClientId, Reply]
    failures: dict[ClientId, Failure]
    carried: tuple[int, int] | None = None  # bytes down and up, if they differ from what requests and replies hold


Handler = Callable[[Request, Site], Reply]  # may offer .many(requests, sites) -> replies: same results, faster


@runtime_checkable
class Fleet(Protocol):
    """Anything that knows its clients and can ask them."""

    def clients(self) -> list[ClientId]:
        """Who is there now; a new list whenever that changed."""
        ...

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each client its request; return when all have answered or time is up."""
        ...


def failure_of(error: BaseException) -> Failure:
    """The failure of a client whose code raised `error`: one line, never a traceback."""
    log.debug("a client's code raised", exc_info=error)  # the place in the code is for the client's own log
    text = " ".join(str(error).split())[:200]
    if isinstance(error, Refused):
        return Failure("refused", text)
    return Failure("raised", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def collect(asked: Iterable[ClientId], events: Iterable[tuple[ClientId, Reply | Failure]]) -> Answers:
    """Sort what came in: strangers are ignored, silence is `late`, two answers of one client count as none."""
    heard: dict[ClientId, Reply | Failure] = {}
    names = set(asked)
    for client, outcome in events:
        if client in heard:
            heard[client] = Failure("twice", "answered more than once")
        elif client in names:
            heard[client] = outcome
    for client in names - heard.keys():
        heard[client] = Failure("late", "no answer in time")
    ordered = sorted(heard.items())
    return Answers(
        {c: r for c, r in ordered if isinstance(r, Reply)},
        {c: r for c, r in ordered if isinstance(r, Failure)},
    )
