"""A site's resident worker: it keeps torch and the site's data, so that Flower's process for each message need not.

The short-lived client process judges a request by the policy, asks the worker over a Unix socket to do the work, judges
the reply and sends it. The worker holds nothing that a request changes: it may die at any moment, and the request is
done again by a new worker or, at the latest, by the client process itself, with the same result. Frames carry JSON and
plain arrays of bounded size; nothing is unpickled.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.arrays import Arrays
from mutirao.errors import MutiraoError, Refused
from mutirao.fleet import Reply, Request, Scalar, Site, failure_of
from mutirao.site.caller import GREET, WorkerDied, birth, folder_of, same_user

log = logging.getLogger("mutirao")

Groups = dict[str, Arrays]

MAGIC = b"mtr1"
FRAME = struct.Struct("<4sIQ")  # the mark, bytes of JSON, bytes of arrays
MOST_JSON = 8 * 2**20
MOST_BYTES = 8 * 2**30
NUMBERS = "biufc"  # the kinds of NumPy types that may travel: no objects, no text, no structures
START = 60.0  # seconds a new worker has to open its socket
IDLE = 1800.0  # seconds without a request after which a worker ends
MOST_FILES = 5000  # of a data folder that are looked at for changes
WHOLE = ("flwr", "numpy", "torch")  # packages that an installer replaces as a whole
MOST_LINES = 16  # open at once


class ProtocolError(Exception):
    """What came over the socket is no frame."""


@dataclass(frozen=True)
class Order:
    """What a task is made of: the site's own function or else a recipe, and all its settings."""

    name: str  # the client's
    task: str = ""  # the site's own function from Flower's context to a Task; empty: the recipe of the run
    run: str = ""  # of Flower; only for a function of the site
    node: int = 0
    run_config: Mapping[str, Scalar] = field(default_factory=dict)
    node_config: Mapping[str, Scalar] = field(default_factory=dict)
    instead: Mapping[str, Scalar] = field(default_factory=dict)  # settings the site insists on

    def key(self) -> str:
        """The same for orders that give the same task."""
        return json.dumps(asdict(self), sort_keys=True)


# ---- frames


def send(link: socket.socket, facts: Mapping[str, Any], groups: Mapping[str, Arrays] | None = None) -> None:
    """Write one frame: JSON, then the bytes of all arrays one after the other."""
    plain = {g: {k: np.asarray(v, order="C") for k, v in arrays.items()} for g, arrays in (groups or {}).items()}
    table = [[g, k, v.dtype.str, list(v.shape)] for g, arrays in plain.items() for k, v in arrays.items()]
    parts = [v for arrays in plain.values() for v in arrays.values()]
    if bad := next((v.dtype for v in parts if v.dtype.kind not in NUMBERS), None):
        raise TypeError(f"an array holds {bad}, not numbers")
    head = json.dumps({"facts": facts, "arrays": table}).encode()
    body = sum(v.nbytes for v in parts)
    if len(head) > MOST_JSON or body > MOST_BYTES:
        raise ValueError(f"{len(head)} bytes of text and {body} of arrays are too many")
    link.sendall(FRAME.pack(MAGIC, len(head), body) + head)
    for v in parts:
        if v.nbytes:
            link.sendall(v.reshape(-1).view(np.uint8).data)


def receive(link: socket.socket) -> tuple[dict[str, Any], Groups]:
    """Read one frame. Sizes are compared before memory is taken; EOFError if the other side is gone."""
    mark, size, body = FRAME.unpack(read(link, FRAME.size))
    if mark != MAGIC or size > MOST_JSON or body > MOST_BYTES:
        raise ProtocolError("this is no frame")
    facts, table = head_of(read(link, size))
    if sum(math.prod(shape) * dtype.itemsize for _, _, dtype, shape in table) != body:
        raise ProtocolError("the arrays are not as long as the frame says")
    groups: Groups = {}
    for group, name, dtype, shape in table:
        array = np.empty(shape, dtype)
        if array.nbytes:
            fill(link, array.reshape(-1).view(np.uint8).data)
        groups.setdefault(group, {})[name] = array
    return facts, groups


def head_of(text: bytes) -> tuple[dict[str, Any], list[tuple[str, str, np.dtype[Any], tuple[int, ...]]]]:
    """The facts and the table of arrays in the JSON of a frame; ProtocolError if it is anything else."""
    try:
        content = json.loads(text)
        facts, rows = content["facts"], content["arrays"]
        table = [(str(g), str(k), np.dtype(str(d)), tuple(int(n) for n in shape)) for g, k, d, shape in rows]
    except RecursionError as error:
        raise ProtocolError("the head of a frame is nested too deeply") from error
    except Exception as error:
        raise ProtocolError("the head of a frame cannot be read") from error
    for _, _, dtype, shape in table:
        if dtype.kind not in NUMBERS or len(shape) > 32 or not all(0 <= n <= MOST_BYTES for n in shape):
            raise ProtocolError("an array of a frame is not one of numbers")
    if not isinstance(facts, dict):
        raise ProtocolError("the head of a frame holds no facts")
    return facts, table


def read(link: socket.socket, size: int) -> bytes:
    """So many bytes of the socket; memory is taken as they come, not as they are announced."""
    content = bytearray()
    while len(content) < size:
        block = link.recv(min(size - len(content), 2**16))
        if not block:
            raise EOFError("the other side is gone")
        content += block
    return bytes(content)


def fill(link: socket.socket, view: memoryview) -> None:
    """Fill an array's memory from the socket."""
    while view:
        count = link.recv_into(view, min(len(view), 2**20))
        if not count:
            raise EOFError("the other side is gone")
        view = view[count:]


# ---- the client's side


@dataclass(frozen=True)
class Warm:
    """Where the worker of a SuperNode is found; `parent` is the process with which it ends."""

    parent: int
    idle: float = IDLE

    def task(self, order: Order, cold: Callable[[], Any]) -> Any:
        """The task of an order: its handler asks the worker, and does by itself (`cold`) what no worker can."""
        from mutirao.recipes import Task

        wanted = stamp(order)
        try:
            samples = self.asked(order, wanted, {"ask": "open"})[0].get("samples")
        except (WorkerDied, OSError) as error:
            log.warning("no worker (%s): this process does the work by itself", error)
            return cold()

        def handler(request: Request, site: Site) -> Any:
            facts = {"ask": "do", "do": request.do, "config": plain_config(request.config)}
            arrays = {"model": request.arrays, "state": site.state}
            try:
                told, groups = self.asked(order, wanted, facts, arrays)
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
        return Task(handler, {order.name: None if samples is None else (range(int(samples)),)}, dict)

    def asked(
        self, order: Order, wanted: str, facts: Mapping[str, Any], arrays: Mapping[str, Arrays] | None = None
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
            raise error_from(told)
        return told, groups

    @contextlib.contextmanager
    def connected(self, wanted: str) -> Iterator[socket.socket]:
        """A line to a worker that has the code, the environment and the data of now."""
        folder = folder_of(self.parent)
        with only_one(folder / "lock"):
            link = greeted(folder, wanted) or self.started(folder, wanted)
        with link:
            yield link

    def started(self, folder: Path, wanted: str) -> socket.socket:
        """A line to a new worker."""
        process = resident("mutirao.site.worker", folder, wanted, str(self.parent), str(self.idle))
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and process.poll() is None:
            if link := greeted(folder, wanted):
                return link
            time.sleep(0.02)
        raise WorkerDied(f"a new one did not start, {folder / 'worker.log'} says why")


def resident(module: str, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a process that outlives this one; what it says is in the folder."""
    command = [sys.executable, "-m", module, str(folder), *words]
    with (folder / f"{module.rpartition('.')[2]}.log").open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def greeted(folder: Path, wanted: str) -> socket.socket | None:
    """A line to the worker in a folder, if there is one of the right kind; one of another kind ends by this."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(GREET)
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


def plain_config(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Settings of a request as JSON has them."""
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in config.items()}


def error_from(told: Mapping[str, Any]) -> Exception:
    """The error that was raised in the worker, as far as anybody asks: its kind, its text, the rule."""
    if "rule" in told:
        return Refused(str(told["rule"]), str(told["text"]).removeprefix(f"{told['rule']}: "), str(told["detail"]))
    kind: type[Exception] = type(str(told["raised"]), (MutiraoError,), {})
    return kind(str(told["text"]))


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Two client processes at once start one worker, not two."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def stamp(order: Order) -> str:
    """What a worker has to be made of: the installed code, the environment, the data, by their names and dates."""
    recipe = str(order.run_config.get("recipe", ""))
    sha = hashlib.sha256(code_stamp(order.task, recipe if ":" in recipe else "").encode())
    for table in (order.node_config, order.instead):
        if isinstance(data := table.get("data"), str):
            for line in dates_in(Path(data).expanduser()):
                sha.update(line.encode())
    return sha.hexdigest()


def code_stamp(*names: str) -> str:
    """The installed code, with that of the packages these dotted names are in, and the environment."""
    sha = hashlib.sha256(f"{sys.executable} {sys.version}".encode())
    for top in sorted({"mutirao", *WHOLE, *(name.partition(":")[0].partition(".")[0] for name in names)} - {""}):
        for line in dates_of_package(top):
            sha.update(line.encode())
    for key, value in sorted(os.environ.items()):
        if key.startswith(("MUTIRAO_", "PYTHON", "CUDA_", "OMP_")):
            sha.update(f"{key}={value}\n".encode())
    return sha.hexdigest()


def dates_of_package(top: str) -> list[str]:
    """The source files of a package with sizes and dates; of one that is not ours its first file says enough."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
        if spec is not None and spec.origin:
            file = Path(spec.origin)
            alone = top in WHOLE or spec.submodule_search_locations is None
            found = [file] if alone else sorted(f for f in file.parent.rglob("*") if f.suffix in {".py", ".c", ".so"})
            return [dated(f) for f in found]
    return []


def dates_in(path: Path) -> Iterator[str]:
    """A file or folder with sizes and dates, down to the first few thousand files."""
    yield dated(path)
    left = MOST_FILES
    for folder, names, files in os.walk(path):
        names.sort()
        for name in sorted(files)[:left]:
            left -= 1
            yield dated(Path(folder) / name)
        if left <= 0:
            return


def dated(path: Path) -> str:
    """A file by its name, size and date."""
    try:
        facts = path.stat()
    except OSError:
        return f"{path} missing\n"
    return f"{path} {facts.st_size} {facts.st_mtime_ns}\n"


# ---- the worker's side


class Server:
    """The worker: one request is worked on at a time, each line has a thread."""

    def __init__(self, folder: Path, made_of: str, parent: int, idle: float) -> None:
        self.folder, self.made_of, self.parent, self.idle = folder, made_of, parent, idle
        self.parent_birth = birth(parent)
        self.working = threading.Lock()
        self.lines: set[socket.socket] = set()
        self.last = time.monotonic()
        self.stale = False

    def run(self) -> None:
        """Serve until nobody needs this worker: its SuperNode ended, it is idle, or its code is no longer the code."""
        listener = socket.socket(socket.AF_UNIX)
        fresh = self.folder / f"socket.{os.getpid()}"
        listener.bind(str(fresh))
        listener.listen(MOST_LINES)
        fresh.replace(self.folder / "socket")
        listener.settimeout(0.5)
        sweep(self.folder.parent)
        while self.needed():
            try:
                link = listener.accept()[0]
            except TimeoutError:
                continue
            if len(self.lines) < MOST_LINES:
                self.lines.add(link)
                threading.Thread(target=self.talk, args=(link,), daemon=True).start()
            else:
                link.close()
        if not self.stale:  # otherwise another worker has this place by now
            (self.folder / "socket").unlink(missing_ok=True)
        if not birth(self.parent):
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)  # torch's threads are not waited for

    def needed(self) -> bool:
        """Whether to go on."""
        if not self.parent_birth or birth(self.parent) != self.parent_birth:
            return False
        return bool(self.lines) or not (self.stale or time.monotonic() - self.last > self.idle)

    def talk(self, link: socket.socket) -> None:
        """One line from greeting to hanging up; whatever comes over it, the worker lives on."""
        try:
            with link:
                link.settimeout(60.0)
                if not same_user(link):
                    return
                facts, _ = receive(link)
                fits = facts.get("stamp") == self.made_of and not self.stale
                self.stale = self.stale or ("stamp" in facts and not fits)
                if not fits:
                    with contextlib.suppress(FileNotFoundError):
                        (self.folder / "socket").unlink()  # the next one puts its own in place
                send(link, {"fits": fits})
                if fits:
                    link.settimeout(None)
                    self.serve(link)
        except (OSError, EOFError, ProtocolError) as error:
            log.info("a line ended: %s", failure_of(error).reason)
        finally:
            self.last = time.monotonic()
            self.lines.discard(link)

    def serve(self, link: socket.socket) -> None:
        """Answer the one question of a line; if the one who asked goes away, the work on it is pointless."""
        facts, groups = receive(link)
        with self.working:
            done = threading.Event()
            watcher = threading.Thread(target=end_with, args=(link, done), daemon=True)
            watcher.start()
            try:
                told, arrays = answer(facts, groups)
            finally:
                done.set()
                watcher.join()
        try:
            send(link, told, arrays)
        except (TypeError, ValueError) as error:  # the handler gave what cannot travel
            send(link, said(error))


def end_with(link: socket.socket, done: threading.Event) -> None:
    """End the worker, in the middle of its work, if the process that waits for it has gone."""
    while not done.wait(0.1):
        try:
            gone = link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            continue
        except OSError:
            gone = True
        if gone and not done.is_set():
            os._exit(1)
        if not gone:
            return  # it sends more than it should: nobody reads that


def answer(facts: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
    """Do what is asked; whatever the site's code raises is an answer."""
    from mutirao.fleets.flower import data_of

    try:
        order = order_in(facts.get("order"))
        task = task_of(order.key())
        data = data_of(task, order.name)
        if facts.get("ask") == "open":
            from mutirao.site.guard import samples_in

            return {"samples": samples_in(data)}, {}
        config = facts.get("config")
        request = Request(str(facts["do"]), groups.get("model", {}), config if isinstance(config, dict) else {})
        site = Site(order.name, data, dict(groups.get("state", {})))
        reply = task.handler(request, site)
        if not isinstance(reply, Reply):
            return {"answered": type(reply).__name__}, {}
        metrics = {k: float(v) for k, v in reply.metrics.items()}
        return {"metrics": metrics, "n": int(reply.n)}, {
            "arrays": reply.arrays,
            "extras": reply.extras,
            "state": site.state,
        }
    except (Exception, SystemExit) as error:
        return said(error), {}


def order_in(content: Any) -> Order:
    """The order in a frame; ProtocolError if it is none."""
    try:
        return Order(**content)
    except TypeError as error:
        raise ProtocolError("a frame without an order") from error


def said(error: BaseException) -> dict[str, Any]:
    """What is told of an error: its kind, its text, and of a refusal the rule."""
    facts = {"raised": type(error).__name__, "text": str(error)[:1000]}
    return facts | ({"rule": error.rule, "detail": error.detail} if isinstance(error, Refused) else {})


@functools.lru_cache(maxsize=2)
def task_of(key: str) -> Any:
    """The task of an order, kept for the next request."""
    from flwr.app import Context, RecordDict

    from mutirao.config import load_name
    from mutirao.fleets.flower import recipe_task

    order = Order(**json.loads(key))
    run, node_config, run_config = int(order.run or 0), dict(order.node_config), dict(order.run_config)
    context = Context(run, order.node, node_config, RecordDict(), run_config)
    return load_name(order.task)(context) if order.task else recipe_task(context, order.instead)


def sweep(top: Path) -> None:
    """Remove what killed workers of SuperNodes that are gone left behind."""
    for folder in top.iterdir():
        pid, _, began = folder.name.partition("-")
        if pid.isdecimal() and birth(int(pid)) != began:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the worker of a folder."""
    folder, made_of, parent, idle = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    Server(Path(folder), made_of, int(parent), float(idle)).run()


if __name__ == "__main__":
    main()
