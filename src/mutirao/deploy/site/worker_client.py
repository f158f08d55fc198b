"""The client process's side of the site's worker: find it or start it, ask it, and do without it if need be."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.compression import from_table as compress_from
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.deploy.layout import FOLDER_VARIABLE
from mutirao.deploy.policy.enforcement import SampleCounts
from mutirao.deploy.policy.privacy_ledger import file_lock
from mutirao.deploy.site.framing import Groups, ProtocolError, receive, send
from mutirao.deploy.site.launcher import GREETING_TIMEOUT, WorkerDied, folder_of, same_user
from mutirao.deploy.site.task_stamp import TaskSpec, stamp
from mutirao.errors import MutiraoError, Refused
from mutirao.experiments.task import Task
from mutirao.privacy.secure_aggregation.kinds import from_table

log = logging.getLogger("mutirao")

START = 60.0  # seconds a new worker has to open its socket
LONGEST_LOG = 2**20  # bytes, after which a log makes room for another
IDLE = 1800.0  # seconds without a request after which a worker ends


@dataclass(frozen=True)
class WorkerClient:
    """Where the worker of a SuperNode is found; `parent` is the process with which it ends."""

    parent: int
    idle: float = IDLE

    def task(self, order: TaskSpec, cold: Callable[[], Task]) -> Task:
        """The task of an order: its handler asks the worker, and does by itself (`cold`) what no worker can."""
        wanted = stamp(order)
        try:
            told = self.ask(order, wanted, {"ask": "open"})[0]
            held = SampleCounts(*(None if told.get(kind) is None else int(told[kind]) for kind in ("train", "test")))
            secure, compress = from_table(told["secure"]), compress_from(told["compress"])
            agreed = {str(name): str(digest) for name, digest in told["agreed"].items()}
        except (WorkerDied, OSError) as error:
            log.warning("no worker (%s): this process does the work by itself", error)
            return cold()

        def handler(request: Request, site: Site) -> Any:
            config = {k: v.item() if isinstance(v, np.generic) else v for k, v in request.config.items()}
            facts = {"ask": "do", "do": request.do, "config": config}
            arrays = {"model": request.arrays, "extras": request.extras, "state": site.state}
            try:
                told, groups = self.ask(order, wanted, facts, arrays)
            except (WorkerDied, OSError) as error:
                log.warning("no worker (%s): this process does the work by itself", error)
                task = cold()
                site.data = task.population[order.name]
                return task.handler(request, site)
            if "answered" in told:  # something that is no reply: whoever called says so
                return type(str(told["answered"]), (), {})()
            site.state.clear()
            site.state.update(groups.get("state", {}))
            metrics = {str(k): float(v) for k, v in told["metrics"].items()}
            return Reply(groups.get("arrays", {}), groups.get("extras", {}), metrics, int(told["n"]))

        # What the guard counts is here, the data themselves are not.
        return Task(handler, {order.name: held}, dict, secure=secure, compress=compress, agreed=agreed)

    def ask(
        self, order: TaskSpec, wanted: str, facts: Mapping[str, Any], arrays: Mapping[str, Arrays] | None = None
    ) -> tuple[dict[str, Any], Groups]:
        """The worker's answer, from a second worker if the first one dies; what its code raised is raised here."""
        for last in (False, True):
            try:
                with self.connected(wanted) as link:
                    send(link, {**facts, "order": asdict(order)}, arrays)
                    told, groups = receive(link)
                break
            except (EOFError, ConnectionError, FileNotFoundError, ProtocolError, WorkerDied) as error:
                if last:
                    raise WorkerDied(f"twice: {error}") from error
                log.warning("the site's worker died (%s): another one is started", error)
        if "raised" in told:
            raise error_in(told)
        return told, groups

    @contextlib.contextmanager
    def connected(self, wanted: str) -> Iterator[socket.socket]:
        """A line to a worker that has the code, the environment and the data of now."""
        folder = folder_of(self.parent)
        with file_lock(folder / "lock"):  # two client processes at once start one worker, not two
            link = connect_to(folder, wanted) or self.start(folder, wanted)
        with link:
            yield link

    def start(self, folder: Path, wanted: str) -> socket.socket:
        """A line to a new worker."""
        process = start_background("mutirao.deploy.site.worker", folder, wanted, str(self.parent), str(self.idle))
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and process.poll() is None:
            if link := connect_to(folder, wanted):
                return link
            time.sleep(0.02)
        raise WorkerDied(f"a new one did not start, {log_path('worker', folder)} says why")


def connect_to(folder: Path, wanted: str) -> socket.socket | None:
    """A line to the worker in a folder, if there is one of the right kind; one of another kind ends by this."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(GREETING_TIMEOUT)
        link.connect(str(folder / "socket"))
        if not same_user(link):
            raise WorkerDied("the socket belongs to another user")
        send(link, {"stamp": wanted})
        if receive(link)[0].get("fits") is True:
            link.settimeout(None)
            return link
    except TimeoutError as error:  # it is stuck, or at work on something that lets nobody else in
        link.close()
        raise WorkerDied("it does not answer") from error
    except (OSError, EOFError, ProtocolError):
        pass
    link.close()
    return None


def error_in(told: Mapping[str, Any]) -> Exception:
    """The error that was raised in the worker, as far as anybody asks: its kind, its text, the rule."""
    if "rule" in told:
        return Refused(str(told["rule"]), str(told["text"]).removeprefix(f"{told['rule']}: "), str(told["detail"]))
    kind: type[Exception] = type(str(told["raised"]), (MutiraoError,), {})
    return kind(str(told["text"]))


def log_path(module: str, folder: Path) -> Path:
    """Where a resident process says what its site must know: among the site's logs, if `mutirao site` made it."""
    place = Path(os.environ[FOLDER_VARIABLE]) / "logs" if os.environ.get(FOLDER_VARIABLE) else folder
    place.mkdir(parents=True, exist_ok=True)
    log = place / f"{module.rpartition('.')[2]}.log"
    if log.exists() and log.stat().st_size > LONGEST_LOG:
        log.replace(log.with_suffix(".1.log"))
    return log


def start_background(module: str, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a process that outlives this one; what it says is in its log."""
    command = [sys.executable, "-m", module, str(folder), *words]
    with log_path(module, folder).open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def listen_at(path: Path, most: int) -> socket.socket:
    """A socket at this path, in the place of one that is there; whoever accepts at it looks up twice a second."""
    listener = socket.socket(socket.AF_UNIX)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    listener.bind(str(fresh))
    listener.listen(most)
    fresh.replace(path)
    listener.settimeout(0.5)
    return listener
