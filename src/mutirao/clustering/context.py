"""The plan of a run with groups (how they are formed, trained and evaluated), and the context that methods get."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mutirao.clustering.formation import Admission, NoiseRule
from mutirao.clustering.group_hyperparameters import SharedHyperparameters
from mutirao.clustering.group_state import Groups
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Scalar, traffic
from mutirao.core.parts import AnyAggregator, AnyFilter, AnySelector
from mutirao.core.records import Round, Row
from mutirao.core.rounds import Patience, Run
from mutirao.core.validation import SIZE_CAP, fault_of_extras, sift

# Epochs of a model that is fitted at a client and stays there: not those of a round, which a site may have pinned.
FIT_EPOCHS = "fit_epochs"

GroupMetrics = tuple[Mapping[str, float], Mapping[str, Mapping[str, float]]]  # of all groups together, and of each
EvaluateGroups = Callable[[Mapping[str, Arrays], Groups], GroupMetrics]  # of models by group, and of who is in which


@dataclass(frozen=True)
class Plan:
    """`model(outputs)` is the common initial model with that many outputs, `model(outputs, i)` another one."""

    model: Callable[..., Arrays]
    classes: int
    parts: Callable[[int], tuple[AnySelector, AnyAggregator]]  # of a group with that many clients
    cluster: Any = None  # a clusterer, or a `Grouper`
    noise: NoiseRule = "nearest"
    directions: bool = False
    signature_size: int = 0  # numbers in a signature (0: as many as most clients send)
    reduced_heads: bool = False  # whether output layers have only the classes of their group
    filters: tuple[AnyFilter, ...] = ()
    head: str = ""  # the name of the model's last layer
    regroup: int = 0  # rounds after which groups are formed anew (0: never)
    stable: int = 0  # evaluations without gain after which a group has settled (0: never)
    patience: Patience = field(default_factory=Patience)
    # In simulations: the true group of each client in a round, and the clients whose metrics count.
    true_groups: Callable[[int], Mapping[ClientId, int] | None] = lambda round: None
    honest: Callable[[ClientId], bool] = lambda client: True
    clients_evaluate: bool = True  # whether clients evaluate models on their own test data
    reported_metrics: tuple[str, ...] = ("accuracy", "accuracy_known", "loss")  # of these evaluations
    monitor: str = "accuracy"  # the metric that scores groups
    higher_is_better: bool = True
    evaluate_on_server: EvaluateGroups | None = None  # where clients do not evaluate
    hyperparameters: SharedHyperparameters = SharedHyperparameters()
    round_config: Mapping[str, Scalar] = field(default_factory=dict)  # sent to the clients of all groups
    clients_every: int = 0  # rounds between records of the worst client (0: never)
    inherit: Callable[[Sequence[Arrays]], Arrays] = lambda before: {}  # a new group's memory, from that of all before
    size_cap: float = SIZE_CAP  # most weight of a client, as a multiple of the median samples (0: no limit)
    allowed_metrics: Collection[str] | None = None  # in replies to training (None: any that most clients send)


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
        answers = Answers({}, {})
        if requests:
            answers = sift(self.fleet.ask(requests), fault)
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
