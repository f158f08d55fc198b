"""How groups are formed and trained: all that a recipe says of it, in one place."""

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
    """`model(outputs)` gives the common fresh model with a head of that size, `model(outputs, i)` another one."""

    model: Callable[..., Arrays]
    classes: int
    parts: Callable[[int], tuple[AnySelector, AnyAggregator]]  # of a group with so many clients
    cluster: Any = None  # a clusterer, or a `Grouper`
    noise: NoiseRule = "nearest"
    directions: bool = False
    signature_size: int = 0  # numbers in a signature (0: as many as most clients send)
    reduced_heads: bool = False  # whether heads have only the classes a group holds
    filters: tuple[AnyFilter, ...] = ()
    head: str = ""  # the name of the model's last layer
    regroup: int = 0  # rounds after which groups are formed anew (0: never)
    stable: int = 0  # judgements without gain after which a group has settled (0: never)
    patience: Patience = field(default_factory=Patience)
    true_groups: Callable[[int], Mapping[ClientId, int] | None] = lambda round: (
        None
    )  # who is alike by then, in simulation
    honest: Callable[[ClientId], bool] = lambda client: True  # whose judgement counts, in simulation
    clients_evaluate: bool = True  # whether clients say how the models do on their own test data
    reported_metrics: tuple[str, ...] = ("accuracy", "accuracy_known", "loss")  # what they say of it
    monitor: str = "accuracy"  # by which groups are judged
    higher_is_better: bool = True  # whether more of it is better
    evaluate_on_server: EvaluateGroups | None = None  # how the models do where clients do not say
    hyperparameters: SharedHyperparameters = SharedHyperparameters()  # what each group trains by
    round_config: Mapping[str, Scalar] = field(
        default_factory=dict
    )  # what the clients of all groups are told in a round
    clients_every: int = 0  # rounds between judgements by every client, worst and all (0: never)
    # With what the memory of a new group begins after a warm-up, given those of the groups before.
    inherit: Callable[[Sequence[Arrays]], Arrays] = lambda before: {}
    size_cap: float = SIZE_CAP  # times the median samples that a client counts for at most (0: any number)
    allowed_metrics: Collection[str] | None = (
        None  # that clients may tell with an update (None: any that most of them do)
    )
