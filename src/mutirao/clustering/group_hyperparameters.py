"""Hyperparameters of each group: the same for all, from a table, or chosen among candidates by its own clients.

A part gives, for a group and a round, values of `lr`, `epochs` and `batch_size` that replace the common ones, and says
in which rounds all groups restart from the first model.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mutirao.config import Scalar, parse_value
from mutirao.core.hyperparameters import check_hyperparameter
from mutirao.errors import Refused

CAN = ("lr", "epochs", "batch_size")
Scores = Mapping[str, Sequence[tuple[int, float]]]  # of each group: round and score
Hyperparameters = dict[str, Scalar]


@dataclass(frozen=True)
class SharedHyperparameters:
    """All groups train with the same settings.

    >>> SharedHyperparameters().config_for("g0", 1, {}, True)
    {}
    """

    @property
    def trials(self) -> int:
        """Rounds in which candidates are tried."""
        return 0

    @property
    def names(self) -> set[str]:
        """The settings that groups may differ in."""
        return set()

    def config_for(self, group: str, round: int, scores: Scores, higher_is_better: bool) -> Hyperparameters:
        """The values that replace the common ones: none."""
        return {}

    def restarts(self, round: int) -> bool:
        """Whether all groups restart from the first model in this round."""
        return False


@dataclass(frozen=True)
class GivenHyperparameters(SharedHyperparameters):
    """Values from a table, `g0: lr=0.1 epochs=2; g1: lr=0.01`; groups that are not in it train with the common ones.

    >>> GivenHyperparameters("g0: lr=0.1 epochs=2; g1: lr=0.01").config_for("g0", 1, {}, True)
    {'lr': 0.1, 'epochs': 2}
    """

    table: str = ""

    def __post_init__(self) -> None:
        self.rows()  # raises ValueError for a wrong table

    @property
    def names(self) -> set[str]:
        """The settings in the table."""
        return set().union(*self.rows().values())

    def rows(self) -> dict[str, Hyperparameters]:
        """The settings by group."""
        out: dict[str, Hyperparameters] = {}
        for row in filter(None, (part.strip() for part in self.table.split(";"))):
            group, colon, settings = row.partition(":")
            if not colon or not group.strip().startswith("g") or not settings.split():
                raise ValueError(f"{row!r} is not of the form g0: lr=0.1 epochs=2")
            out[group.strip()] = dict(read_setting(word) for word in settings.split())
        if not out:
            raise ValueError("the table is empty; use a table such as table='g0: lr=0.1; g1: lr=0.01'")
        return out

    def config_for(self, group: str, round: int, scores: Scores, higher_is_better: bool) -> Hyperparameters:
        """The group's row."""
        return self.rows().get(group, {})


@dataclass(frozen=True)
class ChosenHyperparameters(SharedHyperparameters):
    """Each group tries all candidates, `rounds` rounds each from the same first model, and continues with the best.

    Candidates are all pairs of the values of `lr` and of `epochs`, each separated by commas. The best has the best
    evaluation by the group's clients after its last trial; the group restarts with it from the first model.

    >>> chosen = ChosenHyperparameters(lr="0.1,0.01", epochs="1", rounds=2)
    >>> chosen.candidates, chosen.trials
    ([{'lr': 0.1, 'epochs': 1}, {'lr': 0.01, 'epochs': 1}], 4)
    """

    lr: str = ""
    epochs: str = ""
    rounds: int = 2

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}, but must be at least 1")
        if len(self.candidates) < 2:
            raise ValueError("two candidates at least are needed, such as lr='0.01,0.1'")

    @property
    def names(self) -> set[str]:
        """The settings that candidates set."""
        return set(self.candidates[0])

    @property
    def candidates(self) -> list[Hyperparameters]:
        """All candidates, in the order of their trials."""
        columns = []
        for name, values in (("lr", self.lr), ("epochs", self.epochs)):
            listed = [value.strip() for value in str(values).split(",") if value.strip()]
            if listed:
                columns.append([read_setting(f"{name}={value}") for value in listed])
        if columns:
            return [dict(row) for row in itertools.product(*columns)]
        return []

    @property
    def trials(self) -> int:
        """Rounds of all trials together."""
        return self.rounds * len(self.candidates)

    def config_for(self, group: str, round: int, scores: Scores, higher_is_better: bool) -> Hyperparameters:
        """The candidate on trial, or the best one."""
        if round <= self.trials:
            return self.candidates[(round - 1) // self.rounds]
        return self.candidates[self.best(group, scores, higher_is_better)]

    def restarts(self, round: int) -> bool:
        """At the first round of every candidate, and after the trials."""
        return 1 < round <= self.trials + 1 and (round - 1) % self.rounds == 0

    def best(self, group: str, scores: Scores, higher_is_better: bool) -> int:
        """The candidate with the best score in the group, the first of equals; the first if there are no scores."""
        by_round = dict(scores.get(group, ()))
        found = {}
        for i in range(len(self.candidates)):
            last_round = (i + 1) * self.rounds
            if last_round in by_round:
                found[i] = by_round[last_round]
        if not found:
            return 0
        # `max` and `min` return the first of equals, so the order of the candidates decides.
        if higher_is_better:
            return max(found, key=lambda i: found[i])
        return min(found, key=lambda i: found[i])


NAMES: dict[str, type[SharedHyperparameters]] = {
    "none": SharedHyperparameters,
    "given": GivenHyperparameters,
    "chosen": ChosenHyperparameters,
}


def read_setting(text: str) -> tuple[str, Scalar]:
    """The name and the value of `lr=0.1`, checked as clients do."""
    name, equals, value = text.partition("=")
    if not equals or name not in CAN:
        raise ValueError(f"{text!r} is not one of {', '.join(f'{n}=VALUE' for n in CAN)}")
    try:
        return name, check_hyperparameter(name, parse_value(value))
    except Refused as error:
        raise ValueError(str(error)) from error


def as_table(rows: Mapping[str, Hyperparameters]) -> str:
    """Settings by group in the form of `per_group=given`.

    >>> as_table({"g0": {"lr": 0.1, "epochs": 2}, "g1": {"lr": 0.01}})
    'g0: lr=0.1 epochs=2; g1: lr=0.01'
    """
    lines = []
    for group, settings in sorted(rows.items()):
        words = [f"{name}={value}" for name, value in settings.items()]
        lines.append(f"{group}: {' '.join(words)}")
    return "; ".join(lines)
