"""How replies become the next model. Each aggregator is called as `(current, replies, memory) -> Merged`.

Clients are taken in the order of their names and sums run in float64, so the order of replies changes no bit.
Integer buffers take the rounded mean and are never stepped by an optimizer. What must outlive the round (momentum,
moments, a step counter) is written into `memory` under the aggregator's own prefix.

`NAMES` is the table of all aggregators, by the names of the setting `aggregate`.
"""

from mutirao.aggregation.averaging import FedAvg, FedProx, Mean
from mutirao.aggregation.fedasync import FedAsync
from mutirao.aggregation.fedbuff import FedBuff
from mutirao.aggregation.feddyn import FedDyn
from mutirao.aggregation.fedexp import FedExP
from mutirao.aggregation.fednova import FedNova
from mutirao.aggregation.fedrisk import FedRisk
from mutirao.aggregation.krum import Krum, MultiKrum
from mutirao.aggregation.qfedavg import QFedAvg
from mutirao.aggregation.robust_means import RFA, CenteredClipping, FedMedian, FedTrimmedAvg
from mutirao.aggregation.scaffold import Scaffold
from mutirao.aggregation.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi

OF_MEAN = (FedAvg, FedAvgM, FedProx, FedOpt, FedAdam, FedYogi, FedAdagrad)
ROBUST = (FedMedian, FedTrimmedAvg, Krum, MultiKrum, RFA, CenteredClipping)
DRIFT_AND_FAIRNESS = (Scaffold, FedDyn, FedNova, FedExP, QFedAvg)
ASYNCHRONOUS = (FedBuff, FedAsync)
NAMES = {part.__name__.lower(): part for part in (*OF_MEAN, Mean, *ROBUST, FedRisk, *DRIFT_AND_FAIRNESS, *ASYNCHRONOUS)}

__all__ = [
    "ASYNCHRONOUS",
    "DRIFT_AND_FAIRNESS",
    "NAMES",
    "OF_MEAN",
    "RFA",
    "ROBUST",
    "CenteredClipping",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedDyn",
    "FedExP",
    "FedMedian",
    "FedNova",
    "FedOpt",
    "FedProx",
    "FedRisk",
    "FedTrimmedAvg",
    "FedYogi",
    "Krum",
    "Mean",
    "MultiKrum",
    "QFedAvg",
    "Scaffold",
]
