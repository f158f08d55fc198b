"""A site's own task for the tests of the worker: what it does, and how it fails, is asked for by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.core.fleet import Reply, Request, Site
from mutirao.errors import Refused
from mutirao.experiments.task import Task


def handler(request: Request, site: Site) -> Any:
    """Count visits in the state; say in which process this was."""
    trace = Path(str(request.config["trace"])) if "trace" in request.config else None
    if request.do == "die" and trace is not None:  # so many times, and in no process but a worker
        deaths = len(trace.read_text()) if trace.exists() else 0
        if deaths < int(request.config["deaths"]) and os.environ.get("MUTIRAO_TEST_CLIENT") != str(os.getpid()):
            trace.write_text("x" * (deaths + 1))
            os.kill(os.getpid(), signal.SIGKILL)
    if request.do == "raise":
        raise ValueError("no such column")
    if request.do == "refuse":
        raise Refused("asked.names", "not this", "secret")
    if request.do == "nothing":
        return 7
    if request.do == "text":
        return Reply({"w": np.array(["text"])}, n=1)
    if request.do == "sleep":
        time.sleep(60)
    visits = int(site.state.get("visits", np.zeros((), np.int64))) + 1
    site.state["visits"] = np.asarray(visits)
    x = site.data[0]
    arrays = {k: v + x.mean(0).astype(v.dtype) for k, v in request.arrays.items()}
    extras = {"visits": np.array([visits]), **request.extras}
    return Reply(arrays, extras, {"pid": float(os.getpid()), "nan": float("nan")}, len(x))


def task_of(context: Any) -> Task:
    """Three sites, each with a few rows."""
    rows = np.random.default_rng(0).normal(size=(3, 12, 4))
    return Task(handler, {f"c{i}": (rows[i], np.arange(12)) for i in range(3)}, lambda: {"w": np.zeros(4)})
