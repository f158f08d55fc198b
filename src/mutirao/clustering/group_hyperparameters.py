"""What each group trains by: all alike, as a table says, or as its own clients judge a few candidates.

A part tells, for a group and a round, what clients are told besides (`lr`, `epochs`, `batch_size`), and in which rounds
all groups begin afresh.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mutirao.config import Scalar, parse_value
from mutirao.core.hyperparameters import check_hyperparameter
from mutirao.errors import Refused

CAN = ("lr", "epochs", "batch_size")
Scores = Mapping[str, Sequence[tuple[int, float]]]  # of each group: round and judgement
Hyperparameters = dict[str, Scalar]


@dataclass(frozen=True)
class SharedHyperparameters:
    """All groups train with the same settings.

    >>> SharedHyperparameters().told("g0", 1, {}, True)
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

    def told(self, group: str, round: int, scores: Scores, higher: bool) -> Hyperparameters:
        """Nothing besides."""
        return {}

    def restarts(self, round: int) -> bool:
        """Whether all groups begin afresh in this round."""
        return False


@dataclass(frozen=True)
class GivenHyperparameters(SharedHyperparameters):
    """As a table says: `g0: lr=0.1 epochs=2; g1: lr=0.01`; a group that it does not name trains as usual.

    >>> GivenHyperparameters("g0: lr=0.1 epochs=2; g1: lr=0.01").told("g0", 1, {}, True)
    {'lr': 0.1, 'epochs': 2}
    """

    table: str = ""

    def __post_init__(self) -> None:
        self.rows()  # refuses what it cannot read

    @property
    def names(self) -> set[str]:
        """Those that the table sets."""
        return {name for told in self.rows().values() for name in told}

    def rows(self) -> dict[str, Hyperparameters]:
        """The settings by group."""
        out: dict[str, Hyperparameters] = {}
        for row in filter(None, (part.strip() for part in self.table.split(";"))):
            group, colon, settings = row.partition(":")
            if not colon or not group.strip().startswith("g") or not settings.split():
                raise ValueError(f"{row!r} is not of the form g0: lr=0.1 epochs=2")
            out[group.strip()] = dict(read_setting(word) for word in settings.split())
        if not out:
            raise ValueError("the table names no group; right would be table='g0: lr=0.1; g1: lr=0.01'")
        return out

    def told(self, group: str, round: int, scores: Scores, higher: bool) -> Hyperparameters:
        """The group's row."""
        return self.rows().get(group, {})


@dataclass(frozen=True)
class ChosenHyperparameters(SharedHyperparameters):
    """Each group tries all candidates, `rounds` rounds each from the same first model, and goes on with the best.

    Candidates are all pairs of the rates `lr` and the `epochs`, each separated by commas. The best is the one with
    which the group's clients judge the model best after its last trial; with that the group begins once more.

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
        """Those that candidates differ in."""
        return set(self.candidates[0])

    @property
    def candidates(self) -> list[Hyperparameters]:
        """What is tried, in this order."""
        columns = []
        for name, values in (("lr", self.lr), ("epochs", self.epochs)):
            if listed := [value.strip() for value in str(values).split(",") if value.strip()]:
                columns.append([read_setting(f"{name}={value}") for value in listed])
        return [dict(row) for row in itertools.product(*columns)] if columns else []

    @property
    def trials(self) -> int:
        """Rounds of all trials together."""
        return self.rounds * len(self.candidates)

    def told(self, group: str, round: int, scores: Scores, higher: bool) -> Hyperparameters:
        """The candidate whose turn it is, or the best one."""
        turn = (round - 1) // self.rounds
        return self.candidates[turn if round <= self.trials else self.best(group, scores, higher)]

    def restarts(self, round: int) -> bool:
        """At the first round of every candidate, and of what comes after."""
        return 1 < round <= self.trials + 1 and (round - 1) % self.rounds == 0

    def best(self, group: str, scores: Scores, higher: bool) -> int:
        """The candidate that did best in the group, the first of equals; the first if nobody judged."""
        told = dict(scores.get(group, ()))
        found = {i: told[at] for i in range(len(self.candidates)) if (at := (i + 1) * self.rounds) in told}
        return (max if higher else min)(found, key=lambda i: found[i]) if found else 0


NAMES: dict[str, type[SharedHyperparameters]] = {
    "none": SharedHyperparameters,
    "given": GivenHyperparameters,
    "chosen": ChosenHyperparameters,
}


def read_setting(text: str) -> tuple[str, Scalar]:
    """`lr=0.1` as a name and a value that clients take."""
    name, equals, value = text.partition("=")
    if not equals or name not in CAN:
        raise ValueError(f"{text!r} is not one of {', '.join(f'{n}=VALUE' for n in CAN)}")
    try:
        return name, check_hyperparameter(name, parse_value(value))
    except Refused as error:
        raise ValueError(str(error)) from error


def as_table(rows: Mapping[str, Hyperparameters]) -> str:
    """Settings by group as `given` takes them.

    >>> as_table({"g0": {"lr": 0.1, "epochs": 2}, "g1": {"lr": 0.01}})
    'g0: lr=0.1 epochs=2; g1: lr=0.01'
    """
    return "; ".join(f"{g}: " + " ".join(f"{k}={v}" for k, v in told.items()) for g, told in sorted(rows.items()))
