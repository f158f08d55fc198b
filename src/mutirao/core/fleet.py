"""The seam: a fleet carries requests to clients and brings replies back; what it is made of is its own business."""

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mutirao.config import Scalar as Scalar
from mutirao.core.arrays import Arrays, nbytes
from mutirao.core.records import Round
from mutirao.core.roster import ClientId as ClientId
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError, Refused

log = logging.getLogger("mutirao")

FLEETING = "now."
Where = Callable[[], Mapping[str, Scalar]]  # where an audit trail stands now
FIELDS = ("arrays", "extras", "metrics")
ARRAY = (np.ndarray, np.generic)  # NumPy makes a scalar of an array without axes


@dataclass(frozen=True)
class Request:
    """What a client is asked to `do`: the current model, settings (among them `seed` and `round`), and `extras`.

    Extras are what a method sends down besides the model, as a reply has what comes up besides it.

    >>> import numpy as np
    >>> request = Request("train", {"w": np.zeros(2)}, {"seed": 0, "round": 1, "lr": 0.1})
    >>> request.do, request.config["lr"]
    ('train', 0.1)
    """

    do: str
    arrays: Arrays
    config: Mapping[str, Scalar] = field(default_factory=dict)
    extras: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """All that ever leaves a client; `extras` (error vectors, biases) are never averaged.

    >>> import numpy as np
    >>> reply = Reply({"w": np.array([0.5, 1.0])}, metrics={"loss": 0.7}, n=120)
    >>> reply.n, reply.metrics
    (120, {'loss': 0.7})
    """

    arrays: Arrays
    extras: Arrays = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    n: int = 0


@dataclass
class Site:
    """A client's own place: its data, and a state that outlives the request and never leaves.

    What stands in the state under `FLEETING` is of the round being made, and no checkpoint holds it.

    A client may remember what must not leave it, such as how often it was asked:

    >>> import numpy as np
    >>> def answer(request, site):
    ...     site.state["times"] = site.state.get("times", np.zeros(1)) + 1
    ...     return Reply({}, n=len(site.data))
    >>> site = Site("ana", data=[1, 2, 3])
    >>> answer(Request("train", {}), site).n, answer(Request("train", {}), site).n, site.state["times"]
    (3, 3, array([2.]))
    """

    id: ClientId
    data: Any = None
    state: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why there is no usable reply: a `kind` from a short list and a `reason` for people.

    >>> from mutirao import LocalFleet
    >>> def broken(request, site):
    ...     raise ValueError("no such ward")
    >>> LocalFleet(broken, {"ana": None}).ask({"ana": Request("train", {})}).failures["ana"]
    Failure(kind='raised', reason='ValueError: no such ward')
    """

    # raised, refused, late, twice, gone, empty, malformed, unknown_key, missing_key, shape, dtype, not_finite,
    # too_large, too_long, too_few, count
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True)
class Answers:
    """Replies and typed failures, both sorted by client: every client asked is in exactly one of them.

    Of a fleet that was told to `stagger` they are of whoever was heard of by now; others are still `awaited`.

    >>> from mutirao import LocalFleet
    >>> fleet = LocalFleet(lambda request, site: Reply({}, n=10 // site.data), {"ana": 2, "bia": 0})
    >>> answers = fleet.ask(dict.fromkeys(fleet.clients(), Request("train", {})))
    >>> answers.replies["ana"].n, answers.failures["bia"].reason
    (5, 'ZeroDivisionError: integer division or modulo by zero')
    """

    replies: dict[ClientId, Reply]
    failures: dict[ClientId, Failure]
    carried: tuple[int, int] | None = None  # bytes down and up, if they differ from what requests and replies hold


class Fleet:
    """Anything that knows its clients and can ask them; what else a fleet may do has a default here.

    A fleet around another one is a `Wrapper`, which loses nothing of it.

    Two methods make a fleet; everything else has a default:

    >>> class Echo(Fleet):
    ...     def clients(self):
    ...         return ["ana", "bia"]
    ...     def ask(self, requests):
    ...         return Answers({c: Reply(requests[c].arrays, n=1) for c in sorted(requests)}, {})
    >>> list(Echo().ask({"bia": Request("train", {})}).replies)
    ['bia']
    """

    def is_remote(self) -> bool:
        """Whether clients are other parties, with code and data of their own: then they have to agree first."""
        return True

    def clients(self) -> list[ClientId]:
        """Who is there now; a new list whenever that changed."""
        raise NotImplementedError

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each client its request; return when all have answered or time is up."""
        raise NotImplementedError

    def stagger(self, buffer: int, at_once: int) -> None:
        """From now on let a request to train return with `buffer` replies, at most `at_once` clients being at work.

        Who has not answered by then is `awaited`, and its answer comes with that to a later request.
        """
        raise ConfigError(
            "an asynchronous method needs clients that take their time, and those of this process answer at once; "
            "set devices=tifl, fedcs or table"
        )

    def awaited(self) -> frozenset[ClientId]:
        """Who was asked to train in this round or an earlier one and has not been heard of yet."""
        return frozenset()

    def declare(self, roster: Roster) -> None:
        """Write into the roster what is known of clients before they are asked, such as how fast they are."""

    def record(self, done: Round) -> None:
        """Add to the record of a round what only the fleet knows of it."""

    def keys(self) -> dict[ClientId, str]:
        """Which key each client holds, as far as that is known: two clients must not have one."""
        return {}

    def snapshot(self) -> Arrays:
        """The states of simulated sites, for a checkpoint; they reach no aggregator."""
        return {}

    def restore(self, states: Arrays) -> None:
        """Bring back what `snapshot` gave."""
        if states:
            log.warning("the checkpoint holds states of simulated sites; the sites of this fleet keep their own")

    def use_state_store(self, states: MutableMapping[ClientId, Arrays]) -> None:
        """Keep the states of simulated sites there from now on; what holds many of them is no part of a `snapshot`."""

    def trail(self, where: Where) -> None:
        """Let `where` the server's audit trail stands go with every request, for sites that keep one of their own."""

    def heads(self) -> dict[ClientId, dict[str, Scalar]]:
        """Where the sites' own trails stood when they last answered, of those who did since this was called."""
        return {}

    def close(self) -> None:
        """End what the fleet has started."""


class Wrapper(Fleet):
    """A fleet around another: all is passed on, and whoever builds on it changes what it is for.

    >>> from mutirao import LocalFleet
    >>> class Counting(Wrapper):
    ...     asked = 0
    ...     def ask(self, requests):
    ...         self.asked += len(requests)
    ...         return super().ask(requests)
    >>> fleet = Counting(LocalFleet(lambda request, site: Reply({}, n=1), {"ana": None, "bia": None}))
    >>> _ = fleet.ask(dict.fromkeys(fleet.clients(), Request("train", {})))
    >>> fleet.asked
    2
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def is_remote(self) -> bool:
        """Whether the fleet's clients are other parties."""
        return self.fleet.is_remote()

    def clients(self) -> list[ClientId]:
        """Who is there now."""
        return self.fleet.clients()

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Pass the requests on."""
        return self.fleet.ask(requests)

    def stagger(self, buffer: int, at_once: int) -> None:
        """Pass it on."""
        self.fleet.stagger(buffer, at_once)

    def awaited(self) -> frozenset[ClientId]:
        """Who the fleet has not heard of yet."""
        return self.fleet.awaited()

    def declare(self, roster: Roster) -> None:
        """Pass on what is known of clients."""
        self.fleet.declare(roster)

    def record(self, done: Round) -> None:
        """Let the fleet add to the record."""
        self.fleet.record(done)

    def keys(self) -> dict[ClientId, str]:
        """The keys the fleet knows."""
        return self.fleet.keys()

    def snapshot(self) -> Arrays:
        """The states of the fleet's sites."""
        return self.fleet.snapshot()

    def restore(self, states: Arrays) -> None:
        """Bring them back."""
        self.fleet.restore(states)

    def use_state_store(self, states: MutableMapping[ClientId, Arrays]) -> None:
        """Tell the fleet where to keep them."""
        self.fleet.use_state_store(states)

    def trail(self, where: Where) -> None:
        """Pass the server's trail on."""
        self.fleet.trail(where)

    def heads(self) -> dict[ClientId, dict[str, Scalar]]:
        """Where the sites' trails stand."""
        return self.fleet.heads()

    def close(self) -> None:
        """End the fleet."""
        self.fleet.close()


def failure_of(error: BaseException) -> Failure:
    """The failure of a client whose code raised `error`: one line, never a traceback."""
    log.debug("a client's code raised", exc_info=error)  # the place in the code is for the client's own log
    text = " ".join(str(error).split())[:200]
    if isinstance(error, Refused):
        return Failure("refused", text)
    return Failure("raised", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def fault_of_fields(reply: Reply) -> Failure | None:
    """What is wrong with the make of a reply: a handler in the same process may put anything into its fields."""
    fields = reply.arrays, reply.extras, reply.metrics
    for place, held in enumerate(fields):  # for every client of every round, thrice: plain loops are quickest
        if not isinstance(held, dict):
            return Failure("malformed", f"{FIELDS[place]} is of type {type(held).__name__}, not a dict")
        for name in held:
            if type(name) is not str:
                return Failure("malformed", f"{FIELDS[place]} has a name that is no text")
    for held in fields[:2]:
        for name, value in held.items():
            if not isinstance(value, ARRAY):
                return Failure("dtype", f"{name[:80]!r} is of type {type(value).__name__}, not an array")
    return None


def collect(asked: Iterable[ClientId], events: Iterable[tuple[ClientId, Reply | Failure]]) -> Answers:
    """Sort what came in: strangers are ignored, silence is `late`, two answers of one client count as none."""
    heard: dict[ClientId, Reply | Failure] = {}
    names = set(asked)
    for client, outcome in events:
        if client in heard:
            heard[client] = Failure("twice", "answered more than once")
        elif client in names:
            heard[client] = (fault_of_fields(outcome) or outcome) if isinstance(outcome, Reply) else outcome
    for client in names - heard.keys():
        heard[client] = Failure("late", "no answer in time")
    ordered = sorted(heard.items())
    return Answers(
        {c: r for c, r in ordered if isinstance(r, Reply)},
        {c: r for c, r in ordered if isinstance(r, Failure)},
    )


def traffic(requests: Mapping[ClientId, Request], answers: Answers) -> tuple[int, int]:
    """Bytes sent down and up, as the fleet counted them or as requests and replies hold them."""
    return answers.carried or (bytes_of_requests(requests), bytes_of_replies(answers))


def bytes_of_requests(requests: Mapping[ClientId, Request]) -> int:
    """Bytes sent down in arrays and extras; most clients of a round get one request, which is measured once."""
    sizes: dict[int, int] = {}
    total = 0
    for request in requests.values():
        size = sizes.get(id(request))
        if size is None:
            size = sizes[id(request)] = nbytes(request.arrays) + (nbytes(request.extras) if request.extras else 0)
        total += size
    return total


def bytes_of_replies(answers: Answers) -> int:
    """Bytes sent up in arrays, extras and metrics."""
    total = 0
    for reply in answers.replies.values():
        total += 8 * (len(reply.metrics) + 1)
        for value in (*reply.arrays.values(), *reply.extras.values()):
            total += value.nbytes
    return total
