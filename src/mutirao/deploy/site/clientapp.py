"""`flwr-clientapp` as a site runs it: it executes the site's installed code, never code from the network.

Flower sends the app of a run with its code to every SuperNode, which starts `flwr-clientapp` for each message. A policy
is only effective if that program ignores the code. `write_clientapp(folder)` writes such a program; a SuperNode started
with that folder first in its PATH runs it. Nothing is unpacked or installed.

The first message also starts the site's fork server: a process that has imported Flower and mutirao, and forks a client
process for each later message, so that the imports are paid once.
"""

import importlib
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutirao.config import load_name
from mutirao.deploy import flower_patches
from mutirao.deploy.policy.privacy_ledger import file_lock
from mutirao.deploy.site import launcher
from mutirao.deploy.site.task_stamp import code_stamp
from mutirao.deploy.site.worker_client import IDLE, WorkerClient, listen_at, start_background
from mutirao.errors import ConfigError
from mutirao.io import write_whole

COMMAND = "flwr-clientapp"


def write_clientapp(folder: Path, task: str = "") -> Path:
    """Write the command; `task` names the site's own function from Flower's context to a Task (`my_site:task_of`)."""
    if os.name == "nt":
        raise ConfigError("a site's own flwr-clientapp is a shell script: it needs Linux or macOS")
    # -I and -S: the launcher needs nothing but the standard library, and starts faster without the rest.
    words = [sys.executable, "-I", "-S", launcher.__file__]
    if task:
        words.append(f"--task={task}")
    return write_command(folder, words)


def write_command(folder: Path, words: Sequence[str], name: str = COMMAND) -> Path:
    """Write a shell script that runs these words followed by its own arguments."""
    path = folder / name
    write_whole(path, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    """Answer the message that the SuperNode has for this process."""
    words = sys.argv[1:]
    parent = launcher.parent_in(words)
    if os.environ.get("MUTIRAO_WORKER", "on").lower() not in launcher.WORKER_OFF:
        start_fork_server(parent, words)
    prepare()
    answer_one_message(words, parent)


def prepare() -> None:
    """Import all that a client process needs, and replace the functions of Flower that load the server's code."""
    importlib.import_module("mutirao.flower")

    def do_not_unpack(*_: Any, **__: Any) -> None:
        """The app that the server sent is not unpacked."""

    for internal in (flower_patches.UNPACK, flower_patches.FOLDER):
        flower_patches.patch(internal, lambda _: do_not_unpack)


def answer_one_message(words: list[str], parent: int) -> None:
    """Do what Flower's own command does, without importing the whole SuperNode, which takes half a second."""
    import argparse

    from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
    from flwr.supercore.constant import SUPERNODE_DEFAULT_CLIENT_ADDRESS
    from flwr.supercore.tls import validate_and_resolve_root_certificates
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    from mutirao.deploy.flower import client_app

    parser = argparse.ArgumentParser(COMMAND)
    parser.add_argument("--runtime-api-address", default=SUPERNODE_DEFAULT_CLIENT_ADDRESS)
    parser.add_argument("--task", default="")
    add_args_flwr_app_common(parser)
    args = parser.parse_args(words)

    task_of: Any = None
    if args.task:
        task_of = load_later(args.task)

    def load(*_: Any, **__: Any) -> Any:
        return lambda *_: client_app(task_of, WorkerClient(parent))

    flower_patches.patch(flower_patches.LOAD, lambda _: load)
    run_clientapp(
        runtime_api_address=args.runtime_api_address,
        token=try_obtain_flwr_app_token(args),
        insecure=args.insecure,
        certificates=validate_and_resolve_root_certificates(args.root_certificates, args.insecure),
        parent_pid=args.parent_pid,
        runtime_dependency_install=False,
    )


def load_later(name: str) -> Any:
    """A function of the site by its dotted path, imported when it is called: usually only the worker calls it."""

    def task_of(context: Any) -> Any:
        return load_name(name)(context)

    task_of.__module__, _, task_of.__qualname__ = name.partition(":")
    return task_of


def start_fork_server(parent: int, words: list[str]) -> None:
    """Start the fork server of this SuperNode; if that fails, each message just pays for its own imports."""
    task = next((word.removeprefix("--task=") for word in words if word.startswith("--task=")), "")
    try:
        folder = launcher.folder_of(parent)
        with file_lock(folder / "lock"):
            record = folder / "forkserver.pid"
            if not record.exists() or not launcher.start_ticks(int(record.read_text())):
                arguments = ["--fork-server", str(parent), code_stamp(task), task]
                process = start_background("mutirao.deploy.site.clientapp", folder, *arguments)
                write_whole(record, str(process.pid), durable=False)
    except (OSError, ValueError, launcher.WorkerUnavailable):
        return


def serve_forks(folder: Path, parent: int, made_of: str, task: str) -> None:
    """Fork a client process for each message, as long as the SuperNode lives and the code does not change."""
    prepare()
    born = launcher.start_ticks(parent)
    last = time.monotonic()
    # Children are not waited for: ignoring the signal lets the system remove them when they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = listen_at(folder / launcher.FORK_SERVER, 16)
    while born and launcher.start_ticks(parent) == born and time.monotonic() - last < IDLE:
        try:
            link = listener.accept()[0]
        except TimeoutError:
            continue
        last = time.monotonic()
        with link:
            if not launcher.same_user(link):
                continue
            if code_stamp(task) != made_of:
                # Without an answer the launcher becomes the client process itself, and starts another fork server.
                (folder / "forkserver.pid").unlink(missing_ok=True)
                break
            link.settimeout(launcher.GREETING_TIMEOUT)
            try:
                text, files, _, _ = socket.recv_fds(link, launcher.MOST, 2)
            except OSError:
                continue
            words = words_in(text)
            if words is not None and len(files) == 2 and os.fork() == 0:
                listener.close()
                become_client(link, words, files)
            for file in files:
                os.close(file)


def words_in(text: bytes) -> list[str] | None:
    """The arguments that a launcher sent; None for anything else."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return words
    return None


def become_client(link: socket.socket, words: list[str], files: list[int]) -> None:
    """Take over from the launcher, with its output, and confirm to it that this process does the work."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        for number, file in zip((1, 2), files, strict=True):
            os.dup2(file, number)
            os.close(file)
        link.sendall(b"1")
        link.close()
        answer_one_message(words, launcher.parent_in(words))
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
    finally:
        # A fork ends by `_exit`: the exit handlers are those of the fork server.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[2:3] == ["--fork-server"]:
        serve_forks(Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main()
