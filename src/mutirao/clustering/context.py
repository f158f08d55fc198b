"""The context of forming and moving groups: run, fleet and plan, and a record of requests besides training."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mutirao.clustering.late_joiners import Admission
from mutirao.clustering.plan import Plan
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, traffic
from mutirao.core.records import Round, Row
from mutirao.core.rounds import Run
from mutirao.core.validation import fault_of_extras, sift

log = logging.getLogger("mutirao")


@dataclass
class GroupContext:
    """Run, fleet and plan; `rows`, `down` and `up` collect what happens besides training until the record."""

    run: Run
    fleet: Fleet
    plan: Plan
    rows: list[Row] = field(default_factory=list)  # of clients
    down: int = 0  # bytes
    up: int = 0

    def ask(
        self,
        requests: Mapping[ClientId, Request],
        what: str,
        fault: Callable[[Reply], Failure | None] = fault_of_extras,
    ) -> dict[ClientId, Reply]:
        """Send requests besides training and return the usable replies; count bytes and note failures."""
        answers = sift(self.fleet.ask(requests), fault) if requests else Answers({}, {})
        down, up = traffic(requests, answers)
        self.down += down
        self.up += up
        for client, failure in answers.failures.items():
            log.warning("round %d: %s of %s %s", self.run.round + 1, what, client, failure)
            self.note(client, failure=str(failure))
        return answers.replies

    def note(
        self,
        client: ClientId,
        admission: Admission | None = None,
        n: int = 0,
        failure: str = "",
        rejected: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Add a row on a client that was not asked to train: a warm-up, an admission, a refusal."""
        number = self.run.round + 1
        row: Row = {"round": number, "client": client, "try": 0, "replied": int(n > 0), "n": n, "weight": 0.0}
        row |= {"age": 0, "failure": failure, "rejected": rejected}
        if admission is not None:
            row |= {"group": admission.group, "distance": admission.distance, "confidence": admission.confidence}
            row["rejected"] = admission.quarantine and f"quarantine: {admission.quarantine}"
        self.rows.append(row | dict(figures or {}))

    def finish_round(self, done: Round) -> Round:
        """Add the collected rows and bytes to the record of a round, and begin collecting anew."""
        done.row["bytes_down"] += self.down
        done.row["bytes_up"] += self.up
        rows = self.rows
        self.rows = []
        self.down = 0
        self.up = 0
        return Round(done.row, rows + done.clients)
