"""A fleet that sends each client only the rows it wants of the model's tables; it asks for them first."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mutirao.arrays import Array, Arrays, nbytes
from mutirao.filters import check, fault_of_extras
from mutirao.fleet import Answers, ClientId, Failure, Fleet, Reply, Request
from mutirao.rounds import bytes_of_replies
from mutirao.rows import ROWS, fault_of_rows


@dataclass(frozen=True)
class SlicedFleet:
    """Carries requests over `fleet` with `table` cut to the rows that the client names when asked for its "rows".

    A client learns nothing of other rows, and the server which rows the client works on: no more than its reply
    tells. What was carried both ways, the question for rows included, is counted.
    """

    fleet: Fleet
    table: str

    def clients(self) -> list[ClientId]:
        """Who is there now."""
        return self.fleet.clients()

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Ask each client for its rows, then send it the request with these alone."""
        question = {id(r.config): Request("rows", {}, r.config) for r in requests.values()}  # mostly one for all
        wishes = self.fleet.ask({c: question[id(r.config)] for c, r in requests.items()})
        whole = next((r.arrays for r in requests.values()), {})
        wishes = check(wishes, lambda reply: self._fault(whole, reply))
        cut = self._cut(requests, {c: r.extras[self.table] for c, r in wishes.replies.items()})
        answers = self.fleet.ask(cut)
        down = sum(nbytes(r.arrays) for r in cut.values())
        up = bytes_of_replies(wishes) + bytes_of_replies(answers)
        failures = dict(sorted((wishes.failures | answers.failures).items()))
        return Answers(answers.replies, failures, (down, up))

    def _fault(self, model: Arrays, reply: Reply) -> Failure | None:
        rows = reply.extras.get(self.table)
        if rows is None or len(reply.extras) > 1:
            return Failure("missing_key", f"did not say which rows of {self.table!r} it wants")
        return fault_of_rows(self.table, rows, model[self.table]) or fault_of_extras(reply)

    def _cut(self, requests: Mapping[ClientId, Request], rows: Mapping[ClientId, Array]) -> dict[ClientId, Request]:
        cut: dict[ClientId, Request] = {}
        models = {id(requests[c].arrays): requests[c].arrays for c in rows}
        for key, model in models.items():  # all clients of a round get one model: its rows are taken in one go
            clients = [c for c in rows if id(requests[c].arrays) == key]
            taken = model[self.table].take(np.concatenate([rows[c] for c in clients]), axis=0)
            ends = np.cumsum([len(rows[c]) for c in clients]).tolist()
            for client, begin, end in zip(clients, [0, *ends], ends, strict=False):
                request = requests[client]
                own = {**model, self.table: taken[begin:end], self.table + ROWS: rows[client]}
                cut[client] = Request(request.do, own, request.config)
        return cut
