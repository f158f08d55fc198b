"""What settings of a recommender promise its users, what travels for it, and what would be no promise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

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

Rows = npt.NDArray[np.int32]
Asked = tuple[FedRecon, Request, Site, Rows | None]  # who does what with which data, and the rows of which it is told


@dataclass(frozen=True)
class Discreet:
    """FedRecon, but

    - `download=blocks`: a user names the blocks of `block` items or more that its own are in, and gets those whole;
    - `download=all`: it names no rows;
    - `touch`: it adds as much to `touches` for each item it moved, and counts as one sample.
    """

    method: FedRecon
    download: str = "touched"
    block: int = 20
    touch: float = 0.0

    @property
    def provides(self) -> frozenset[str]:
        """What FedRecon does."""
        return self.method.provides

    @property
    def schedule(self) -> Schedule:
        """FedRecon's."""
        return self.method.schedule

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer, as far as it may tell."""
        if request.do == "rows":
            return self.name_rows(request, site)
        method, plain, user, rows = self.ask(request, site)
        reply = None if is_still(method, user) and rows is not None else method(plain, user)
        return self.tell(plain, reply, rows)

    def many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        """The same answers; those who work on the same table at once."""
        out: dict[ClientId, Reply | Failure] = {}
        ready: dict[ClientId, Asked] = {}
        for client, request in requests.items():
            try:
                if request.do == "rows":
                    out[client] = self.name_rows(request, sites[client])
                    continue
                asked = self.ask(request, sites[client])
                if asked[3] is None:
                    ready[client] = asked
                else:  # its table is not the others'
                    out[client] = self(request, sites[client])
            except (ValueError, TypeError, Refused) as error:
                out[client] = failure_of(error)
        plain = {c: request for c, (_, request, _, _) in ready.items()}
        made = self.method.many(plain, {c: site for c, (_, _, site, _) in ready.items()}) if plain else {}
        return out | {c: self.tell(plain[c], r, None) if isinstance(r, Reply) else r for c, r in made.items()}

    def name_rows(self, request: Request, site: Site) -> Reply:
        """The rows this user wants to have: its items, or all of their blocks."""
        if self.download not in ("touched", "blocks"):
            raise Refused("download", f"with download={self.download} nobody says which items it works on")
        if self.download == "touched":
            return self.method(request, site)
        rows = self.blocks_around(site.data.items)  # of all its items, whatever it works on: the same in every round
        return Reply({}, {BLOCKS: rows}, n=len(rows))

    def blocks_around(self, rows: Rows) -> Rows:
        """All items of the blocks that these are in."""
        blocks = blocks_of(self.method.items, self.block)
        return np.flatnonzero(np.isin(blocks, blocks[rows])).astype(np.int32)

    def ask(self, request: Request, site: Site) -> Asked:
        """What FedRecon is asked, of which data, and of which rows, if only these came."""
        if not isinstance(site.data, Taste):
            raise ValueError(f"holds {type(site.data).__name__}, not ratings")
        arrays = {ITEMS: request.arrays[ITEMS]}
        sent = request.arrays.get(ITEM_ROWS)
        if sent is None or self.download != "blocks":
            arrays |= {k: v for k, v in request.arrays.items() if k == ITEM_ROWS}
            return self.method, Request(request.do, arrays, request.config), site, None
        rows = self.blocks_around(site.data.items)
        if len(arrays[ITEMS]) != len(rows) or not np.array_equal(sent, rows):
            raise ValueError("was not sent the rows it asked for")
        places = np.searchsorted(rows, site.data.items).astype(np.int32)
        mine = Taste(places, site.data.values)
        plain = Request(request.do, arrays, request.config)
        return replace(self.method, items=len(rows)), plain, Site(site.id, mine, site.state), rows

    def tell(self, plain: Request, reply: Reply | None, rows: Rows | None) -> Reply:
        """The reply with counts of touches, its rows by the numbers they have in the whole table."""
        touch = self.touch
        if reply is None:  # it has too few ratings to learn from: it moves nothing
            sent, touch = plain.arrays[ITEMS], 0.0
            reply = Reply({ITEMS: sent, ITEM_ROWS: np.arange(len(sent), dtype=np.int32)}, n=1)
        if not reply.arrays:
            return reply
        arrays, moved = dict(reply.arrays), reply.arrays[ITEM_ROWS]
        if self.touch:
            arrays[TOUCHES] = np.full(len(moved), touch, np.float32)
            arrays[TOUCHES + ROWS] = moved
        if rows is not None:
            arrays |= {name: rows[moved] for name in (ITEM_ROWS, TOUCHES + ROWS) if name in arrays}
        return Reply(arrays, reply.extras, reply.metrics, 1 if self.touch else reply.n)


def is_still(method: FedRecon, site: Site) -> bool:
    """Whether a user has too few ratings to learn from them, or has taken every item it was sent."""
    return len(site.data) < 2 or (method.implicit and len(site.data) >= method.items)


def blocks_of(items: int, block: int) -> npt.NDArray[np.int64]:
    """The block of each item: dealt at random, the same for everybody and ever, each of `block` items or more."""
    place = np.empty(items, np.int64)
    place[rng(0, 0, "blocks of items").permutation(items)] = np.arange(items)
    return np.asarray(np.minimum(place // block, max(0, items // block - 1)))


WARM = "warm"  # a warm-up for groups: its test model is the same for all and goes down whole, once


class SlicedFleet(Wrapper):
    """Carries requests over `fleet` with `table` cut to the rows that the client names when asked for its "rows".

    A client learns nothing of other rows, and the server which rows the client works on: no more than its reply
    tells. What was carried both ways, the question for rows included, is counted. Requests without that table, such as
    the stages of a secure sum but one, are passed on; for such a sum, `summed`, clients name blocks, and are told how
    long the table is.
    """

    def __init__(self, fleet: Fleet, table: str, summed: bool = False) -> None:
        super().__init__(fleet)
        self.table, self.summed, self.named = table, summed, BLOCKS if summed else table

    def stagger(self, buffer: int, at_once: int) -> None:
        """Not over a network: a client would be asked for its rows while it trains on others."""
        raise ConfigError("clients that are sent only the rows they ask for are waited for; use download=all")

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask each client for its rows, then send it the request with these alone."""
        if not requests:
            return Answers({}, {}, (0, 0))
        if all(r.do == WARM for r in requests.values()) or any(self.table not in r.arrays for r in requests.values()):
            return self.fleet.ask(requests)
        configs = {id(r.config): r.config for r in requests.values()}  # mostly one for all
        question = {key: Request("rows", {}, without_session(config)) for key, config in configs.items()}
        wishes = self.fleet.ask({c: question[id(r.config)] for c, r in requests.items()})
        whole = next(iter(requests.values())).arrays[self.table]
        wishes = set_aside(wishes, self._faults(whole, wishes.replies))
        cut = self._cut(requests, {c: r.extras[self.named] for c, r in wishes.replies.items()})
        answers = self.fleet.ask(cut)
        down = bytes_of_requests(cut)
        up = bytes_of_replies(wishes) + bytes_of_replies(answers)
        failures = dict(sorted((wishes.failures | answers.failures).items()))
        return Answers(answers.replies, failures, (down, up))

    def _faults(self, whole: Array, replies: Mapping[ClientId, Reply]) -> dict[ClientId, Failure]:
        found = {c: wrong for c, r in replies.items() if (wrong := self._fault(whole, r)) is not None}
        rows = {c: r.extras[self.named] for c, r in replies.items() if c not in found}
        return found | faults_of_order(self.table, rows, whole)

    def _fault(self, whole: Array, reply: Reply) -> Failure | None:
        rows = reply.extras.get(self.named)
        if rows is None or len(reply.extras) > 1:
            return Failure("missing_key", f"did not say which rows of {self.table!r} it wants")
        return fault_of_rows(self.table, rows, whole) or fault_of_figures(reply)

    def _cut(self, requests: Mapping[ClientId, Request], rows: Mapping[ClientId, Array]) -> dict[ClientId, Request]:
        cut: dict[ClientId, Request] = {}
        models = {id(requests[c].arrays): requests[c].arrays for c in rows}
        for key, model in models.items():  # all clients of a round get one model: its rows are taken in one go
            clients = [c for c in rows if id(requests[c].arrays) == key]
            taken = model[self.table].take(np.concatenate([rows[c] for c in clients]), axis=0)
            ends = list(accumulate(len(rows[c]) for c in clients))
            for client, begin, end in zip(clients, [0, *ends], ends, strict=False):
                request = requests[client]
                own = {**model, self.table: taken[begin:end], self.table + ROWS: rows[client]}
                if self.summed:
                    own[self.table + OF] = np.array([len(model[self.table])], np.int64)
                cut[client] = Request(request.do, own, request.config, request.extras)
        return cut


DOWNLOADS = ("touched", "blocks", "all")


def touch_of(config: Any, sums: str) -> float:
    """What users add to the count of each item they touch; 0: the server sees which they are, or need not know."""
    part = build("aggregate", config.aggregate, sums=sums)
    return part.touch if isinstance(part, ByItem) and part.counts else 0.0


def discreet(config: Any, method: Any, sums: str) -> tuple[AnyHandler, Arrays]:
    """What users do, the method itself if nothing else is asked of them; and what a model has besides the items.

    That are counts of those who touched each item, if there are any.
    """
    touch = touch_of(config, sums)
    if (config.download == "touched" and not touch) or not isinstance(method, FedRecon):
        return method, {}
    touches = {TOUCHES: np.zeros(method.items, np.float32)} if touch else {}
    return Discreet(method, config.download, config.block, touch), touches


def rows_asked(config: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What users are asked to know which rows they need, and the extra they answer with: their items, or blocks."""
    if config.centralised or config.download == "all":
        return (), ()
    return ("rows",), (ITEMS if config.download == "touched" else BLOCKS,)


def check(config: Any, groups: bool) -> None:
    """Refuse, before the first round, settings of which one undoes what another promises."""
    secure, local, how = config.secure.name != "none", config.privacy.name == "local", config.download
    if groups or config.method.name != "fedrecon":
        who = "cluster: in groups" if groups else f"method={config.method.name}: there"
        if secure or how not in ("touched", "all"):
            raise ConfigError(f"{who} users answer as FedRecon's of one model do not; use secure=none, touched")
        if config.privacy.name != "none" and config.aggregate.name == "by_item":
            raise ConfigError(f"{who} nobody counts who touched an item, by which by_item divides; use fedavg")
    if how == "touched" and (secure or local):
        keeps = "secure=secagg+ keeps from the server; use all or blocks"
        keeps = keeps if secure else "privacy=local keeps at home; use all"
        raise ConfigError(f"download=touched tells which items a user rated, which {keeps}")
    if how == "blocks" and not secure:
        raise ConfigError(
            "download=blocks hides which items a user rated, and the rows it sends back would tell them again; "
            "set secure=secagg+, where rows are masked, or use all"
        )


def slice_rows(fleet: Fleet, config: Any) -> Fleet:
    """The fleet that asks users for the rows they need, if they name any; a secure sum is made around it."""
    if config.centralised or config.download not in ("touched", "blocks"):
        return fleet
    return SlicedFleet(fleet, ITEMS, summed=config.secure.name != "none")
