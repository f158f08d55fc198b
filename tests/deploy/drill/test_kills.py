"""SIGKILL at random moments, of every kind of process: the digest is the same, and nothing is left over.

The variables `KILLS` and `SEED` make them more, and others.
"""

import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from breakable import TRIVIAL, Federation, expected_digest, rounds_made, run_locally, trivial_config

from mutirao.errors import MutiraoError
from mutirao.experiments.task import find

log = logging.getLogger("mutirao")

PROCESSES = ("server", "superlink", "supernode", "worker")
KILLS = int(os.environ.get("KILLS", "4"))  # of deployed processes; in process there are five times as many
SEED = int(os.environ.get("SEED", "0"))


@dataclass
class Killer:
    """Kills processes of the kinds listed, in that order, each at a random moment, and lets them come back."""

    federation: Federation
    kinds: list[str]
    draw: random.Random
    pause: tuple[float, float] = (2.0, 14.0)  # seconds between all being well and the next kill
    due: float = 0.0
    killed: list[dict[str, Any]] = field(default_factory=list)
    open: dict[str, Any] | None = None  # the kill after which no round has been made yet

    def __call__(self, out: Path) -> None:
        """Called again and again while the run goes on."""
        now, made = time.monotonic(), rounds_made(out)
        self.federation.mend()
        if self.open is not None and made > self.open["round"]:
            self.open["back after"] = round(now - self.open.pop("at"), 1)
            told = (self.open[k] for k in ("kind", "whose", "back after"))
            log.warning("%s of %s killed: next round after %s s", *told)
            self.open, self.due = None, 0.0
        if not self.kinds or self.open is not None:
            return
        if not self.due:
            self.due = now + self.draw.uniform(*self.pause)
        if now < self.due:
            return
        pid, whose = self.federation.pid(self.kinds[0], out, self.draw)
        if not pid:
            return
        kill(pid)
        self.open = {"kind": self.kinds.pop(0), "whose": whose, "round": made, "at": now}
        self.killed.append(self.open)


def kill(pid: int) -> None:
    """SIGKILL, which nobody can prepare for."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(-(-KILLS // len(PROCESSES))))
def test_deployed_processes_are_killed(number: int, tmp_path: Path) -> None:
    """One process of each kind a run, in any order."""
    draw = random.Random(SEED + number)
    order = list(PROCESSES[: KILLS - number * len(PROCESSES)])
    draw.shuffle(order)
    rounds, out = len(order) + 3, tmp_path / "run"
    with Federation(tmp_path) as federation:
        killer = Killer(federation, order, draw)
        federation.start()
        summary = federation.run(out, rounds, killer)
        while killer.kinds:  # it was too quick for us: the same run, longer
            rounds += len(killer.kinds) + 2
            summary = federation.run(out, rounds, killer)
        federation.judge(summary, expected_digest(rounds), out)


@pytest.mark.slow
def test_killed_runs_on_the_local_fleet_end_with_the_digest_of_one_that_was_not(tmp_path: Path) -> None:
    """In a process that is killed again and again and goes on with --resume."""
    rounds, kills, runs, draw = 60, 0, 0, random.Random(SEED)
    find("quickstart").prepare(trivial_config(rounds))  # imports everything once: children share it
    digest = run_forked(partial(run_locally, tmp_path / "undisturbed", rounds), None)
    assert rounds_made(tmp_path / "undisturbed") == rounds
    while kills < 5 * KILLS:
        runs += 1
        out = tmp_path / f"in-process-{runs}"
        while True:
            goal = rounds_made(out) + draw.randrange(8)  # some kills fall before the first round that would be made
            fate = partial(late_enough, out, goal, draw.uniform(0.0, 0.05)) if kills < 5 * KILLS else None
            if told := run_forked(partial(run_locally, out, rounds), fate):
                break
            kills += 1
        assert told == digest


def test_a_round_with_a_client_missing_is_repeated_so_that_digests_can_be_compared() -> None:
    assert TRIVIAL["min_replies"] == TRIVIAL["clients"]


def late_enough(out: Path, goal: int, more: float) -> bool:
    """Whether a run has made so many rounds; then a moment longer, so that the kill falls anywhere in the next."""
    if rounds_made(out) < goal:
        return False
    time.sleep(more)
    return True


def run_forked(work: Callable[[], str], fate: Callable[[], bool] | None) -> str:
    """What `work` gives in a process of its own, or nothing if it was killed, which it is as soon as `fate` says so."""
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            logging.disable(logging.CRITICAL)
            os.write(theirs, work().encode())
            os._exit(0)
        os._exit(1)
    os.close(theirs)
    ended, status = 0, 0
    while fate is not None and not ended:
        if fate():
            kill(pid)
            break
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read().decode()
    code = os.waitstatus_to_exitcode(status if ended else os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise MutiraoError(f"a run ended by itself with exit code {code}")
    return told if code == 0 else ""
