"""The search space of tuning: a grid, or ranges from which Optuna proposes points."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from mutirao.config import flatten, nearest, write_value
from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed

Point = tuple[tuple[str, Any], ...]  # settings and their values
EDGE = 0.05  # share of a range, on its own scale, that counts as its edge


class Search:
    """An ask-and-tell search over one method's settings: `ask` for points until there are none, `tell` their values."""

    size: int  # number of points

    def ask(self) -> list[Point]:
        """The points to try next, in parallel; empty if the search is over."""
        raise NotImplementedError

    def tell(self, point: Point, value: float | None) -> None:
        """Report the value of a point, higher is better; None if its trial failed."""

    def edges(self, point: Point) -> list[str]:
        """The settings of a point at the edge of the search space, as texts."""
        raise NotImplementedError


class Grid(Search):
    """Every combination of the values of its axes."""

    def __init__(self, axes: Mapping[str, Sequence[Any]]) -> None:
        self.axes = axes
        self.size = math.prod(len(values) for values in axes.values())
        self.asked = False

    def ask(self) -> list[Point]:
        """All points, once."""
        if self.asked:
            return []
        self.asked = True
        return [tuple(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]

    def edges(self, point: Point) -> list[str]:
        """Settings with the smallest or largest of several values."""
        out = []
        for key, value in point:
            tried = self.axes[key]
            if len(tried) < 2 or not all(is_number(v) for v in tried) or min(tried) < value < max(tried):
                continue
            out.append(f"{key} = {write_value(value)} is the {'largest' if value == max(tried) else 'smallest'} tried")
        return out


@dataclass(frozen=True)
class SearchRange:
    """The range of a setting, on a logarithmic scale if `log`; of integers if both ends are."""

    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether only integers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def place(self, value: float) -> float:
        """The position of a value, from 0 at the low end to 1 at the high end."""
        scale = math.log if self.log else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))


@dataclass
class Proposed(Search):
    """Points that Optuna's TPE proposes one by one, from the values of earlier ones (Bergstra et al., 2011).

    The seed is the same for all methods, so those with the same ranges start with the same points. The same values lead
    to the same points, so an interrupted search continues by asking again for the finished ones.
    """

    ranges: Mapping[str, SearchRange | Sequence[Any]]
    size: int
    done: int = 0
    study: Any = None
    open: list[Any] = field(default_factory=list)

    def ask(self) -> list[Point]:
        """The next point."""
        import optuna

        if self.study is None:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            # The sampler uses NumPy's RandomState, which takes seeds of 32 bits.
            sampler = optuna.samplers.TPESampler(seed=derive_seed(0, 0, "tune") % 2**32)
            self.study = optuna.create_study(direction="maximize", sampler=sampler)
        if self.done >= self.size:
            return []
        self.done += 1
        trial = self.study.ask()
        self.open.append(trial)
        return [tuple((key, propose(trial, key, what)) for key, what in self.ranges.items())]

    def tell(self, point: Point, value: float | None) -> None:
        """Report a value to the sampler."""
        trial = self.open.pop(0)
        if value is None:
            self.study.tell(trial, state=import_state().FAIL)
        else:
            self.study.tell(trial, value)

    def edges(self, point: Point) -> list[str]:
        """Numbers close to an end of their range."""
        out = []
        for key, value in point:
            what = self.ranges[key]
            if not isinstance(what, SearchRange):
                continue
            place = what.place(value)
            if place < EDGE:
                out.append(f"{key} = {value:.4g} is close to the low end of its range, {what.low:.4g}")
            elif place > 1 - EDGE:
                out.append(f"{key} = {value:.4g} is close to the high end of its range, {what.high:.4g}")
        return out


def propose(trial: Any, key: str, what: SearchRange | Sequence[Any]) -> Any:
    """A value of one setting."""
    if not isinstance(what, SearchRange):
        return trial.suggest_categorical(key, list(what))
    suggest = trial.suggest_int if what.is_whole else trial.suggest_float
    return suggest(key, what.low, what.high, log=what.log)


def import_state() -> Any:
    """Optuna's enumeration of how a trial ended."""
    from optuna.trial import TrialState

    return TrialState


def is_number(value: Any) -> bool:
    """Whether it is a number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_grid(where: str, table: Any) -> dict[str, list[Any]]:
    """The axes of a grid: a list of values for each setting."""
    axes = dict(flatten(settings_table(where, table)))
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.{key} must be a list of values to try")
        if not all(map(is_scalar, values)) or len(set(map(write_value, values))) < len(values):
            raise ConfigError(f"{where}.{key}: {values!r} must be different numbers or texts")
    return axes


def read_ranges(where: str, table: Any) -> dict[str, SearchRange | Sequence[Any]]:
    """Ranges of settings: {low, high, log}, or a list to choose from."""
    found: dict[str, Any] = {}
    for key, value in settings_table(where, table).items():
        # A table without `low` and `high` is not a range but the settings of a part, such as `aggregate`.
        inner = isinstance(value, Mapping) and not {"low", "high"} & value.keys()
        if inner:
            found |= {f"{key}.{sub}": v for sub, v in value.items()}
        else:
            found[key] = value
    return {key: parse_range(f"{where}.{key}", value) for key, value in found.items()}


def parse_range(where: str, given: Any) -> SearchRange | Sequence[Any]:
    """One range, or a list to choose from."""
    if isinstance(given, list):
        return read_grid(where, {"values": given})["values"]
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a range such as {{ low = 0.001, high = 1.0, log = true }}, or a list")
    for key in given:
        if key not in ("low", "high", "log"):
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, ('low', 'high', 'log'))}")
    low = given.get("low", math.nan)
    high = given.get("high", math.nan)
    log = given.get("log", False)
    if not (is_number(low) and is_number(high) and math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{where}: low and high must be numbers, the first below the second")
    if not isinstance(log, bool) or (log and low <= 0):
        raise ConfigError(f"{where}: log must be true or false, and with true low must be above 0")
    return SearchRange(low, high, log)


def settings_table(where: str, table: Any) -> Mapping[str, Any]:
    """A table that is not empty; ConfigError for anything else."""
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f"{where} must be a table of settings to try")
    return table


def is_scalar(value: Any) -> bool:
    """Whether a setting can have this value."""
    return isinstance(value, bool | int | float | str)


def check_optuna() -> None:
    """Refuse ranges if Optuna is not installed."""
    if find_spec("optuna") is None:
        raise ConfigError("tune.range needs Optuna: pip install 'mutirao[tune]', or give a [tune.grid] of values")
