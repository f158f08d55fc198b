"""A fleet that sends each client only the rows it wants of the model's tables; it asks for them first."""

from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from mutirao.core.arrays import Array
from mutirao.core.fleet import (
    Answers,
    ClientId,
    Failure,
    Fleet,
    Reply,
    Request,
    Wrapper,
    bytes_of_replies,
    bytes_of_requests,
)
from mutirao.core.sparse_rows import BLOCKS, OF, ROWS, fault_of_rows, faults_of_order
from mutirao.core.validation import fault_of_figures, set_aside
from mutirao.errors import ConfigError
from mutirao.privacy.secure_aggregation.settings import without_session

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
