"""A user who tells less: blocks instead of items, the same rows as everybody, decoys among its ratings, counts in sums.

A handler around FedRecon. What is promised by it, and with which settings it is worth anything, says `promises`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.rows import BLOCKS, ROWS, fault_of_rows, faults_of_order, whole
from mutirao.errors import Refused
from mutirao.fleets.drawn import DRAWN
from mutirao.randomness import Secret, rng
from mutirao.recsys.aggregation import TOUCHES
from mutirao.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon
from mutirao.recsys.ratings import Taste
from mutirao.schedules import Schedule

DECOYS, FAKES = "recsys.decoys", "recsys.fakes"  # where items that were never rated lie in the state, and their ratings

Rows = npt.NDArray[np.int32]
Asked = tuple[FedRecon, Request, Site, Rows | None]  # who does what with which data, and the rows of which it is told


@dataclass(frozen=True)
class Discreet:
    """FedRecon, but

    - `download=blocks`: a user names the blocks of `block` items or more that its own are in, and gets those whole;
    - `download=drawn`: it works on the rows that all are sent, and answers for all of them;
    - `download=all` and `drawn`: it names no rows;
    - `decoys`: for each rating so many items it never rated, each with one of its own ratings, drawn once from the
      system's randomness and kept: items that change from round to round could be told from others;
    - `touch`: it adds as much to `touches` for each item it moved, and counts as one sample.
    """

    method: FedRecon
    download: str = "touched"
    block: int = 20
    decoys: float = 0.0
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
        if self.decoys and request.do == "train":
            site = Site(site.id, self.among_decoys(site.data, site.state), site.state)
        rows = request.arrays.get(ITEM_ROWS) if self.download == "blocks" else request.extras.get(DRAWN)
        if rows is None or self.download not in ("blocks", "drawn"):
            arrays |= {k: v for k, v in request.arrays.items() if k == ITEM_ROWS}
            return self.method, Request(request.do, arrays, request.config), site, None
        self.check_rows(rows, arrays, site)
        inside = np.isin(site.data.items, rows)
        places = np.searchsorted(rows, site.data.items[inside]).astype(np.int32)
        mine = Taste(places, site.data.values[inside])
        plain = Request(request.do, arrays, request.config)
        return replace(self.method, items=len(rows)), plain, Site(site.id, mine, site.state), rows

    def check_rows(self, rows: Rows, arrays: Arrays, site: Site) -> None:
        """Refuse rows that are none, and others than were asked for."""
        like = np.empty((self.method.items, 0))
        if (
            fault_of_rows(ITEMS, rows, like)
            or faults_of_order(ITEMS, {"": rows}, like)
            or len(rows) != len(arrays[ITEMS])
        ):
            raise ValueError("was sent rows that cannot be")
        if self.download == "blocks" and not np.array_equal(rows, self.blocks_around(site.data.items)):
            raise ValueError("was not sent the rows it asked for")

    def tell(self, plain: Request, reply: Reply | None, rows: Rows | None) -> Reply:
        """The reply with counts of touches, of as many rows as everybody's, or by the numbers all know."""
        touch = self.touch
        if reply is None:  # too few of its ratings are among the rows: it moves nothing
            sent, touch = plain.arrays[ITEMS], 0.0
            reply = Reply({ITEMS: sent, ITEM_ROWS: np.arange(len(sent), dtype=np.int32)}, n=1)
        if not reply.arrays:
            return reply
        arrays, moved = dict(reply.arrays), reply.arrays[ITEM_ROWS]
        if self.touch:
            arrays[TOUCHES] = np.full(len(moved), touch, np.float32)
            arrays[TOUCHES + ROWS] = moved
        if rows is not None and self.download == "drawn":
            begin = {ITEMS: plain.arrays[ITEMS], TOUCHES: np.zeros(len(rows), np.float32)}
            arrays = whole({k: v for k, v in begin.items() if k in arrays}, arrays)
        elif rows is not None:
            arrays |= {name: rows[moved] for name in (ITEM_ROWS, TOUCHES + ROWS) if name in arrays}
        return Reply(arrays, reply.extras, reply.metrics, 1 if self.touch else reply.n)

    def among_decoys(self, taste: Taste, state: Arrays) -> Taste:
        """The ratings, and among them decoys, which are drawn when there are none yet."""
        if DECOYS not in state:
            free = np.setdiff1d(np.arange(self.method.items), taste.items)
            count = min(max(1, round(self.decoys * len(taste))), len(free))
            chance, which = Secret().random(len(free)), Secret().random(count)
            state[DECOYS] = free[np.argsort(chance)[:count]].astype(np.int32)
            state[FAKES] = taste.values[(which * len(taste)).astype(np.int64)].astype(np.float32)
        fresh = ~np.isin(state[DECOYS], taste.items)  # what was a decoy may have been rated since
        items = np.concatenate([taste.items, state[DECOYS][fresh]])
        order = np.argsort(items)
        values = np.concatenate([taste.values, state[FAKES][fresh]])
        return Taste(items[order].astype(np.int32), values[order], (np.arange(len(items)) < len(taste))[order])


def is_still(method: FedRecon, site: Site) -> bool:
    """Whether a user has too few ratings among the rows it was sent to learn from them, or too many."""
    return len(site.data) < 2 or (method.implicit and len(site.data) >= method.items)


def blocks_of(items: int, block: int) -> npt.NDArray[np.int64]:
    """The block of each item: dealt at random, the same for everybody and ever, each of `block` items or more."""
    place = np.empty(items, np.int64)
    place[rng(0, 0, "blocks of items").permutation(items)] = np.arange(items)
    return np.asarray(np.minimum(place // block, max(0, items // block - 1)))
