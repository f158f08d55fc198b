"""The client of a site's resident worker: find it or start it, send it requests, and do the work here if it fails.

Frames between the two are JSON and arrays of bounded size, never a pickle.
"""

import contextlib
import json
import logging
import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.compression import from_table as compress_from
from mutirao.core.arrays import NUMBERS, Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.deploy.layout import FOLDER_VARIABLE
from mutirao.deploy.policy.enforcement import SampleCounts
from mutirao.deploy.policy.privacy_ledger import file_lock
from mutirao.deploy.site.launcher import GREETING_TIMEOUT, WorkerUnavailable, folder_of, same_user
from mutirao.deploy.site.task_stamp import TaskSpec, stamp
from mutirao.errors import MutiraoError, Refused
from mutirao.experiments.task import Task
from mutirao.privacy.secure_aggregation.kinds import from_table

Groups = dict[str, Arrays]

MAGIC = b"mtr1"
FRAME = struct.Struct("<4sIQ")  # magic, length of the JSON, length of the arrays
MAX_JSON = 8 * 2**20
MAX_BYTES = 8 * 2**30


class ProtocolError(Exception):
    """The bytes on the socket are not a valid frame."""


def send(link: socket.socket, facts: Mapping[str, Any], groups: Mapping[str, Arrays] | None = None) -> None:
    """Write one frame: JSON, then the bytes of all arrays one after the other."""
    table: list[list[Any]] = []
    parts: list[np.ndarray[Any, Any]] = []
    for group, arrays in (groups or {}).items():
        for name, value in arrays.items():
            array = np.asarray(value, order="C")
            if array.dtype.kind not in NUMBERS:
                raise TypeError(f"an array holds {array.dtype}, not numbers")
            table.append([group, name, array.dtype.str, list(array.shape)])
            parts.append(array)
    header = json.dumps({"facts": facts, "arrays": table}).encode()
    size = sum(array.nbytes for array in parts)
    if len(header) > MAX_JSON or size > MAX_BYTES:
        raise ValueError(f"{len(header)} bytes of JSON and {size} of arrays are too many")
    link.sendall(FRAME.pack(MAGIC, len(header), size) + header)
    for array in parts:
        if array.nbytes:
            link.sendall(array.reshape(-1).view(np.uint8).data)


def receive(link: socket.socket) -> tuple[dict[str, Any], Groups]:
    """Read one frame. Sizes are checked before memory is allocated; EOFError if the peer has disconnected."""
    magic, header_size, size = FRAME.unpack(read_bytes(link, FRAME.size))
    if magic != MAGIC or header_size > MAX_JSON or size > MAX_BYTES:
        raise ProtocolError("this is no frame")
    facts, table = read_header(read_bytes(link, header_size))
    if sum(math.prod(shape) * dtype.itemsize for _, _, dtype, shape in table) != size:
        raise ProtocolError("the arrays are not as long as the frame says")
    groups: Groups = {}
    for group, name, dtype, shape in table:
        array = np.empty(shape, dtype)
        if array.nbytes:
            fill_array(link, array.reshape(-1).view(np.uint8).data)
        groups.setdefault(group, {})[name] = array
    return facts, groups


def read_header(text: bytes) -> tuple[dict[str, Any], list[tuple[str, str, np.dtype[Any], tuple[int, ...]]]]:
    """The facts and the table of arrays in the JSON header of a frame; ProtocolError if it is invalid."""
    try:
        content = json.loads(text)
        facts = content["facts"]
        rows = content["arrays"]
        table = [table_entry(*row) for row in rows]
    except RecursionError as error:
        raise ProtocolError("the head of a frame is nested too deeply") from error
    except Exception as error:
        raise ProtocolError("the head of a frame cannot be read") from error
    for _, _, dtype, shape in table:
        if dtype.kind not in NUMBERS or len(shape) > 32 or not all(0 <= n <= MAX_BYTES for n in shape):
            raise ProtocolError("an array of a frame is not one of numbers")
    if not isinstance(facts, dict):
        raise ProtocolError("the head of a frame holds no facts")
    return facts, table


def table_entry(group: Any, name: Any, dtype: Any, shape: Any) -> tuple[str, str, np.dtype[Any], tuple[int, ...]]:
    """One row of the table of arrays: its group, name, type and shape."""
    return str(group), str(name), np.dtype(str(dtype)), tuple(int(length) for length in shape)


def read_bytes(link: socket.socket, size: int) -> bytes:
    """Read so many bytes; memory is allocated as they arrive, not as they are announced."""
    content = bytearray()
    while len(content) < size:
        block = link.recv(min(size - len(content), 2**16))
        if not block:
            raise EOFError("the other side is gone")
        content += block
    return bytes(content)


def fill_array(link: socket.socket, view: memoryview) -> None:
    """Fill an array's memory from the socket."""
    while view:
        count = link.recv_into(view, min(len(view), 2**20))
        if not count:
            raise EOFError("the other side is gone")
        view = view[count:]


log = logging.getLogger("mutirao")

START = 60.0  # seconds in which a new worker must open its socket
MAX_LOG = 2**20  # bytes, after which a log is rotated
IDLE = 1800.0  # seconds without a request after which a worker ends


@dataclass(frozen=True)
class WorkerClient:
    """Access to the worker of a SuperNode; the worker ends with the process `parent`."""

    parent: int
    idle: float = IDLE

    def task(self, spec: TaskSpec, make_task: Callable[[], Task]) -> Task:
        """A task that sends its requests to the worker; without one, `make_task()` does the work here."""
        wanted = stamp(spec)
        try:
            opened = self.ask(spec, wanted, {"ask": "open"})[0]
            counts = SampleCounts(opened.get("train"), opened.get("test"))
            secure = from_table(opened["secure"])
            compress = compress_from(opened["compress"])
            agreed = {str(name): str(digest) for name, digest in opened["agreed"].items()}
        except (WorkerUnavailable, OSError) as error:
            log.warning("no worker (%s): this process does the work itself", error)
            return make_task()

        def handler(request: Request, site: Site) -> Any:
            # JSON has no NumPy scalars.
            config = {k: v.item() if isinstance(v, np.generic) else v for k, v in request.config.items()}
            facts = {"ask": "do", "do": request.do, "config": config}
            arrays = {"model": request.arrays, "extras": request.extras, "state": site.state}
            try:
                answer, groups = self.ask(spec, wanted, facts, arrays)
            except (WorkerUnavailable, OSError) as error:
                log.warning("no worker (%s): this process does the work itself", error)
                task = make_task()
                site.data = task.population[spec.name]
                return task.handler(request, site)
            if "answered" in answer:  # not a Reply: the fleet reports the type
                return type(str(answer["answered"]), (), {})()
            site.state.clear()
            site.state.update(groups.get("state", {}))
            metrics = {str(k): float(v) for k, v in answer["metrics"].items()}
            return Reply(groups.get("arrays", {}), groups.get("extras", {}), metrics, int(answer["n"]))

        # The policy needs the sample counts, not the data, which stay in the worker.
        return Task(handler, {spec.name: counts}, dict, secure=secure, compress=compress, agreed=agreed)

    def ask(
        self, spec: TaskSpec, wanted: str, facts: Mapping[str, Any], arrays: Mapping[str, Arrays] | None = None
    ) -> tuple[dict[str, Any], Groups]:
        """The worker's answer, from a second worker if the first one dies; errors of its code are raised here."""
        for last in (False, True):
            try:
                with self.connected(wanted) as link:
                    send(link, {**facts, "order": asdict(spec)}, arrays)
                    answer, groups = receive(link)
                break
            except (EOFError, ConnectionError, FileNotFoundError, ProtocolError, WorkerUnavailable) as error:
                if last:
                    raise WorkerUnavailable(f"twice: {error}") from error
                log.warning("the site's worker died (%s): starting another", error)
        if "raised" in answer:
            raise error_in(answer)
        return answer, groups

    @contextlib.contextmanager
    def connected(self, wanted: str) -> Iterator[socket.socket]:
        """A connection to a worker with the current code, environment and data."""
        folder = folder_of(self.parent)
        with file_lock(folder / "lock"):  # concurrent client processes start one worker, not two
            link = connect_to(folder, wanted) or self.start(folder, wanted)
        with link:
            yield link

    def start(self, folder: Path, wanted: str) -> socket.socket:
        """Start a worker and connect to it."""
        process = start_background("mutirao.deploy.site.worker", folder, wanted, str(self.parent), str(self.idle))
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and process.poll() is None:
            if link := connect_to(folder, wanted):
                return link
            time.sleep(0.02)
        raise WorkerUnavailable(f"a new one did not start; see {log_path('worker', folder)}")


def connect_to(folder: Path, wanted: str) -> socket.socket | None:
    """A connection to the worker in a folder, if its stamp fits; a worker with another stamp ends by this."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(GREETING_TIMEOUT)
        link.connect(str(folder / "socket"))
        if not same_user(link):
            raise WorkerUnavailable("the socket belongs to another user")
        send(link, {"stamp": wanted})
        if receive(link)[0].get("fits") is True:
            link.settimeout(None)
            return link
    except TimeoutError as error:  # it is stuck, or busy
        link.close()
        raise WorkerUnavailable("it does not answer") from error
    except (OSError, EOFError, ProtocolError):
        pass
    link.close()
    return None


def error_in(answer: Mapping[str, Any]) -> Exception:
    """The error that was raised in the worker, with its type name, its text and its rule."""
    text = str(answer["text"])
    if "rule" in answer:
        return Refused(str(answer["rule"]), text.removeprefix(f"{answer['rule']}: "), str(answer["detail"]))
    kind: type[Exception] = type(str(answer["raised"]), (MutiraoError,), {})
    return kind(text)


def log_path(module: str, folder: Path) -> Path:
    """The log of a background process: among the site's logs, if `mutirao site` created the site."""
    place = folder
    if site := os.environ.get(FOLDER_VARIABLE):
        place = Path(site) / "logs"
    place.mkdir(parents=True, exist_ok=True)
    log = place / f"{module.rpartition('.')[2]}.log"
    if log.exists() and log.stat().st_size > MAX_LOG:
        log.replace(log.with_suffix(".1.log"))
    return log


def start_background(module: str, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a process that outlives this one; its output goes to its log."""
    command = [sys.executable, "-m", module, str(folder), *words]
    with log_path(module, folder).open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def listen_at(path: Path, most: int) -> socket.socket:
    """Listen on a Unix socket at this path, replacing an older one; `accept` times out after half a second."""
    listener = socket.socket(socket.AF_UNIX)
    # Bound beside the old socket and moved onto it: there is no moment without a socket at this path.
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    listener.bind(str(fresh))
    listener.listen(most)
    fresh.replace(path)
    listener.settimeout(0.5)
    return listener
