"""The whole federation on one machine: real processes, TLS, keys and policies, a few rounds, and what was proven."""

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutirao.config import resolve
from mutirao.core.fleet import Scalar
from mutirao.deploy.keys import create_authority
from mutirao.deploy.layout import Node, Server, free_port
from mutirao.deploy.policy.policy_templates import fill_list, set_numbers
from mutirao.deploy.policy.rules import may_name_code
from mutirao.deploy.processes import (
    Process,
    is_connected,
    processes_of,
    start_superlink,
    start_supernode,
    stop_all,
    wait_until,
    why_not_admitted,
)
from mutirao.deploy.provisioning import compose_text, create_server, create_site, store_key
from mutirao.deploy.server.control_calls import admit, server_info
from mutirao.deploy.server.submission import absolute_paths, follow, submit
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import find
from mutirao.io import write_whole
from mutirao.runs.execute import execute
from mutirao.runs.verify import verify_all
from mutirao.simulation.local_fleet import LocalFleet

Say = Callable[[str], None]
RUN_TIMEOUT = 600.0  # seconds for the rounds


class Rehearsal:
    """What was done, how long it took, and what was found; `report()` is all of it."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.steps: list[tuple[str, float]] = []
        self.findings: dict[str, bool] = {}
        self.begun = time.time()

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Time a step and say it when it is done."""
        began = time.time()
        yield
        self.steps.append((text, round(time.time() - began, 2)))
        self.say(f"{time.time() - self.begun:6.1f} s  {text}")

    def note(self, text: str, holds: bool) -> None:
        """Something that must hold."""
        self.findings[text] = holds
        verdict = "ok"
        if not holds:
            verdict = "FAIL"
        self.say(f"{verdict:>8}  {text}")

    def report(self, **more: Any) -> dict[str, Any]:
        """All of it, for machines."""
        took = [{"step": text, "seconds": seconds} for text, seconds in self.steps]
        whole = round(time.time() - self.begun, 1)
        return {"ok": all(self.findings.values()), "seconds": whole, "steps": took, "findings": self.findings, **more}


def rehearse(
    folder: Path,
    sites: int = 3,
    rounds: int = 3,
    recipe: str = "quickstart",
    sets: Sequence[tuple[str, Scalar]] = (),
    say: Say = print,
) -> dict[str, Any]:
    """Create a server and sites in `folder`, connect them, train, compare with the same run in process, end all.

    The report is returned and written to `rehearsal.json`; `ok` in it says whether all that must hold does.
    """
    if (folder / "server").exists():
        raise ConfigError(f"{folder} holds a rehearsal already; choose another folder")
    made = Rehearsal(say)
    running: list[Process] = []
    settings = [("rounds", rounds), ("clients", sites), ("per_round", sites), *absolute_paths(sets)]
    out = (folder / "run").resolve()
    try:
        with made.step(f"a server and {sites} sites: authority, certificate, keys, policies; the SuperLink is up"):
            server = create_server(folder / "server", ["localhost"], port=free_port(), host="127.0.0.1")
            # The SuperLink starts while this process imports torch for the recipe.
            with ThreadPoolExecutor(1) as pool:
                starting = pool.submit(lambda: running.append(start_superlink(server.folder)))
                nodes = create_sites(folder, server, client_names(recipe, settings), recipe, settings)
                starting.result()
        with made.step("the sites' keys are admitted"):
            for node in nodes:
                admit(server.folder, store_key(server.folder, node.public_key))
        with made.step("the SuperNodes are connected"):
            begun = [start_supernode(node.folder) for node in nodes]
            running += begun
            wait_until(lambda: all(is_connected(process) or not process.alive() for process in begun), 90)
            for process in begun:
                if not is_connected(process):
                    raise MutiraoError(f"the SuperNode of {process.folder.name} did not connect: {process.reason()}")
        since = time.time()
        with made.step("the run is submitted"):
            number = submit(server.folder, recipe, settings, out=out, timeout=120.0)
        with made.step("strangers have tried"):
            try_strangers(made, server, folder)
        with made.step(f"{rounds} rounds over TLS"):
            follow(server.folder, number, out, since, RUN_TIMEOUT, lambda line: say(f"          {line}"))
    finally:
        stop_all(reversed(running))
    with made.step("the same run in process"):
        there = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        here = execute(
            recipe, resolve(find(recipe).config, {}, settings), folder / "alone", fleet=local_fleet(recipe, settings)
        )
        made.note("the model is the same, bit for bit", there["digest"] == here["digest"])
    problems = verify_all(out, [node.folder / "audit.jsonl" for node in nodes])[1]
    made.note("both sides' audit trails agree", not problems)
    left = [pid for place in (server, *nodes) for pid, _ in processes_of(place.folder)]
    made.note("no process is left over", not left)
    made.note("the port is free again", not is_listening(server))
    report = made.report(recipe=recipe, sites=[n.name for n in nodes], final=there["final"], digest=there["digest"])
    write_whole(folder / "rehearsal.json", json.dumps(report, indent=2) + "\n")
    return report


def local_fleet(recipe: str, settings: Sequence[tuple[str, Scalar]]) -> LocalFleet:
    """The recipe's clients in process, each asked by itself as at its site: none is trained together with others."""
    found = find(recipe)
    task = found.prepare(resolve(found.config, {}, settings))
    handler = task.worker
    return LocalFleet(lambda request, site: handler(request, site), task.population)


def client_names(recipe: str, settings: Sequence[tuple[str, Scalar]]) -> list[str]:
    """The clients of the recipe's task: each becomes a site of that name."""
    found = find(recipe)
    return sorted(found.prepare(resolve(found.config, {}, settings)).population)


def create_sites(
    folder: Path,
    server: Server,
    names: Sequence[str],
    recipe: str,
    sets: Sequence[tuple[str, Scalar]],
    host: str = "localhost",
) -> list[Node]:
    """A site for each name, with a policy that lets this recipe train with these settings; a compose file for all."""
    nodes = []
    for name in names:
        node = create_site(folder / name, name, f"{host}:{server.port}", server.ca, recipes=[recipe], sets=sets)
        write_whole(node.policy_file, permit_training(node.policy_file.read_text(encoding="utf-8"), sets))
        nodes.append(node)
    write_whole(folder / "compose.yaml", compose_text([server, *nodes]))
    return nodes


def permit_training(policy: str, sets: Sequence[tuple[str, Scalar]] = ()) -> str:
    """A policy for a rehearsal, where nothing is to be protected: few samples will do, figures are exact.

    Paths among the settings are those of this machine, which is every site's.
    """
    paths = [str(value) for _, value in sets if isinstance(value, str) and may_name_code(value)]
    return set_numbers(
        fill_list(policy, "names", paths, {}, "of this machine"), min_samples=1, decimals=17, samples_step=1
    )


def try_strangers(made: Rehearsal, server: Server, folder: Path) -> None:
    """What must be refused: a key that was not admitted, a server of another authority, plain HTTP."""
    other = create_site(folder / "stranger", "stranger", f"localhost:{server.port}", server.ca)
    stranger = start_supernode(other.folder)
    wait_until(lambda: bool(why_not_admitted(stranger)) or is_connected(stranger), 60)
    made.note("a key that was not admitted is refused", bool(why_not_admitted(stranger)) and not is_connected(stranger))
    stranger.stop()
    create_authority(folder / "stranger" / "other.crt", folder / "stranger" / "other.key", "stranger")
    made.note("a server of another authority is refused", not trusts(server, folder / "stranger" / "other.crt"))
    made.note("plain HTTP is refused", not answers_plain_http(server))


def trusts(server: Server, ca: Path) -> bool:
    """Whether one who trusts this authority takes the server for what it says it is."""
    try:
        server_info(server.here, ca, direct=True)
    except (OSError, ValueError) as error:
        # urllib wraps the error of a connection; a wrong authority must not be confused with a server that is away.
        if not isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
            raise MutiraoError(f"the SuperLink does not answer: {error}") from error
        return False
    return True


def answers_plain_http(server: Server) -> bool:
    """Whether the server answers a request that is not encrypted."""
    host, _, port = server.here.rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=10)) as line:
        try:
            line.request("GET", "/health")
            line.getresponse()
        except (OSError, http.client.HTTPException):
            return False
    return True


def is_listening(server: Server) -> bool:
    """Whether a process listens on the server's port."""
    host, _, port = server.here.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.settimeout(2)
        return s.connect_ex((host.strip("[]"), int(port))) == 0
