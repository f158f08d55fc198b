"""A site's resident worker: it keeps torch and the site's data in memory, for Flower's many short client processes.

A client process checks a request against the policy, passes it to the worker over a Unix socket, checks the reply and
sends it. The worker keeps nothing that a request changes. So it may die at any moment: a new worker, or
finally the client process itself, repeats the request with the same result.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutirao.compression import to_table as compress_table
from mutirao.config import load_name
from mutirao.core.agreement import agreed_of
from mutirao.core.fleet import Reply, Request, Site, failure_of
from mutirao.deploy.policy.enforcement import SampleCounts
from mutirao.deploy.site.launcher import same_user, start_ticks
from mutirao.deploy.site.task_stamp import TaskSpec
from mutirao.deploy.site.worker_client import Groups, ProtocolError, listen_at, receive, send
from mutirao.errors import Refused
from mutirao.experiments.party_agreement import require_agreement
from mutirao.privacy.secure_aggregation.kinds import to_table

log = logging.getLogger("mutirao")

MAX_CONNECTIONS = 16  # open at once


class Worker:
    """Serves requests over a Unix socket: a thread for each connection, one request at a time."""

    def __init__(self, folder: Path, made_of: str, parent: int, idle: float) -> None:
        self.folder = folder
        self.stamp = made_of
        self.parent = parent
        self.idle = idle
        self.parent_birth = start_ticks(parent)
        self.working = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.last = time.monotonic()
        self.stale = False

    def run(self) -> None:
        """Serve until the SuperNode ends, the worker is idle for long, or the installed code changes."""
        listener = listen_at(self.folder / "socket", MAX_CONNECTIONS)
        remove_stale_folders(self.folder.parent)
        while self.needed():
            try:
                link = listener.accept()[0]
            except TimeoutError:
                continue
            if len(self.connections) < MAX_CONNECTIONS:
                self.connections.add(link)
                threading.Thread(target=self.talk, args=(link,), daemon=True).start()
            else:
                link.close()
        if not self.stale:  # otherwise another worker has replaced the socket
            (self.folder / "socket").unlink(missing_ok=True)
        if not start_ticks(self.parent):
            shutil.rmtree(self.folder, ignore_errors=True)
        # Torch's threads are not waited for.
        os._exit(0)

    def needed(self) -> bool:
        """Whether to keep serving."""
        if not self.parent_birth or start_ticks(self.parent) != self.parent_birth:
            return False
        return bool(self.connections) or not (self.stale or time.monotonic() - self.last > self.idle)

    def talk(self, link: socket.socket) -> None:
        """Serve one connection from greeting to end; no content of it may end the worker."""
        try:
            with link:
                link.settimeout(60.0)
                if not same_user(link):
                    return
                facts, _ = receive(link)
                fits = facts.get("stamp") == self.stamp and not self.stale
                self.stale = self.stale or ("stamp" in facts and not fits)
                if not fits:
                    with contextlib.suppress(FileNotFoundError):
                        (self.folder / "socket").unlink()  # the next worker binds its own
                send(link, {"fits": fits})
                if fits:
                    link.settimeout(None)
                    self.serve(link)
        except (OSError, EOFError, ProtocolError) as error:
            log.info("a connection ended: %s", failure_of(error).reason)
        finally:
            self.last = time.monotonic()
            self.connections.discard(link)

    def serve(self, link: socket.socket) -> None:
        """Answer the one request of a connection; if the client disconnects, its work is abandoned."""
        facts, groups = receive(link)
        with self.working:
            done = threading.Event()
            watcher = threading.Thread(target=exit_with_client, args=(link, done), daemon=True)
            watcher.start()
            try:
                answer, arrays = handle_request(facts, groups)
            finally:
                done.set()
                watcher.join()
        try:
            send(link, answer, arrays)
        except (TypeError, ValueError) as error:  # the handler returned what cannot be serialized
            send(link, error_facts(error))


def exit_with_client(link: socket.socket, done: threading.Event) -> None:
    """Exit, even in the middle of a computation, when the client process has gone."""
    while not done.wait(0.1):
        # The client sends no more: a peek finds nothing, or the end of the stream.
        try:
            gone = link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            continue
        except OSError:
            gone = True
        if gone and not done.is_set():
            os._exit(1)
        if not gone:
            return  # the client sent unexpected data, which is ignored


def handle_request(facts: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
    """Handle one request; an exception of the site's code becomes the answer."""
    from mutirao.deploy.flower.run_tasks import client_data

    try:
        spec = task_spec_in(facts.get("order"))
        task = task_of(spec.key())
        data = client_data(task, spec.name)
        if facts.get("ask") == "open":
            agreed = {**task.basis(), **task.agreed, **agreed_of(data)}
            leaves = {"secure": to_table(task.secure), "compress": compress_table(task.compress)}
            return {**asdict(SampleCounts.of(data)), **leaves, "agreed": agreed}, {}
        config = facts.get("config")
        if not isinstance(config, dict):
            config = {}
        request = Request(str(facts["do"]), groups.get("model", {}), config, groups.get("extras", {}))
        site = Site(spec.name, data, dict(groups.get("state", {})))
        reply = task.handler(request, site)
        if not isinstance(reply, Reply):
            return {"answered": type(reply).__name__}, {}
        answer = {"metrics": {k: float(v) for k, v in reply.metrics.items()}, "n": int(reply.n)}
        return answer, {"arrays": reply.arrays, "extras": reply.extras, "state": site.state}
    except (Exception, SystemExit) as error:
        return error_facts(error), {}


def task_spec_in(content: Any) -> TaskSpec:
    """The task specification in a frame; ProtocolError if it is invalid."""
    try:
        return TaskSpec(**content)
    except TypeError as error:
        raise ProtocolError("a frame without a task specification") from error


def error_facts(error: BaseException) -> dict[str, Any]:
    """An error as JSON: its type, its text, and the rule of a refusal."""
    facts: dict[str, Any] = {"raised": type(error).__name__, "text": str(error)[:1000]}
    if isinstance(error, Refused):
        facts |= {"rule": error.rule, "detail": error.detail}
    return facts


@functools.lru_cache(maxsize=2)
def task_of(key: str) -> Any:
    """The task of a specification, kept for the next request."""
    from flwr.app import Context, RecordDict

    from mutirao.deploy.flower.run_tasks import recipe_task

    spec = TaskSpec(**json.loads(key))
    context = Context(int(spec.run or 0), spec.node, dict(spec.node_config), RecordDict(), dict(spec.run_config))
    if spec.task:
        return require_agreement(load_name(spec.task)(context))
    return require_agreement(recipe_task(context, spec.instead))


def remove_stale_folders(top: Path) -> None:
    """Remove the folders of SuperNodes that have ended."""
    for folder in top.iterdir():
        pid, _, began = folder.name.partition("-")
        if pid.isdecimal() and start_ticks(int(pid)) != began:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the worker of a folder."""
    folder, made_of, parent, idle = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    Worker(Path(folder), made_of, int(parent), float(idle)).run()


if __name__ == "__main__":
    main()
