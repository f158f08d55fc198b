"""The seam between server and clients: a fleet sends requests to clients and returns their replies."""

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mutirao.config import Scalar as Scalar
from mutirao.core.arrays import Arrays, digest, fingerprint, nbytes
from mutirao.core.records import Round
from mutirao.core.roster import ClientId as ClientId
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError, Refused

log = logging.getLogger("mutirao")

FLEETING = "now."
Where = Callable[[], Mapping[str, Scalar]]  # the current head of an audit trail
FIELDS = ("arrays", "extras", "metrics")
ARRAY = (np.ndarray, np.generic)  # NumPy makes a scalar of an array without axes


@dataclass(frozen=True)
class Request:
    """What a client is asked to `do`: the current model, settings (among them `seed` and `round`), and `extras`.

    Extras are arrays that a method sends besides the model.

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
    """All that ever leaves a client. `extras` (error vectors, biases) are never averaged.

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
    """A client's data, and a state that is kept between requests and never leaves the client.

    Entries of the state with names that begin with `FLEETING` belong to the current round and are in no checkpoint.

    A client may keep what must not leave it, such as the number of requests:

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


def reply_fingerprint(reply: Reply) -> str:
    """sha256 over the arrays, extras, metrics and sample count of a reply."""
    metrics = {k: float(v) for k, v in reply.metrics.items()}
    parts = {"arrays": digest(reply.arrays), "extras": digest(reply.extras), "metrics": metrics, "n": int(reply.n)}
    return fingerprint(parts)


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

    After `stagger` they contain the answers that have arrived; the other clients are still `awaited`.

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
    """Anything that lists its clients and can ask them.

    A fleet around another one is a `Wrapper`, which forwards everything.

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
        """Whether clients are other parties, with code and data of their own: these have to agree before they train."""
        return True

    def clients(self) -> list[ClientId]:
        """The clients that are present; a new list whenever that has changed."""
        raise NotImplementedError

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each client its request; return when all have answered or the time is up."""
        raise NotImplementedError

    def stagger(self, buffer: int, at_once: int) -> None:
        """Become asynchronous: `ask` returns after `buffer` replies, with at most `at_once` clients at work.

        Clients that have not answered by then are `awaited`; their answers are returned by a later call.
        """
        raise ConfigError(
            "an asynchronous method needs clients that answer at different times; set devices=tifl, fedcs or table "
            "to simulate them"
        )

    def awaited(self) -> frozenset[ClientId]:
        """The clients that were asked to train, in this round or earlier, and have not answered yet."""
        return frozenset()

    def declare(self, roster: Roster) -> None:
        """Write into the roster what is known of clients in advance, such as their speed."""

    def record(self, done: Round) -> None:
        """Add to the record of a round what only the fleet has seen."""

    def keys(self) -> dict[ClientId, str]:
        """The public key of each client, if known: two clients must not have the same."""
        return {}

    def snapshot(self) -> Arrays:
        """The states of simulated sites, for a checkpoint; no aggregator sees them."""
        return {}

    def restore(self, states: Arrays) -> None:
        """Restore what `snapshot` returned."""
        if states:
            log.warning("the checkpoint has states of simulated sites, ignored: the sites of this fleet keep their own")

    def use_state_store(self, states: MutableMapping[ClientId, Arrays]) -> None:
        """Keep the states of simulated sites in this store; a store of many states is not part of a `snapshot`."""

    def trail(self, where: Where) -> None:
        """Send the head of the server's audit trail with every request, for sites that keep a trail of their own."""

    def heads(self) -> dict[ClientId, dict[str, Scalar]]:
        """The heads of the sites' own trails in their last answers, for sites that answered since the last call."""
        return {}

    def close(self) -> None:
        """Stop what the fleet has started."""


class Wrapper(Fleet):
    """A fleet around another: everything is forwarded, and a subclass overrides what it changes.

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
        """The clients that are present."""
        return self.fleet.clients()

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Forward the requests."""
        return self.fleet.ask(requests)

    def stagger(self, buffer: int, at_once: int) -> None:
        """Forward it."""
        self.fleet.stagger(buffer, at_once)

    def awaited(self) -> frozenset[ClientId]:
        """The clients that have not answered yet."""
        return self.fleet.awaited()

    def declare(self, roster: Roster) -> None:
        """Let the fleet write into the roster."""
        self.fleet.declare(roster)

    def record(self, done: Round) -> None:
        """Let the fleet add to the record."""
        self.fleet.record(done)

    def keys(self) -> dict[ClientId, str]:
        """The keys of the fleet's clients."""
        return self.fleet.keys()

    def snapshot(self) -> Arrays:
        """The states of the fleet's sites."""
        return self.fleet.snapshot()

    def restore(self, states: Arrays) -> None:
        """Restore them."""
        self.fleet.restore(states)

    def use_state_store(self, states: MutableMapping[ClientId, Arrays]) -> None:
        """Set the fleet's store."""
        self.fleet.use_state_store(states)

    def trail(self, where: Where) -> None:
        """Forward the server's trail."""
        self.fleet.trail(where)

    def heads(self) -> dict[ClientId, dict[str, Scalar]]:
        """The heads of the sites' trails."""
        return self.fleet.heads()

    def close(self) -> None:
        """Close the fleet."""
        self.fleet.close()


def failure_of(error: BaseException) -> Failure:
    """The failure for an error that a client's code raised: one line, never a traceback."""
    # A traceback shows code and paths of the site, so it stays in the client's own log.
    log.debug("a client's code raised", exc_info=error)
    text = " ".join(str(error).split())[:200]
    if isinstance(error, Refused):
        return Failure("refused", text)
    if text:
        return Failure("raised", f"{type(error).__name__}: {text}")
    return Failure("raised", type(error).__name__)


def fault_of_fields(reply: Reply) -> Failure | None:
    """A field of a reply that has a wrong type: a handler in the same process may put anything into it."""
    fields = reply.arrays, reply.extras, reply.metrics
    # For every client of every round, three times: plain loops are the fastest.
    for i, content in enumerate(fields):
        if not isinstance(content, dict):
            return Failure("malformed", f"{FIELDS[i]} is of type {type(content).__name__}, not a dict")
        for name in content:
            if type(name) is not str:
                return Failure("malformed", f"{FIELDS[i]} has a name that is not a string")
    for content in fields[:2]:
        for name, value in content.items():
            if not isinstance(value, ARRAY):
                return Failure("dtype", f"{name[:80]!r} is of type {type(value).__name__}, not an array")
    return None


def collect(asked: Iterable[ClientId], events: Iterable[tuple[ClientId, Reply | Failure]]) -> Answers:
    """Sort the answers: unknown clients are ignored, no answer is `late`, two answers of a client count as none."""
    outcomes: dict[ClientId, Reply | Failure] = {}
    names = set(asked)
    for client, outcome in events:
        if client in outcomes:
            outcomes[client] = Failure("twice", "answered more than once")
        elif client in names:
            outcomes[client] = outcome
            if isinstance(outcome, Reply):
                outcomes[client] = fault_of_fields(outcome) or outcome
    for client in names - outcomes.keys():
        outcomes[client] = Failure("late", "no answer in time")
    ordered = sorted(outcomes.items())
    return Answers(
        {c: r for c, r in ordered if isinstance(r, Reply)},
        {c: r for c, r in ordered if isinstance(r, Failure)},
    )


def traffic(requests: Mapping[ClientId, Request], answers: Answers) -> tuple[int, int]:
    """Bytes sent down and up, as counted by the fleet, or as the sizes of requests and replies."""
    return answers.carried or (bytes_of_requests(requests), bytes_of_replies(answers))


def bytes_of_requests(requests: Mapping[ClientId, Request]) -> int:
    """Bytes sent down in arrays and extras; most clients of a round share one request, which is measured once."""
    sizes: dict[int, int] = {}
    total = 0
    for request in requests.values():
        size = sizes.get(id(request))
        if size is None:
            size = nbytes(request.arrays) + nbytes(request.extras)
            sizes[id(request)] = size
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
