"""A fleet that sends all clients of a round the same rows of the model's tables, drawn anew for each round.

Every client answers for all of these rows, moved or not: replies are of one size, so that they can be summed under
masks, and which rows are in one tells nothing of the client.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Fleet, Reply, Request, Wrapper, traffic
from mutirao.core.rows import ROWS
from mutirao.randomness import rng

DRAWN = "rows"  # the extra of a request that says which rows its tables are


class DrawnFleet(Wrapper):
    """Carries requests to train over `fleet` with a `share` of the rows of all `tables`, drawn from seed and round."""

    def __init__(self, fleet: Fleet, tables: Sequence[str], share: float) -> None:
        super().__init__(fleet)
        self.tables, self.share = tuple(tables), share

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask with these rows alone; replies then say of which rows they are."""
        cut: dict[int, tuple[Arrays, npt.NDArray[np.int32]]] = {}  # one model and one set of rows for all: one sum
        asked: dict[ClientId, Request] = {}
        for client, request in requests.items():
            if request.do == "train":
                if (key := id(request.arrays)) not in cut:
                    rows = self.draw(request)
                    parts = {k: v[rows] if k in self.tables else v for k, v in request.arrays.items()}
                    cut[key] = parts, rows
                parts, rows = cut[key]
                request = Request(request.do, parts, request.config, {**request.extras, DRAWN: rows})
            asked[client] = request
        answers = self.fleet.ask(asked)
        replies = {c: self.name_rows(r, asked[c]) for c, r in answers.replies.items()}
        return Answers(replies, answers.failures, traffic(asked, answers))

    def draw(self, request: Request) -> npt.NDArray[np.int32]:
        """The rows of a round, in rising order."""
        total = len(request.arrays[self.tables[0]])
        draw = rng(int(request.config["seed"]), int(request.config["round"]), "drawn rows")
        return np.sort(draw.choice(total, max(1, round(self.share * total)), replace=False)).astype(np.int32)

    def name_rows(self, reply: Reply, request: Request) -> Reply:
        """The reply, saying which rows of the model it is of."""
        if DRAWN not in request.extras:
            return reply
        named = {name + ROWS: request.extras[DRAWN] for name in self.tables if name in reply.arrays}
        return Reply({**reply.arrays, **named}, reply.extras, reply.metrics, reply.n)
