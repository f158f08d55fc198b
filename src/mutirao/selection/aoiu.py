"""Age of information and utility, each alone and together."""

# ruff: noqa: D102  # `mix` is what the class says it is

from dataclasses import dataclass
from typing import Literal

from mutirao.selection.base import check_setting
from mutirao.selection.scores import AGES, UTILITIES
from mutirao.selection.weighted_scores import AsMix, AsMixOfUtilities, Mix


@dataclass(frozen=True)
class AoI(AsMix):
    """The clients with the greatest age of information: rounds since they were selected; ties at random.

    With m of K clients a round every client takes part once in K / m rounds.

    >>> import numpy as np
    >>> from mutirao.core.roster import Roster
    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.last_selected[:] = [4, 1, 3]
    >>> AoI(1)(roster, 5, np.random.default_rng(0))  # bia has waited for four rounds
    ['bia']
    """

    count: int | float

    @property
    def mix(self) -> Mix:
        return Mix(self.count, "age")


@dataclass(frozen=True)
class Entropy(AsMixOfUtilities):
    """The clients on whose samples the global model is least certain: the highest mean entropy of its predictions.

    u_i = mean over at most `samples` of client i of -sum_c p_c ln p_c, with the model of the round in which i was last
    selected; ln(classes) before that, so that every client is selected once before any is again.

    >>> import numpy as np
    >>> from mutirao.core.roster import Roster
    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.figures["entropy"] = np.array([0.1, 0.6, 0.3])
    >>> Entropy(1)(roster, 5, np.random.default_rng(0))
    ['bia']
    """

    count: int | float

    @property
    def mix(self) -> Mix:
        return self.mix_of(self.count, "entropy")


@dataclass(frozen=True)
class AoIU(AsMixOfUtilities):
    """Age and utility together: the highest alpha age_i + (1 - alpha) utility_i, both scaled to 0..1; ties at random.

    age_i is the number of rounds since i was selected, utility_i the entropy above. alpha = 1 is `AoI`, alpha = 0 is
    `Entropy`. Other ages (`version_age` in models made, `since_reply`, `since_improvement` of its loss) and utilities
    (`loss`, `rms_loss`, `gradient_norm`, `update_norm`, `dissimilarity` of its update from the others') go by name; a
    utility not known yet counts as the highest.

    Caio has waited longest, and the model is least certain of ana's samples; `alpha` decides between them:

    >>> import numpy as np
    >>> from mutirao.core.roster import Roster
    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.last_selected[:] = [3, 2, 1]
    >>> roster.figures["entropy"] = np.array([2.0, 0.5, 1.0])
    >>> [AoIU(1, alpha)(roster, 4, np.random.default_rng(0)) for alpha in (1.0, 0.5, 0.0)]
    [['caio'], ['caio'], ['ana']]
    """

    count: int | float
    alpha: float = 0.5
    age: Literal["age", "version_age", "since_reply", "since_improvement"] = "age"
    utility: Literal["entropy", "loss", "rms_loss", "gradient_norm", "update_norm", "dissimilarity"] = "entropy"

    @property
    def mix(self) -> Mix:
        check_setting("alpha", 0 <= self.alpha <= 1, self.alpha, "between 0 and 1")
        check_setting("age", self.age in AGES, self.age, f"one of {', '.join(AGES)}")
        check_setting("utility", self.utility in UTILITIES, self.utility, f"one of {', '.join(UTILITIES)}")
        return self.mix_of(self.count, f"{self.alpha!r} {self.age} + {1 - self.alpha!r} {self.utility}")
