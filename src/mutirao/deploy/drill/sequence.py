"""A drill: trials carried out one after the other."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutirao.config import nearest
from mutirao.deploy.drill.leak import Leaking, leak
from mutirao.deploy.drill.rating_drill import Rated, ratings
from mutirao.deploy.drill.trials import TRIALS, Trial
from mutirao.errors import ConfigError, MutiraoError


def run_trials(names: Sequence[str], folder: Path | None, leaking: Leaking, rated: Rated) -> Iterator[Trial]:
    """Make the trials of these names, one after the other; without a `folder` nothing of good ones is kept."""
    for name in names:
        if name not in TRIALS:
            raise ConfigError(f"no trial is called {name!r}{nearest(name, TRIALS)}")
    place = Path(tempfile.mkdtemp(prefix="mutirao-drill-")) if folder is None else folder.resolve()
    bad = False
    for name in names:
        began, trial = time.monotonic(), Trial(name, TRIALS[name])
        try:
            if name == "leak":
                leak(place / name, trial, leaking)
            else:
                ratings(place / name, trial, rated)
        except MutiraoError as error:
            trial.good, trial.happened = False, f"{trial.happened} FAILED: {error}".strip()
        trial.seconds, bad = round(time.monotonic() - began, 1), bad or not trial.good
        yield trial
    if folder is None and not bad:
        shutil.rmtree(place, ignore_errors=True)
