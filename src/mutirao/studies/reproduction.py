"""Reproductions of published systems: their data, their size for a given time, and verdicts on the claims.

A system is a file in `studies/systems/`: a study in two sizes (`quick` and `full`: seeds, folds, methods, settings and
the minutes they took on two cores), where to search for its data, and the published claims to check.
"""

import contextlib
import copy
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mutirao.config import flatten, nearest, read_toml
from mutirao.errors import ConfigError
from mutirao.studies.claims import RULES, Claim, EvaluatedClaim, evaluate_claims, read_claims
from mutirao.studies.comparison import MethodResult
from mutirao.studies.confirmation import merged
from mutirao.studies.study import Study

HOME = Path(__file__).parent / "systems"
NAMES = ("fedrisk", "aoiu", "groups", "recsys", "cytology")
# Minutes after which runs are stopped: tables and the report take the rest of ten.
QUICK_LIMIT = 8.5
LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Size:
    """The size of a reproduction, and the minutes it takes on two cores."""

    minutes: float
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    over: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    threshold: Mapping[str, float] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """The number of runs."""
        places = len(self.seeds)
        for values in self.over.values():
            places *= len(values)
        return places * len(self.methods)

    def cut(self, **smaller: Any) -> "Size":
        """A smaller size, with minutes in proportion to its runs."""
        other = replace(self, **smaller)
        return replace(other, minutes=self.minutes * other.runs / self.runs)


@dataclass(frozen=True)
class Data:
    """The data of a system: its description, usual folder names, and a stand-in."""

    needs: str
    names: tuple[str, ...]
    holds: str  # glob pattern of a file in such a folder
    stand_in: str
    about: str  # description of the stand-in
    settings: Mapping[str, Any] = field(default_factory=dict)  # with the stand-in


@dataclass(frozen=True)
class System:
    """A published system, as its file describes it."""

    name: str
    title: str
    paper: str
    page: str
    data: Data
    study: Mapping[str, Any]
    quick: Size
    full: Size
    claims: tuple[Claim, ...]


def read_system(name: str) -> System:
    """Read the file of a system."""
    if name not in NAMES:
        raise ConfigError(f"no system is called {name!r}{nearest(name, NAMES)}")
    table = read_toml(HOME / f"{name}.toml")
    study = table["study"]
    whole = {"methods": tuple(study["methods"]), "over": study.get("over", {})}
    quick = parse_size(whole | table["quick"])
    full = parse_size(whole | table["full"])
    data = Data(**{**table["data"], "names": tuple(table["data"]["names"])})
    claims = read_claims(name, table.get("claims", ()))
    return System(name, table["title"], table["paper"], table["page"], data, study, quick, full, claims)


def parse_size(table: Mapping[str, Any]) -> Size:
    """A size from its table."""
    return Size(**{**table, "methods": tuple(table["methods"]), "seeds": tuple(table["seeds"])})


def largest_size(system: System, minutes: float) -> Size:
    """The largest size that takes at most so long by measured times: first seeds are cut, then folds, then methods.

    If not even the smallest cut of the full size fits, the quick size is taken, and last of all its rounds are cut.
    """
    quick = system.quick
    full = system.full
    if minutes >= full.minutes:
        return full
    methods = tuple(m for m in full.methods if m in quick.methods)
    candidates = [
        (full, full, 1),
        (full, full.cut(over=quick.over), 1),
        (full, full.cut(over=quick.over, methods=methods), 1),
        (quick, quick, len(quick.seeds)),
    ]
    for base, size, min_seeds in candidates:
        for count in range(len(full.seeds), min_seeds - 1, -1):
            found = base.cut(over=size.over, methods=size.methods, seeds=full.seeds[:count])
            if found.minutes <= minutes:
                return found
    all_rounds = {**system.study["settings"], **quick.settings}["rounds"]
    rounds = max(LEAST_ROUNDS, min(all_rounds, int(all_rounds * minutes / quick.minutes)))
    return replace(quick, settings={**quick.settings, "rounds": rounds}, minutes=minutes)


def list_cuts(system: System, form: Size) -> list[str]:
    """What a size leaves out of the full one, a line for each."""
    full = system.full
    lines: list[str] = []
    left_out = [method for method in full.methods if method not in form.methods]
    if left_out:
        lines.append(f"methods: {len(form.methods)} of {len(full.methods)}, without {', '.join(left_out)}")
    if len(form.seeds) < len(full.seeds):
        lines.append(f"seeds: {len(form.seeds)} of {len(full.seeds)}")
    for axis, values in full.over.items():
        ours = form.over.get(axis, values)
        if len(ours) < len(values):
            lines.append(f"{axis}: {len(ours)} of {len(values)}")
    common = dict(flatten(system.study["settings"]))
    settings = common | dict(flatten(form.settings))
    full_settings = common | dict(flatten(full.settings))
    for key, value in settings.items():
        if value != full_settings.get(key):
            lines.append(f"{key}: {value} instead of {full_settings.get(key, 'the default')}")
    thresholds = system.study.get("threshold", {}) | dict(full.threshold)
    for metric, threshold in form.threshold.items():
        if threshold != thresholds.get(metric):
            lines.append(f"rounds are counted to {metric} {threshold}, not {thresholds.get(metric)}")
    return lines


def study_table(system: System, form: Size, data: str, stand_in: bool) -> dict[str, Any]:
    """The study file of a size: methods, seeds, folds and settings, with the published values of these methods."""
    table: dict[str, Any] = copy.deepcopy(dict(system.study))
    thresholds = table.get("threshold", {})
    table["methods"] = {method: table["methods"][method] for method in form.methods}
    table |= {"seeds": list(form.seeds), "over": dict(form.over)}
    table["settings"] = merged([*flatten(table["settings"]), *flatten(form.settings), ("data", data)])
    table["threshold"] = {**thresholds, **form.threshold}
    published = table.get("published")
    if published is not None:
        # Published rounds to a threshold cannot be compared with ours to another one.
        other_threshold = {metric for metric, value in form.threshold.items() if value != thresholds.get(metric)}
        published["values"] = pick(published.get("values", {}), form.methods)
        published["rounds_to"] = pick(published.get("rounds_to", {}), form.methods)
        for method, rounds in published["rounds_to"].items():
            published["rounds_to"][method] = {k: v for k, v in rounds.items() if k not in other_threshold}
        if stand_in:
            published["note"] = f"{published.get('note', '')} Ours are on stand-in data: {system.data.about}.".strip()
    return table


def pick(table: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """The entries of these methods."""
    return {method: values for method, values in table.items() if method in methods}


def find_system_data(system: System, given: Path | None) -> Path | None:
    """The folder with the system's data: the given one or one in it, else in the usual places; None if not found."""
    wanted = system.data
    homes = usual_places()
    if given:
        homes = [given]
    for home in homes:
        for folder in (home, *(home / name for name in wanted.names)):
            if folder.is_dir() and any(folder.glob(wanted.holds)):
                return folder
    if given:
        raise ConfigError(
            f"--data {given}: neither it nor a folder {' or '.join(wanted.names)} in it contains {wanted.holds}; "
            f"expected {wanted.needs}"
        )
    return None


def usual_places() -> list[Path]:
    """Where data are searched: `$MUTIRAO_DATA`, `data` here and at home, and Debian's folder of data sets."""
    own = [Path(p).expanduser() for p in os.environ.get("MUTIRAO_DATA", "").split(os.pathsep) if p]
    return [*own, Path("data"), Path.home() / "data", Path("/usr/share/datasets")]


class OutOfTime(Exception):
    """The time limit of a reproduction has passed."""


@contextlib.contextmanager
def at_most(minutes: float | None) -> Iterator[None]:
    """Raise OutOfTime in the block after so many minutes, if the platform has timers; None: never."""
    if minutes is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


BESIDE = ("metric", "method", "published", "ours", "runs", "published rounds", "our rounds")


def outcome_of(
    system: System, study: Study, size: str, label: str, cuts: Sequence[str], out: Path, *, stand_in: bool
) -> dict[str, Any]:
    """The content of `reproduction.json`; a claim is checked if all its methods are run, in the size it is for."""
    checked = [c for c in system.claims if c.methods <= {*study.methods} and c.only in ("", size)]
    unchecked = [c.says for c in system.claims if c not in checked]
    facts = {"schema": 1, "system": system.name, "title": system.title, "paper": system.paper, "page": system.page}
    claims = [claim_row(evaluated, stand_in) for evaluated in evaluate_claims(study, checked, out)]
    all_cuts = [*cuts, *(f"claim not asked in this size: {says}" for says in unchecked)]
    return {**facts, "size": size, "data": label, "stand_in": stand_in, "cuts": all_cuts, "claims": claims}


def claim_row(evaluated: EvaluatedClaim, stand_in: bool) -> dict[str, Any]:
    """A claim for tables. Stand-in data show nothing about a claim, whatever the figures are."""
    claim = evaluated.claim
    verdict: str = evaluated.verdict
    ours = evaluated.ours
    if stand_in:
        ours = f"stand-in data, on which: {verdict}; {ours}"
        verdict = "not shown"
    published = f" (published: {claim.published})" if claim.published else ""
    return {
        "says": claim.says,
        "published": claim.published,
        "ours": ours,
        "verdict": verdict,
        "rule": RULES[claim.rule],
        "line": f"{claim.says}{published}: {ours}",
    }


def beside_rows(lines: Sequence[MethodResult]) -> list[tuple[str, ...]]:
    """Our results beside the published values, for all methods and metrics."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        ours = f"{line.final.mean:.4f}"
        if not math.isnan(line.final.half):
            ours += f" ± {line.final.half:.4f}"
        rounds = ""
        if line.published and not math.isnan(line.published.rounds):
            rounds = f"{line.published.rounds:g}"
        published = str(line.published) if line.published else ""
        rows.append((line.metric, line.method, published, ours, str(len(line.values)), rounds, line.reached))
    return rows
