"""A drill: trials carried out one after the other, on a federation of their own each."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mutirao.config import nearest
from mutirao.deploy.drill.kills import deployed_kills, local_kills
from mutirao.deploy.drill.leak import Leaking, leak
from mutirao.deploy.drill.ratings import Rated, ratings
from mutirao.deploy.drill.trials import TRIALS, Impossible, Trial
from mutirao.deploy.drill.troubles import TROUBLES
from mutirao.errors import ConfigError, MutiraoError


def run_trials(
    names: Sequence[str],
    folder: Path | None = None,
    kills: int = 4,
    in_process: int = 20,
    seed: int = 0,
    leaking: Leaking | None = None,
    data: str = "generated",
) -> Iterator[Trial]:
    """Make the trials of these names, one after the other; without a `folder` nothing of good ones is kept."""
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
        elif name == "leak":
            made = run_one(name, place, partial(leak, about=leaking or Leaking(seed=seed)))
        elif name == "ratings":
            made = run_one(name, place, partial(ratings, about=Rated(data, seed=seed)))
        else:
            made = run_one(name, place, TROUBLES[name])
        for trial in made:
            trial.seconds = round(time.monotonic() - began, 1)
            began, bad = time.monotonic(), bad or trial.verdict == "BAD"
            yield trial
    if folder is None and not bad:
        shutil.rmtree(place, ignore_errors=True)


def run_one(name: str, place: Path, trouble: Any) -> Iterator[Trial]:
    """A single trial; what this machine does not allow is said as not run."""
    trial = Trial(name, TRIALS[name])
    try:
        trouble(place / name, trial)
    except Impossible as error:
        trial.skipped, trial.happened = True, str(error)
    except MutiraoError as error:
        trial.good, trial.happened = False, f"{trial.happened} FAILED: {error}".strip()
    yield trial
