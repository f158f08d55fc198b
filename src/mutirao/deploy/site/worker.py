"""A site's resident worker: it keeps torch and the site's data, so that Flower's process for each message need not.

The short-lived client process (`warm`) judges a request by the policy, asks the worker over a Unix socket to do the
work, judges the reply and sends it. The worker holds nothing that a request changes: it may die at any moment, and the
request is done again by a new worker or, at the latest, by the client process itself, with the same result.
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
from mutirao.deploy.site.framing import Groups, ProtocolError, receive, send
from mutirao.deploy.site.launcher import same_user, start_ticks
from mutirao.deploy.site.task_stamp import TaskSpec
from mutirao.deploy.site.worker_client import listen_at
from mutirao.errors import Refused
from mutirao.experiments.party_agreement import require_agreement
from mutirao.privacy.secure_aggregation.kinds import to_table

log = logging.getLogger("mutirao")

MOST_LINES = 16  # open at once


class Worker:
    """The worker: one request is worked on at a time, each line has a thread."""

    def __init__(self, folder: Path, made_of: str, parent: int, idle: float) -> None:
        self.folder, self.made_of, self.parent, self.idle = folder, made_of, parent, idle
        self.parent_birth = start_ticks(parent)
        self.working = threading.Lock()
        self.lines: set[socket.socket] = set()
        self.last = time.monotonic()
        self.stale = False

    def run(self) -> None:
        """Serve until nobody needs this worker: its SuperNode ended, it is idle, or its code is no longer the code."""
        listener = listen_at(self.folder / "socket", MOST_LINES)
        remove_stale_folders(self.folder.parent)
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
        if not start_ticks(self.parent):
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)  # torch's threads are not waited for

    def needed(self) -> bool:
        """Whether to go on."""
        if not self.parent_birth or start_ticks(self.parent) != self.parent_birth:
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
            watcher = threading.Thread(target=exit_with_client, args=(link, done), daemon=True)
            watcher.start()
            try:
                told, arrays = answer_request(facts, groups)
            finally:
                done.set()
                watcher.join()
        try:
            send(link, told, arrays)
        except (TypeError, ValueError) as error:  # the handler gave what cannot travel
            send(link, error_facts(error))


def exit_with_client(link: socket.socket, done: threading.Event) -> None:
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


def answer_request(facts: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
    """Do what is asked; whatever the site's code raises is an answer."""
    from mutirao.deploy.flower.run_tasks import client_data

    try:
        order = task_spec_in(facts.get("order"))
        task = task_of(order.key())
        data = client_data(task, order.name)
        if facts.get("ask") == "open":
            agreed = {**task.basis(), **task.agreed, **agreed_of(data)}
            leaves = {"secure": to_table(task.secure), "compress": compress_table(task.compress)}
            return {**asdict(SampleCounts.of(data)), **leaves, "agreed": agreed}, {}
        config = found if isinstance(found := facts.get("config"), dict) else {}
        request = Request(str(facts["do"]), groups.get("model", {}), config, groups.get("extras", {}))
        site = Site(order.name, data, dict(groups.get("state", {})))
        reply = task.handler(request, site)
        if not isinstance(reply, Reply):
            return {"answered": type(reply).__name__}, {}
        told = {"metrics": {k: float(v) for k, v in reply.metrics.items()}, "n": int(reply.n)}
        return told, {"arrays": reply.arrays, "extras": reply.extras, "state": site.state}
    except (Exception, SystemExit) as error:
        return error_facts(error), {}


def task_spec_in(content: Any) -> TaskSpec:
    """The order in a frame; ProtocolError if it is none."""
    try:
        return TaskSpec(**content)
    except TypeError as error:
        raise ProtocolError("a frame without an order") from error


def error_facts(error: BaseException) -> dict[str, Any]:
    """What is told of an error: its kind, its text, and of a refusal the rule."""
    facts = {"raised": type(error).__name__, "text": str(error)[:1000]}
    return facts | ({"rule": error.rule, "detail": error.detail} if isinstance(error, Refused) else {})


@functools.lru_cache(maxsize=2)
def task_of(key: str) -> Any:
    """The task of an order, kept for the next request."""
    from flwr.app import Context, RecordDict

    from mutirao.deploy.flower.run_tasks import recipe_task

    order = TaskSpec(**json.loads(key))
    run, node_config, run_config = int(order.run or 0), dict(order.node_config), dict(order.run_config)
    context = Context(run, order.node, node_config, RecordDict(), run_config)
    return require_agreement(load_name(order.task)(context) if order.task else recipe_task(context, order.instead))


def remove_stale_folders(top: Path) -> None:
    """Remove what killed workers of SuperNodes that are gone left behind."""
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
