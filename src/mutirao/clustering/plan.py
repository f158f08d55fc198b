"""The plan of a run with groups: how they are formed, trained and evaluated."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mutirao.clustering.formation import NoiseRule
from mutirao.clustering.group_hyperparameters import SharedHyperparameters
from mutirao.clustering.membership import Groups
from mutirao.core.arrays import Arrays
from mutirao.core.bounds import SIZE_CAP
from mutirao.core.fleet import ClientId, Scalar
from mutirao.core.parts import AnyAggregator, AnyFilter, AnySelector
from mutirao.core.rounds import Patience

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
