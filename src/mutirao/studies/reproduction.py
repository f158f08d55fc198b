"""The systems that can be reproduced by one command: what each needs, and how large it is made in the time one has.

A system is a file in `systems/`: a study, its two forms (`quick` and `full`: seeds, places, methods, settings and the
minutes they took on two cores), where its data are looked for, and the claims that are held against the runs.
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
QUICK_LIMIT = 8.5  # minutes after which a quick form makes no further runs: tables and the report follow
LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Size:
    """How large a reproduction is, and the minutes it takes on two cores."""

    minutes: float
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    over: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    threshold: Mapping[str, float] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """How many runs it makes."""
        places = len(self.seeds)
        for values in self.over.values():
            places *= len(values)
        return places * len(self.methods)

    def cut(self, **smaller: Any) -> "Size":
        """The same with less of something, and as many minutes as that takes."""
        other = replace(self, **smaller)
        return replace(other, minutes=self.minutes * other.runs / self.runs)


@dataclass(frozen=True)
class Data:
    """The data of a system: what is needed, the names of folders that hold it, and what can stand in for it."""

    needs: str
    names: tuple[str, ...]
    holds: str  # a pattern of a file in such a folder
    stand_in: str
    about: str  # the stand-in
    settings: Mapping[str, Any] = field(default_factory=dict)  # with the stand-in


@dataclass(frozen=True)
class System:
    """What a file in `systems/` says."""

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
    """The system of that name."""
    if name not in NAMES:
        raise ConfigError(f"no system is called {name!r}{nearest(name, NAMES)}")
    table = read_toml(HOME / f"{name}.toml")
    study = table["study"]
    whole = {"methods": tuple(study["methods"]), "over": study.get("over", {})}
    quick, full = (parse_size(whole | table[size]) for size in ("quick", "full"))
    given = table["data"]
    data = Data(**{**given, "names": tuple(given["names"])})
    claims = read_claims(name, table.get("claims", ()))
    return System(name, table["title"], table["paper"], table["page"], data, study, quick, full, claims)


def parse_size(table: Mapping[str, Any]) -> Size:
    """A form with lists that nobody changes."""
    return Size(**{**table, "methods": tuple(table["methods"]), "seeds": tuple(table["seeds"])})


def largest_size(system: System, minutes: float) -> Size:
    """The largest form that takes at most so long by what was measured: first seeds go, then places, then methods.

    Where not even the least of the full size fits, the settings are those of the quick form, and last of all its rounds
    are cut.
    """
    quick, full = system.quick, system.full
    if minutes >= full.minutes:
        return full
    methods = tuple(m for m in full.methods if m in quick.methods)
    ways: list[dict[str, Any]] = [{}, {"over": quick.over}, {"over": quick.over, "methods": methods}]
    for form, least in ((full, 1), (quick, len(quick.seeds))):
        for way in ways if form is full else [{}]:
            for many in range(len(full.seeds), least - 1, -1):
                found = form.cut(**way, seeds=full.seeds[:many])
                if found.minutes <= minutes:
                    return found
    most = {**system.study["settings"], **quick.settings}["rounds"]
    rounds = max(LEAST_ROUNDS, min(most, int(most * minutes / quick.minutes)))
    return replace(quick, settings={**quick.settings, "rounds": rounds}, minutes=minutes)


def list_cuts(system: System, form: Size) -> list[str]:
    """What a form leaves out of the full one, a line each."""
    full, said = system.full, []
    if gone := [m for m in full.methods if m not in form.methods]:
        said.append(f"methods: {len(form.methods)} of {len(full.methods)}, without {', '.join(gone)}")
    for what, ours, all_of in (
        ("seeds", form.seeds, full.seeds),
        *((axis, form.over.get(axis, values), values) for axis, values in full.over.items()),
    ):
        if len(ours) < len(all_of):
            said.append(f"{what}: {len(ours)} of {len(all_of)}")
    both = [dict([*flatten(system.study["settings"]), *flatten(f.settings)]) for f in (form, full)]
    said += [f"{k}: {v} instead of {both[1].get(k, 'the default')}" for k, v in both[0].items() if v != both[1].get(k)]
    marks = system.study.get("threshold", {}) | dict(full.threshold)
    said += [
        f"rounds are counted to {k} {v}, not {marks.get(k)}" for k, v in form.threshold.items() if v != marks.get(k)
    ]
    return said


def study_table(system: System, form: Size, data: str, stand_in: bool) -> dict[str, Any]:
    """The study file of a form: its methods, seeds, places and settings, and what is published of these methods."""
    table: dict[str, Any] = copy.deepcopy(dict(system.study))
    table["methods"] = {m: table["methods"][m] for m in form.methods}
    table |= {"seeds": list(form.seeds), "over": dict(form.over)}
    table["settings"] = merged([*flatten(table["settings"]), *flatten(form.settings), ("data", data)])
    moved = {k for k, v in form.threshold.items() if v != table.get("threshold", {}).get(k)}
    table["threshold"] = {**table.get("threshold", {}), **form.threshold}
    told = table.get("published")
    if told is not None:
        for key in ("values", "rounds_to"):
            told[key] = {m: own for m, own in told.get(key, {}).items() if m in form.methods}
        told["rounds_to"] = {
            m: {k: v for k, v in own.items() if k not in moved} for m, own in told["rounds_to"].items()
        }
        if stand_in:
            told["note"] = f"{told.get('note', '')} Ours are on stand-in data: {system.data.about}.".strip()
    return table


def find_system_data(system: System, given: Path | None) -> Path | None:
    """The folder with the system's data: what was given or lies in it; else in the usual places; None if nowhere."""
    wanted = system.data
    for home in [given] if given else usual_places():
        for folder in (home, *(home / name for name in wanted.names)):
            if folder.is_dir() and any(folder.glob(wanted.holds)):
                return folder
    if given:
        raise ConfigError(
            f"--data {given}: neither it nor a folder {' or '.join(wanted.names)} in it holds {wanted.holds}; "
            f"right would be {wanted.needs}"
        )
    return None


def usual_places() -> list[Path]:
    """Where data are looked for: `$MUTIRAO_DATA`, `data` here and at home, and where Debian's packages put theirs."""
    own = [Path(p).expanduser() for p in os.environ.get("MUTIRAO_DATA", "").split(os.pathsep) if p]
    return [*own, Path("data"), Path.home() / "data", Path("/usr/share/datasets")]


class OutOfTime(Exception):
    """The minutes are over."""


@contextlib.contextmanager
def at_most(minutes: float | None) -> Iterator[None]:
    """Raise OutOfTime in the block when the minutes are over, where the system can tell; None: never."""
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
    """What `reproduction.json` says; a claim is asked where all of its methods are run, in the form it is for."""
    asked = [c for c in system.claims if c.methods <= {*study.methods} and c.only in ("", size)]
    unasked = [c.says for c in system.claims if c not in asked]
    facts = {"schema": 1, "system": system.name, "title": system.title, "paper": system.paper, "page": system.page}
    claims = [claim_row(judged, stand_in) for judged in evaluate_claims(study, asked, out)]
    more = [*cuts, *(f"claim not asked in this size: {says}" for says in unasked)]
    return {**facts, "size": size, "data": label, "stand_in": stand_in, "cuts": more, "claims": claims}


def claim_row(judged: EvaluatedClaim, stand_in: bool) -> dict[str, Any]:
    """A claim for tables: on data that stand in for the paper's nothing is shown of it, whatever the figures are."""
    claim, verdict, ours = judged.claim, judged.verdict, judged.ours
    if stand_in:
        verdict, ours = "not shown", f"stand-in data, on which: {judged.verdict}; {ours}"
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
    """All methods by all metrics: what is published, nothing where nothing is, and ours."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        half = "" if math.isnan(line.final.half) else f" ± {line.final.half:.4f}"
        told = line.claim
        rounds = "" if told is None or math.isnan(told.rounds) else f"{told.rounds:g}"
        published = str(told) if told else ""
        ours = f"{line.final.mean:.4f}{half}"
        rows.append((line.metric, line.method, published, ours, str(len(line.values)), rounds, line.reached))
    return rows
