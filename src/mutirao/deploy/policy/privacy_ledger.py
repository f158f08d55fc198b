"""A site's privacy ledger on disk: the noisy releases of each run, and their total epsilon."""

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.deploy.policy.rules import PrivacyRules
from mutirao.errors import Damaged, Refused
from mutirao.io import write_whole
from mutirao.privacy.accounting import NOTHING, Releases, add_releases, epsilon, join_releases
from mutirao.runs.audit_trail import Audit


class Ledger:
    """Releases by run, in a JSON file that is replaced whole; hold `exclusive` while you read, decide and write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Releases] = {}
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for run, rows in content["runs"].items():
                self.runs[str(run)] = np.array(rows, np.float64).reshape(-1, 3)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{path} cannot be read: without it the privacy spent is unknown") from error

    def total(self) -> Releases:
        """The releases of all runs."""
        return functools.reduce(join_releases, self.runs.values(), NOTHING)

    def charge(self, cover: PrivacyRules, run: str, releases: Releases) -> float:
        """Add releases of a run and write the file; Refused, and nothing written, if they exceed a budget."""
        # Epsilon of composed releases is not the sum of theirs: each budget is checked on a whole table.
        mine = join_releases(self.runs.get(run, NOTHING), releases)
        everything = join_releases(self.total(), releases)
        for rule, table, budget in (
            ("privacy.run_budget", mine, cover.run_budget),
            ("privacy.budget", everything, cover.budget),
        ):
            if budget and (after := cost(table, cover)) > budget:
                raise Refused(rule, f"epsilon would be {after:.4g}, {budget:g} is the most")
        self.runs[run] = mine
        spent = cost(everything, cover)
        runs = {name: rows.tolist() for name, rows in self.runs.items()}
        facts = {"delta": cover.delta, "epsilon": spent, "runs": runs}
        write_whole(self.path, json.dumps(facts, indent=1) + "\n")
        return spent


def cost(table: Releases, cover: PrivacyRules) -> float:
    """The epsilon of these releases; infinite if one has no noise, or so little that it cannot be worked out."""
    if not np.all(table[:, 0] > 0):
        return math.inf
    try:
        spent = epsilon(table, cover.delta, cover.accountant)
    except (ArithmeticError, ValueError):
        return math.inf
    if math.isnan(spent):
        return math.inf
    return spent


def without_noise(table: Releases) -> Releases:
    """The same releases without noise, which the server can subtract: their epsilon is infinite."""
    return functools.reduce(lambda out, row: add_releases(out, 0.0, row[1], int(row[2])), table.tolist(), NOTHING)


def new_releases(before: Releases | None, after: Releases | None) -> Releases:
    """The releases that a request added to a table."""
    table = NOTHING
    if after is None:
        return table
    old: dict[tuple[float, float], float] = {}
    if before is not None:
        old = {(n, r): t for n, r, t in before.tolist()}
    for noise, rate, times in after.tolist():
        if (more := int(times - old.get((noise, rate), 0))) > 0:
            table = add_releases(table, noise, rate, more)
    return table


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock beside `path`: a site may answer two requests in two processes, but decides one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name(f".{path.name}.lock")):
        yield


def append_event(trail: Path, event: str, **facts: Any) -> None:
    """Append an event to an audit trail that other processes write, too."""
    with exclusive(trail):
        Audit(trail).append(event, **facts)


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock in this file, which is made if it is not there."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            import fcntl

            # The system releases it when the file is closed, and so also when the process is killed.
            fcntl.flock(handle, fcntl.LOCK_EX)
        except ImportError:  # not on Windows
            pass
        yield
    finally:
        os.close(handle)
