"""What can be drilled, and how it is carried out and told."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.config import nearest
from mutirao.errors import ConfigError, MutiraoError

# What can be drilled, said here so that listing it imports nothing.
TRIALS = {
    "kills": "SIGKILL at random moments: server process, SuperLink, SuperNode, worker",
    "in-process": "SIGKILL at random moments of a run on the local fleet, which is resumed",
    "cut": "the network between a site and the server is down for a minute",
    "slow": "a link of 64 kbit/s between a site and the server",
    "disk": "the disk with the run folder is full for a while",
    "site-disk": "the disk with a site's audit trail is full for a while",
    "certificate": "the server's certificate expires, and is renewed",
    "clock": "a site's clock is an hour ahead, and is set right",
    "duplicate": "a site sends each reply twice",
    "garbage": "a site answers garbage",
}


@dataclass
class Trial:
    """What was done to a run, what happened, and whether it ended as it should."""

    name: str
    done: str
    happened: str = ""
    good: bool = False
    skipped: bool = False
    kills: int = 0
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """In one word."""
        return "not run" if self.skipped else "good" if self.good else "BAD"


class Impossible(MutiraoError):
    """This machine does not allow what a trial needs."""


def carry_out(
    names: Sequence[str], folder: Path | None = None, kills: int = 4, in_process: int = 20, seed: int = 0
) -> Iterator[Trial]:
    """Make the trials of these names, one after the other; without a `folder` nothing of good ones is kept."""
    from mutirao.deploy.drill.kills import deployed_kills, local_kills
    from mutirao.deploy.drill.troubles import TROUBLES

    for name in names:
        if name not in TRIALS:
            raise ConfigError(f"no trial is called {name!r}{nearest(name, TRIALS)}")
    place = Path(tempfile.mkdtemp(prefix="mutirao-drill-")) if folder is None else folder.resolve()
    place.mkdir(parents=True, exist_ok=True)
    bad = False
    for name in names:
        began = time.monotonic()
        if name == "kills":
            made = deployed_kills(place, kills, seed)
        elif name == "in-process":
            made = local_kills(place, in_process, seed)
        else:
            made = one(name, place, TROUBLES[name])
        for trial in made:
            trial.seconds = round(time.monotonic() - began, 1)
            began, bad = time.monotonic(), bad or trial.verdict == "BAD"
            yield trial
    if folder is None and not bad:
        shutil.rmtree(place, ignore_errors=True)


def one(name: str, place: Path, trouble: Any) -> Iterator[Trial]:
    """A single trial; what this machine does not allow is said as not run."""
    trial = Trial(name, TRIALS[name])
    try:
        trouble(place / name, trial)
    except Impossible as error:
        trial.skipped, trial.happened = True, str(error)
    except MutiraoError as error:
        trial.good, trial.happened = False, f"{trial.happened} FAILED: {error}".strip()
    yield trial
