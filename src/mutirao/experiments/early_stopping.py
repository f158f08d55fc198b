"""Early stopping: validation data decide when a run ends and which model is best; that one is then tested, once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mutirao.core.arrays import Arrays
from mutirao.core.records import Row
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run after `patience` rounds without a better one; `final_metrics` of the best model are its result.

    The test data are not used during the run: a round chosen by test data would flatter the model.
    """

    patience: int = 0  # 0: all rounds are made
    final_metrics: Callable[[Run, Arrays], dict[str, float]] | None = None

    def is_over(self, round: int, best: Row | None) -> bool:
        """Whether the run ends after this round."""
        return bool(self.patience) and best is not None and round - int(best["round"]) >= self.patience


def check_one_model(config: Any) -> None:
    """Refuse patience where there is no single model that could be the best."""
    if not config.patience:
        return
    for key in ("cluster", "personal"):
        name = getattr(config, key).name
        if name != "none":
            raise ConfigError(f"patience: with {key}={name} there are several models, each with a best round; use 0")
