"""Early stopping: validation data say when a run ends and which model is its best; that one is then judged, once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mutirao.core.arrays import Arrays
from mutirao.core.records import Row
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError


@dataclass(frozen=True)
class EarlyStopping:
    """A run ends when so many rounds have passed since its best one; what `measure` says of that model is its result.

    While it runs, nobody looks at what measures it: a round chosen by test data would flatter the model.
    """

    patience: int = 0  # 0: all rounds are made
    measure: Callable[[Run, Arrays], dict[str, float]] | None = None

    def is_over(self, round: int, best: Row | None) -> bool:
        """Whether the run ends after this round."""
        return bool(self.patience) and best is not None and round - int(best["round"]) >= self.patience


def check_one_model(config: Any) -> None:
    """Refuse patience where there is no single model that could be the best."""
    for key in ("cluster", "personal"):
        if config.patience and (name := getattr(config, key).name) != "none":
            raise ConfigError(f"patience: with {key}={name} there are several models, each with a best round; use 0")
