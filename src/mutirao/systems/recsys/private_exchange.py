"""A user who tells less: blocks instead of items, no items at all, counts in sums.

A handler around FedRecon. What is promised by it, and with which settings it is worth anything, says `promises`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.sparse_rows import BLOCKS, ROWS
from mutirao.errors import Refused
from mutirao.randomness import rng
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon
from mutirao.systems.recsys.item_aggregation import TOUCHES
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
