"""Which of a user's items the server learns: the settings `download` and `block`, and counts for secure sums."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.config import build
from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import (
    Answers,
    ClientId,
    Failure,
    Fleet,
    Reply,
    Request,
    Site,
    Wrapper,
    bytes_of_replies,
    bytes_of_requests,
    failure_of,
)
from mutirao.core.needs import Capabilities
from mutirao.core.parts import AnyHandler
from mutirao.core.sparse_rows import BLOCKS, OF, ROWS, fault_of_rows, faults_of_order
from mutirao.core.validation import fault_of_figures, set_aside
from mutirao.errors import ConfigError, Refused
from mutirao.privacy.secure_aggregation.settings import without_session
from mutirao.randomness import rng
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon
from mutirao.systems.recsys.item_aggregation import TOUCHES, ByItem
from mutirao.systems.recsys.ratings import Taste
from mutirao.training.lr_schedules import Schedule

DOWNLOADS = ("touched", "blocks", "all")
WARM = "warm"  # requests of the warm-up for groups: their model is the same for all and is sent whole, once

Rows = npt.NDArray[np.int32]


# The client: a handler that hides items


class Inner(NamedTuple):
    """What is passed on to FedRecon. `rows` are those of the table that the client got, if it got only some."""

    method: FedRecon
    request: Request
    site: Site
    rows: Rows | None


@dataclass(frozen=True)
class PrivateFedRecon:
    """FedRecon that reveals less about a user's items.

    - `download=blocks`: a user requests whole blocks of at least `block` items that contain its own;
    - `download=all`: it requests no rows;
    - `touch`: it adds this number to `touches` for each item that it moved, and counts as one sample.
    """

    method: FedRecon
    download: str = "touched"
    block: int = 20
    touch: float = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """As for FedRecon."""
        return self.method.capabilities

    @property
    def schedule(self) -> Schedule:
        """As for FedRecon."""
        return self.method.schedule

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer one request."""
        if request.do == "rows":
            return self.request_rows(request, site)
        inner = self.inner(request, site)
        # A user may have taken every item of its blocks, which leaves no negatives: its rows go back as they came.
        reply = None
        if inner.rows is None or not cannot_train(inner.method, site):
            reply = inner.method(inner.request, inner.site)
        return self.outer_reply(inner.request, reply, inner.rows)

    def many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        """The same answers; users with the same table are trained together."""
        outcomes: dict[ClientId, Reply | Failure] = {}
        together: dict[ClientId, Inner] = {}
        for client, request in requests.items():
            try:
                if request.do == "rows":
                    outcomes[client] = self.request_rows(request, sites[client])
                    continue
                inner = self.inner(request, sites[client])
                if inner.rows is None:
                    together[client] = inner
                else:
                    outcomes[client] = self(request, sites[client])
            except (ValueError, TypeError, Refused) as error:
                outcomes[client] = failure_of(error)
        if together:
            inner_requests = {c: inner.request for c, inner in together.items()}
            answers = self.method.many(inner_requests, {c: inner.site for c, inner in together.items()})
            for client, answer in answers.items():
                if isinstance(answer, Reply):
                    answer = self.outer_reply(inner_requests[client], answer, None)
                outcomes[client] = answer
        return outcomes

    def request_rows(self, request: Request, site: Site) -> Reply:
        """The rows that this user requests: its items, or all of their blocks."""
        if self.download not in ("touched", "blocks"):
            raise Refused("download", f"with download={self.download} no client reveals which items it trains on")
        if self.download == "touched":
            return self.method(request, site)
        # Blocks of all its items, also of those left out of a round: they are the same in every round.
        rows = self.rows_in_blocks(site.data.items)
        return Reply({}, {BLOCKS: rows}, n=len(rows))

    def rows_in_blocks(self, rows: Rows) -> Rows:
        """All items of the blocks that contain these."""
        blocks = block_numbers(self.method.items, self.block)
        return np.flatnonzero(np.isin(blocks, blocks[rows])).astype(np.int32)

    def inner(self, request: Request, site: Site) -> Inner:
        """The request and the data for FedRecon."""
        if not isinstance(site.data, Taste):
            raise ValueError(f"expected ratings, got {type(site.data).__name__}")
        arrays = {ITEMS: request.arrays[ITEMS]}
        sent = request.arrays.get(ITEM_ROWS)
        if sent is None or self.download != "blocks":
            if sent is not None:
                arrays[ITEM_ROWS] = sent
            return Inner(self.method, Request(request.do, arrays, request.config), site, None)
        rows = self.rows_in_blocks(site.data.items)
        if len(arrays[ITEMS]) != len(rows) or not np.array_equal(sent, rows):
            raise ValueError("was not sent the rows it asked for")
        # The slice becomes FedRecon's whole table: items are numbered by their place in it.
        places = np.searchsorted(rows, site.data.items).astype(np.int32)
        renumbered = Site(site.id, Taste(places, site.data.values), site.state)
        method = replace(self.method, items=len(rows))
        return Inner(method, Request(request.do, arrays, request.config), renumbered, rows)

    def outer_reply(self, request: Request, reply: Reply | None, rows: Rows | None) -> Reply:
        """FedRecon's reply with counts of touched items, and with the row numbers of the whole table.

        Without a reply, because the user has too few ratings to train, nothing moves.
        """
        touch = self.touch
        if reply is None:
            touch = 0.0
            sent = request.arrays[ITEMS]
            reply = Reply({ITEMS: sent, ITEM_ROWS: np.arange(len(sent), dtype=np.int32)}, n=1)
        if not reply.arrays:
            return reply
        arrays = dict(reply.arrays)
        moved = arrays[ITEM_ROWS]
        if rows is not None:
            moved = arrays[ITEM_ROWS] = rows[moved]
        samples = reply.n
        if self.touch:
            arrays[TOUCHES] = np.full(len(moved), touch, np.float32)
            arrays[TOUCHES + ROWS] = moved
            # All users weigh the same: `ByItem` multiplies the mean by their number to get sums and counts.
            samples = 1
        return Reply(arrays, reply.extras, reply.metrics, samples)


def cannot_train(method: FedRecon, site: Site) -> bool:
    """Whether a user has too few ratings to train, or took every item that it was sent."""
    return len(site.data) < 2 or (method.implicit and len(site.data) >= method.items)


def block_numbers(items: int, block: int) -> npt.NDArray[np.int64]:
    """The block of each item: assigned at random, the same for all users and rounds, with at least `block` items."""
    place = np.empty(items, np.int64)
    place[rng(0, 0, "blocks of items").permutation(items)] = np.arange(items)
    return np.asarray(np.minimum(place // block, max(0, items // block - 1)))


# The server: a fleet that sends the requested rows


class SlicedFleet(Wrapper):
    """Sends each client only the rows of `table` that it requests when asked for its "rows".

    A client learns nothing of other rows. The server learns which rows the client trains, as it would from the reply.
    Bytes both ways include those of the request for rows. Requests without the table, such as most stages of a secure
    sum, are passed on. For such a sum, `summed`, clients request blocks and are sent the length of the table.
    """

    def __init__(self, fleet: Fleet, table: str, summed: bool = False) -> None:
        super().__init__(fleet)
        self.table = table
        self.summed = summed
        self.extra = BLOCKS if summed else table

    def stagger(self, buffer: int, at_once: int) -> None:
        """Not supported: a client would be asked for its rows while it trains on others."""
        raise ConfigError("clients that are sent only the rows they ask for are waited for; use download=all")

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask each client for its rows, then send it the request with these alone."""
        if not requests:
            return Answers({}, {}, (0, 0))
        if all(r.do == WARM for r in requests.values()) or any(self.table not in r.arrays for r in requests.values()):
            return self.fleet.ask(requests)
        configs = {id(r.config): r.config for r in requests.values()}  # usually one object for all
        row_requests = {key: Request("rows", {}, without_session(config)) for key, config in configs.items()}
        wanted = self.fleet.ask({c: row_requests[id(r.config)] for c, r in requests.items()})
        whole = next(iter(requests.values())).arrays[self.table]
        wanted = set_aside(wanted, self._faults(whole, wanted.replies))
        sliced = self._slice(requests, {c: r.extras[self.extra] for c, r in wanted.replies.items()})
        answers = self.fleet.ask(sliced)
        down = bytes_of_requests(sliced)
        up = bytes_of_replies(wanted) + bytes_of_replies(answers)
        failures = dict(sorted((wanted.failures | answers.failures).items()))
        return Answers(answers.replies, failures, (down, up))

    def _faults(self, whole: Array, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Failure]:
        faults: dict[ClientId, Failure] = {}
        rows: dict[ClientId, Array] = {}
        for client, reply in replies.items():
            fault = self._fault(whole, reply)
            if fault is not None:
                faults[client] = fault
            else:
                rows[client] = reply.extras[self.extra]
        return faults | faults_of_order(self.table, rows, whole)

    def _fault(self, whole: Array, reply: Reply) -> Failure | None:
        rows = reply.extras.get(self.extra)
        if rows is None or len(reply.extras) > 1:
            return Failure("missing_key", f"did not say which rows of {self.table!r} it wants")
        return fault_of_rows(self.table, rows, whole) or fault_of_figures(reply)

    def _slice(self, requests: Mapping[ClientId, Request], rows: Mapping[ClientId, Array]) -> dict[ClientId, Request]:
        sliced: dict[ClientId, Request] = {}
        models = {id(requests[c].arrays): requests[c].arrays for c in rows}
        for key, model in models.items():
            # All clients of a round usually get one model, and the rows of all are taken in one call.
            clients = [c for c in rows if id(requests[c].arrays) == key]
            taken = model[self.table].take(np.concatenate([rows[c] for c in clients]), axis=0)
            ends = list(accumulate(len(rows[c]) for c in clients))
            for client, begin, end in zip(clients, [0, *ends], ends, strict=False):
                request = requests[client]
                arrays = {**model, self.table: taken[begin:end], self.table + ROWS: rows[client]}
                if self.summed:
                    arrays[self.table + OF] = np.array([len(model[self.table])], np.int64)
                sliced[client] = Request(request.do, arrays, request.config, request.extras)
        return sliced


# What the recipe needs for a configuration


def check_settings(config: Any, groups: bool) -> None:
    """Refuse settings of which one reveals what another is to hide, before the first round."""
    secure = config.secure.name != "none"
    local = config.privacy.name == "local"
    if groups or config.method.name != "fedrecon":
        case = f"method={config.method.name}: there"
        if groups:
            case = "cluster: in groups"
        if secure or config.download not in ("touched", "all"):
            raise ConfigError(f"{case} users answer as FedRecon's of one model do not; use secure=none, touched")
        if config.privacy.name != "none" and config.aggregate.name == "by_item":
            raise ConfigError(f"{case} the clients that touched an item are not counted, as by_item needs; use fedavg")
    if config.download == "touched" and secure:
        raise ConfigError(
            "download=touched reveals which items a user rated, which secure=secagg+ hides from the server; "
            "use all or blocks"
        )
    if config.download == "touched" and local:
        raise ConfigError(
            "download=touched reveals which items a user rated, which privacy=local keeps at the client; use all"
        )
    if config.download == "blocks" and not secure:
        raise ConfigError(
            "download=blocks hides which items a user rated, and the rows it sends back would reveal them; "
            "set secure=secagg+, where rows are masked, or use all"
        )


def private_handler(config: Any, method: Any, sums: str) -> tuple[AnyHandler, Arrays]:
    """The clients' handler, and the arrays of the model besides the items: counts of touched items, if needed."""
    touch = 0.0
    aggregator = build("aggregate", config.aggregate, sums=sums)
    if isinstance(aggregator, ByItem) and aggregator.counts:
        touch = aggregator.touch
    if (config.download == "touched" and not touch) or not isinstance(method, FedRecon):
        return method, {}
    touches: Arrays = {}
    if touch:
        touches = {TOUCHES: np.zeros(method.items, np.float32)}
    return PrivateFedRecon(method, config.download, config.block, touch), touches


def row_requests(config: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The request for rows, if there is one, and the extra that answers it: items or blocks."""
    if config.centralised or config.download == "all":
        return (), ()
    if config.download == "touched":
        return ("rows",), (ITEMS,)
    return ("rows",), (BLOCKS,)


def slice_rows(fleet: Fleet, config: Any) -> Fleet:
    """The fleet that sends each client the rows it requests, unless the settings say to send all."""
    if config.centralised or config.download not in ("touched", "blocks"):
        return fleet
    return SlicedFleet(fleet, ITEMS, summed=config.secure.name != "none")
