"""Start, monitor and stop the SuperLink or SuperNode of a folder: by its own record, never another process.

A process is known by its number and the moment it was born, written down in the folder when it starts: a number that
was given to somebody else since is not ours. Whatever it starts in turn carries `MUTIRAO_SITE=<folder>` in its
environment, so that nothing is left over when it ends.
"""

import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutirao.config import toml_lines, toml_string
from mutirao.deploy.keys import create_secret, read_certificate, read_secret
from mutirao.deploy.layout import (
    FILE,
    FOLDER_VARIABLE,
    Node,
    Server,
    free_port,
    load_node,
    load_place,
    load_server,
    need_linux,
)
from mutirao.deploy.policy.rules import load_policy
from mutirao.deploy.server import flwr_command
from mutirao.deploy.server.control_calls import restart_command, server_info
from mutirao.deploy.site import launcher
from mutirao.deploy.site.clientapp import COMMAND as CLIENTAPP
from mutirao.deploy.site.clientapp import write_clientapp, write_command
from mutirao.deploy.site.supernode import NOT_ADMITTED
from mutirao.errors import ConfigError, MutiraoError
from mutirao.io import write_whole

RECORD = "process.json"
KEPT_LOGS = 9
PYTHON_BIN = Path(sys.executable).parent
# as Flower logs it
FOUND = ("SuperNode ID:", "Connection successful after")
LOST = "Connection attempt failed"
LOCAL = "localhost,127.0.0.1,::1"
COLOURS = {"FORCE_COLOR", "CLICOLOR_FORCE"}  # Jupyter sets them, and Flower's output would no longer be JSON
POLLS = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"  # seconds until the one who starts Flower's apps looks again; else 1


@dataclass(frozen=True)
class Process:
    """A SuperLink or SuperNode that was started in a folder."""

    what: str  # superlink, supernode
    folder: Path
    pid: int
    born: str
    log: Path

    def alive(self) -> bool:
        """Whether it still runs."""
        return start_id(self.pid) == self.born

    def stop(self, seconds: float = 10.0) -> None:
        """Ask it to end, make it end after so many seconds, and end all that it started."""
        family = processes_of(self.folder)
        self.signal(signal.SIGTERM)
        if not wait_until(lambda: not self.alive(), seconds):
            self.kill()
        end_leftovers(self.folder)
        # A dying process no longer shows its environment, and so its mark: its birth is checked instead.
        wait_until(lambda: all(start_id(pid) != born for pid, born in family), seconds)

    def kill(self) -> None:
        """SIGKILL to this process alone, as a power cut would; what it started finds out by itself."""
        self.signal(signal.SIGKILL)
        wait_until(lambda: not self.alive(), 10)

    def text(self) -> str:
        """What it has said so far."""
        if self.log.exists():
            return self.log.read_text(encoding="utf-8", errors="replace")
        return ""

    def last_words(self) -> str:
        """The last line of its log that says something."""
        return next((line.strip() for line in reversed(self.text().splitlines()) if line.strip()), "nothing")[:300]

    def reason(self) -> str:
        """Why it ended, from its log; Flower writes an error over several lines."""
        lines = self.text().splitlines()
        at = next((i for i, line in enumerate(lines) if "ERROR" in line or "Error" in line), None)
        if at is None:
            return self.last_words()
        return " ".join(" ".join(lines[at : at + 4]).split())[:300]

    def since(self) -> str:
        """When it was started (UTC)."""
        try:
            return str(json.loads((self.folder / RECORD).read_text(encoding="utf-8")).get("since", ""))
        except (OSError, ValueError, AttributeError, RecursionError):
            return ""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still the same process."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start_superlink(folder: Path, env: Mapping[str, str] | None = None, wait: float = 60.0) -> Process:
    """Start the server's SuperLink with TLS and node authentication, and wait until it answers.

    Its state is in `state.db`, so that admitted keys survive a restart. `env` is added to its environment.
    """
    server = load_server(folder)
    write_commands(server)
    refuse_if_running(server.folder)
    refuse_if_expired(server)
    if trouble := port_problem(server):
        raise MutiraoError(f"{trouble}; end the other program, or change the port in {server.folder / FILE}")
    process = launch(server, superlink_command(server), environment(server) | dict(env or {}))
    if not wait_until(lambda: is_answering(server) or not process.alive(), wait) or not process.alive():
        reason = process.reason()
        process.stop()
        raise MutiraoError(f"the SuperLink did not come up: {reason} (see {process.log})")
    return process


def start_supernode(folder: Path, env: Mapping[str, str] | None = None) -> Process:
    """Start the site's SuperNode with its key and its policy, running the site's own installed code.

    `is_connected(process)` is true once it is admitted. Until then it tries again without end: the server may be down,
    not know its key yet, or still have the connection of a killed process. `env` is added to its environment.
    """
    node = load_node(folder)
    return launch(node, supernode_command(node), environment(node) | dict(env or {}))


def exec_process(folder: Path) -> None:
    """Become the SuperLink or SuperNode: for containers and service managers, which watch it by themselves."""
    need_linux("a server or a site")
    place = load_place(folder)
    refuse_if_running(folder)
    if isinstance(place, Server):
        refuse_if_expired(place)
        write_commands(place)
        command = superlink_command(place)
    else:
        command = supernode_command(place)
    log = place.logs / f"{place.process}.log"
    # Recorded now: `exec` keeps the process, its id and the moment it was born.
    write_process_record(place, os.getpid(), log)
    os.chdir(place.folder)
    copy_output_to(log)
    os.execve(command[0], command, environment(place))


def copy_output_to(log: Path) -> None:
    """Copy the output of this process to a log as well, from which `status` reads whether it is connected."""
    rotate_logs(log)
    sys.stdout.flush()
    end, begin = os.pipe()
    # Detached: `tee` ends by itself when the last process that writes has ended.
    subprocess.run(["setsid", "--fork", "tee", "--ignore-interrupts", str(log)], stdin=end, check=True)
    os.close(end)
    for said in (1, 2):
        os.dup2(begin, said)
    os.close(begin)


def running(folder: Path) -> Process | None:
    """The process of this folder, if it runs."""
    try:
        facts = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        what = str(facts["what"])
        pid = int(facts["pid"])
        born = str(facts["born"])
        process = Process(what, folder.resolve(), pid, born, Path(facts["log"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if process.alive():
        return process
    return None


def stop_all(processes: Iterable[Process]) -> None:
    """End several at once: all are asked before the first is waited for."""
    every = list(processes)
    for process in every:
        process.signal(signal.SIGTERM)
    for process in every:
        process.stop()


def stop(folder: Path) -> bool:
    """Stop what runs in this folder, and what a killed process left behind; whether there was anything."""
    process = running(folder)
    left = processes_of(folder)
    if process is not None:
        process.stop()
    end_leftovers(folder)
    (folder / RECORD).unlink(missing_ok=True)
    return process is not None or bool(left)


def is_connected(process: Process) -> bool:
    """Whether a SuperNode has been let in by its SuperLink, and its log says of no loss since."""
    text = process.text()
    return max(map(text.rfind, FOUND)) > text.rfind(LOST)


def why_not_admitted(process: Process) -> str:
    """Why a SuperNode is not let in now, as it last said itself; empty if it says nothing of that kind."""
    return next((line.strip() for line in reversed(process.text().splitlines()) if NOT_ADMITTED in line), "")


def certificate_problem(server: Server) -> str:
    """Why no site would speak to a server with this certificate, and what helps; empty if it is in its time."""
    ends = read_certificate(server.certificate).not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    remedy = f"renew it with: mutirao site renew {server.folder}"
    if now >= ends:
        return f"{server.certificate} ended {ends:%Y-%m-%d %H:%M} UTC; {remedy}"
    return ""


def port_problem(server: Server) -> str:
    """Why the server's port cannot be used; empty if it can."""
    with socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((server.host, server.port))
        except OSError as error:
            return f"cannot listen on {server.host}:{server.port}: {error.strerror}"
    return ""


def is_answering(server: Server) -> bool:
    """Whether the server's SuperLink answers over TLS, on this machine."""
    try:
        return bool(server_info(server.here, server.ca, seconds=3.0, direct=True))
    except (OSError, ValueError):
        return False


def run_flwr(server: Server, *words: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Flower's own command line, speaking to this server's SuperLink."""
    if not has_current_commands(server):
        raise MutiraoError(f"{server.commands} is of another version of mutirao; {restart_command(server)}")
    command = [str(server.commands / "flwr"), *words]
    env = environment(server)
    return subprocess.run(command, env=env, cwd=server.folder, capture_output=True, text=True, timeout=seconds)


def has_current_commands(place: Server | Node) -> bool:
    """Whether `bin` in a folder names modules of this version: `site up` writes it, an upgrade of mutirao does not."""
    if isinstance(place, Server):
        command = place.commands / "flwr"
        target = flwr_command.__name__
    else:
        command = place.folder / "bin" / CLIENTAPP
        target = launcher.__file__
    try:
        return target in command.read_text(encoding="utf-8")
    except OSError:
        return False


def superlink_command(server: Server) -> list[str]:
    """The command line of the server's SuperLink."""
    return [
        *(sys.executable, "-m", "mutirao.deploy.server.superlink"),
        *("--host", server.host, "--port", str(server.port)),
        *("--ssl-ca-certfile", str(server.ca), "--ssl-certfile", str(server.certificate)),
        *("--ssl-keyfile", str(server.key), "--enable-supernode-auth"),
        *("--database", str(server.folder / "state.db"), "--disable-runtime-dependency-installation"),
    ]


def supernode_command(node: Node) -> list[str]:
    """The command line of the site's SuperNode."""
    node_config = {"name": node.client or node.name, "policy": str(node.policy_file)}
    if data := load_policy(node.policy_file).settings.get("data"):
        node_config["data"] = str(data)
    config = node.flower_home / "node.toml"
    write_whole(config, "\n".join(toml_lines(node_config)) + "\n")
    return [
        *(sys.executable, "-m", "mutirao.deploy.site.supernode"),
        *("--superlink", node.superlink, "--root-certificates", str(node.ca)),
        *("--auth-supernode-private-key", str(node.key)),
        *("--host", "127.0.0.1", "--port", str(node.port or free_port())),
        *("--node-config", str(config)),
    ]


def environment(place: Server | Node) -> dict[str, str]:
    """Flower without telemetry, update checks and installations, in a home of its own."""
    first = [str(PYTHON_BIN)]
    if isinstance(place, Node):
        first.insert(0, str(write_clientapp(place.folder / "bin", place.task).parent))
    else:
        first.insert(0, str(place.commands))
    place.flower_home.mkdir(parents=True, exist_ok=True)
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOCAL]))
    plain = {name: value for name, value in os.environ.items() if name not in COLOURS}
    return plain | {
        "FLWR_HOME": str(place.flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        POLLS: os.environ.get(POLLS, "0.2" if isinstance(place, Node) else "0.5"),
        "FORWARDED_ALLOW_IPS": "",  # no client may forge the address of another
        "NO_PROXY": direct,  # its own processes speak over loopback
        "no_proxy": direct,
        "PATH": os.pathsep.join([*first, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        FOLDER_VARIABLE: str(place.folder),
    }


def write_commands(server: Server) -> None:
    """A secret, unless there is one, and Flower's commands with it: `FOLDER/bin/flwr run APP here`."""
    create_secret(server.secret)
    # Read only to fail here, with a clear message, if other users can read it.
    read_secret(server.secret)
    for name in flwr_command.COMMANDS:
        words = [sys.executable, "-P", "-m", "mutirao.deploy.server.flwr_command", str(server.folder), name]
        write_command(server.commands, words, name)
    here = f"address = {toml_string(server.here)}\nroot-certificates = {toml_string(str(server.ca))}\n"
    write_whole(server.flower_home / "config.toml", f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{here}')


def launch(place: Server | Node, command: list[str], env: dict[str, str]) -> Process:
    """Start a process in a session of its own, its words in a log, and write down who it is."""
    need_linux("a server or a site")
    refuse_if_running(place.folder)
    log = place.logs / f"{place.process}.log"
    rotate_logs(log)
    with log.open("wb") as out:
        says: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(command, env=env, cwd=place.folder, start_new_session=True, **says)
    process = write_process_record(place, child.pid, log)
    # Without this, a dead child stays a zombie, and its own children would take it for alive.
    threading.Thread(target=child.wait, name=f"wait-{child.pid}", daemon=True).start()
    return process


def refuse_if_running(folder: Path) -> None:
    """One process a folder."""
    if (there := running(folder)) is not None:
        raise ConfigError(f"the {there.what} of {folder} runs already (process {there.pid})")
    end_leftovers(folder)  # what a killed one left behind


def refuse_if_expired(server: Server) -> None:
    """A server to which no site would speak is not started."""
    if trouble := certificate_problem(server):
        raise MutiraoError(trouble)


def write_process_record(place: Server | Node, pid: int, log: Path) -> Process:
    """Write down which process belongs to the folder."""
    process = Process(place.process, place.folder, pid, start_id(pid), log)
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    facts = {"what": place.process, "pid": pid, "born": process.born, "log": str(log), "since": since}
    write_whole(place.folder / RECORD, json.dumps(facts, indent=2) + "\n")
    return process


def rotate_logs(log: Path, keep: int = KEPT_LOGS) -> None:
    """Make room for a new log: the last ones stay as x.1.log (the latest), x.2.log, ..."""
    log.parent.mkdir(parents=True, exist_ok=True)
    names = [log, *(log.with_suffix(f".{i}.log") for i in range(1, keep + 1))]
    # The oldest first: a log must have moved before the next takes its name.
    for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
        if newer.exists():
            newer.replace(older)


def start_id(pid: int) -> str:
    """When a process was born, in words that no other process of that number will ever have; empty if it is dead."""
    # The name in /proc/PID/stat may hold spaces and brackets. The first field after it is the state, the 20th the start
    # in clock ticks since boot: together with the id of the boot it is unique.
    try:
        rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        if rest[0] in "ZX":
            return ""
        return f"{boot}/{rest[19]}"
    except (OSError, IndexError):
        if sys.platform == "linux":
            return ""
    done = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
    state, _, when = done.stdout.strip().partition(" ")
    if not state or state.startswith("Z"):
        return ""
    return " ".join(when.split())


def processes_of(folder: Path) -> list[tuple[int, str]]:
    """All processes that carry this folder's mark, with their births; on Linux, where the environment can be read."""
    mark = f"{FOLDER_VARIABLE}={folder.resolve()}".encode()
    found: list[tuple[int, str]] = []
    if sys.platform != "linux":
        return found
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        # It may be another user's, or have ended meanwhile.
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and (born := start_id(int(entry.name))):
                found.append((int(entry.name), born))
    return found


def end_leftovers(folder: Path, seconds: float = 3.0) -> None:
    """End what carries this folder's mark: ask, wait, insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, born in processes_of(folder):
            with contextlib.suppress(OSError):
                # The id may have been given to another process since.
                if start_id(pid) == born:
                    os.kill(pid, number)
        if wait_until(lambda: not processes_of(folder), seconds):
            return


def wait_until(happened: Callable[[], bool], seconds: float, pause: float = 0.1) -> bool:
    """Wait until something happens, for at most so long; whether it did."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
