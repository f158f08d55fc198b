"""A deployed run on this machine, real SuperLink and SuperNodes over TLS: where the seconds of a round go, and memory.

`python -m benchmarks.deployed --sites 3 --rounds 10` prints one JSON object. The parts of a round come from the audit
trails of both sides: `until_asked` from the last round's end until the last site's policy sees the request,
`at_site` until the last site lets its reply go, `until_recorded` until the server has written the round down.
`--hidden 350000` makes a model of 105 MB. `--simulated` lets Flower's own engine be the sites instead: one node a site
in worker processes of Ray, over the same messages, for more sites than a machine has room for. Linux only.
"""

import argparse
import contextlib
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from mutirao.config import resolve
from mutirao.core.fleet import Scalar
from mutirao.deploy.layout import FOLDER_VARIABLE, free_port
from mutirao.deploy.policy.policy_templates import set_numbers
from mutirao.deploy.processes import (
    Process,
    is_connected,
    processes_of,
    start_superlink,
    start_supernode,
    stop_all,
    wait_until,
)
from mutirao.deploy.provisioning import create_server, store_key
from mutirao.deploy.rehearsal import client_names, create_sites
from mutirao.deploy.server.control_calls import admit
from mutirao.deploy.server.submission import follow, submit
from mutirao.deploy.server.supervisor import command_line
from mutirao.errors import MutiraoError
from mutirao.experiments.task import find
from mutirao.io import write_whole
from mutirao.runs.csv_tables import CsvTable

RECIPE = "quickstart"
LARGEST = 2**30  # bytes that may leave a site at once
KINDS = {  # by what stands in their command lines, the processes of a server and of a site
    "superlink": "mutirao.deploy.server.superlink",
    "serverapp": "flwr-serverapp",
    "superexec": "flower-superexec",
    "supernode": "mutirao.deploy.site.supernode",
    "worker": "mutirao.deploy.site.worker",
    "client": "mutirao.deploy.site.clientapp",  # the herald, and what it forks for each message
}
TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Looks at the processes of all parties, again and again: what each kind took at most, and all of them at once."""

    def __init__(self, folders: Sequence[Path], pause: float) -> None:
        self.folders, self.pause, self.over = list(folders), pause, threading.Event()
        self.peak: dict[str, float] = {}  # MB of the largest process of a kind
        self.together = 0.0  # MB of all, shared pages counted once
        self.seconds: dict[tuple[int, str], float] = {}  # of processor, by process
        self.kinds: dict[tuple[int, str], str] = {}
        self.spent: list[tuple[float, dict[str, float]]] = []  # moments, and what each kind had used by then
        self.thread = threading.Thread(target=self.go, daemon=True)

    def __enter__(self) -> "Watch":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def go(self) -> None:
        while not self.over.wait(self.pause):
            self.look()

    def look(self) -> None:
        """Write down what there is now."""
        together = 0.0
        for pid, born in [one for folder in self.folders for one in processes_of(folder)]:
            with contextlib.suppress(OSError, IndexError):  # it ended while we looked
                command, place = command_line(pid), Path(f"/proc/{pid}")
                kind = next((k for k, mark in KINDS.items() if mark in command), "other")
                status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
                self.peak[kind] = max(self.peak.get(kind, 0.0), int(status.get("VmHWM", "0 kB").split()[0]) / 1024)
                shares = (place / "smaps_rollup").read_text().splitlines()
                together += next(int(line.split()[1]) for line in shares if line.startswith("Pss:")) / 1024
                times = (place / "stat").read_text().rpartition(")")[2].split()[11:13]
                self.seconds[pid, born], self.kinds[pid, born] = sum(map(int, times)) / TICKS, kind
        self.together = max(self.together, together)
        used: dict[str, float] = {}
        for one, kind in self.kinds.items():
            used[kind] = used.get(kind, 0.0) + self.seconds[one]
        self.spent.append((time.time(), used))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """The seconds of processor that each kind used between two moments."""
        inside = [used for moment, used in self.spent if begin <= moment <= end]
        return {kind: used - inside[0].get(kind, 0.0) for kind, used in inside[-1].items()} if inside else {}


def measure(folder: Path, sites: int, rounds: int, sets: Sequence[tuple[str, Scalar]], pause: float) -> dict[str, Any]:
    """Found a federation in a folder, let it make its rounds, and tell what was seen."""
    settings = [("clients", sites), ("per_round", sites), ("min_replies", sites), ("rounds", rounds), *sets]
    began, running, out = time.time(), list[Process](), folder / "run"
    server = create_server(folder / "server", ["localhost"], port=free_port(), host="127.0.0.1")
    nodes = create_sites(folder, server, client_names(RECIPE, settings), RECIPE, settings)
    for node in nodes:
        text = node.policy_file.read_text(encoding="utf-8")
        write_whole(node.policy_file, set_numbers(text, largest=LARGEST))
    with Watch([server.folder, *(node.folder for node in nodes)], pause) as watch:
        try:
            running.append(start_superlink(server.folder))
            for node in nodes:
                admit(server.folder, store_key(server.folder, node.public_key))
                running.append(start_supernode(node.folder))
            if not wait_until(lambda: all(map(is_connected, running[1:])), 60 + 10 * sites):
                raise MutiraoError("not all sites were let in")
            connected = time.time()
            number = submit(server.folder, RECIPE, settings, out=out, timeout=600.0)
            follow(server.folder, number, out, connected, 3600, lambda line: None)
            watch.look()
        finally:
            ended = time.time()
            stop_all(reversed(running))
            stopped = time.time()
    parts = parts_of(out / "audit.jsonl", [node.folder / "audit.jsonl" for node in nodes])
    ends = [moment(e) for e in events(out / "audit.jsonl") if e["event"] == "round"]
    used = watch.between(ends[0], ends[-1])
    first, rest = parts[0], parts[1:] or parts
    return {
        "sites": sites,
        "rounds": rounds,
        **{name: round(median(part[name] for part in rest), 3) for name in first},
        "round_s_all": [round(part["round_s"], 2) for part in parts],
        "until_connected_s": round(connected - began, 1),
        "run_s": round(ended - connected, 1),
        "stop_s": round(stopped - ended, 1),
        "processor_s_a_round": {kind: round(s / max(1, rounds - 1), 2) for kind, s in sorted(used.items())},
        "peak_mb": {kind: round(mb) for kind, mb in sorted(watch.peak.items())},
        "together_mb": round(watch.together),
        "digest": json.loads((out / "summary.json").read_text())["digest"],
    }


def simulate_sites(folder: Path, sites: int, rounds: int, sets: Sequence[tuple[str, Scalar]]) -> dict[str, Any]:
    """The same run with Flower's simulation engine, and what was seen."""
    from mutirao.deploy.flower.ray_simulation import simulate

    settings = [("clients", sites), ("per_round", sites), ("min_replies", sites), ("rounds", rounds), *sets]
    os.environ[FOLDER_VARIABLE] = str(folder.resolve())  # so that all that is started can be found
    began = time.time()
    with Watch([folder], 0.5) as watch:
        simulate(RECIPE, resolve(find(RECIPE).config, {}, settings), folder / "run")
    ended, own = time.time(), resource.getrusage(resource.RUSAGE_SELF)
    seconds = [float(row["seconds"]) for row in CsvTable(folder / "run" / "history.csv").read()]
    return {
        "sites": sites,
        "rounds": rounds,
        "round_s": round(median(seconds[1:] or seconds), 3),
        "round_s_all": [round(s, 2) for s in seconds],
        "run_s": round(ended - began, 1),
        "server_peak_mb": round(own.ru_maxrss / 1024),
        "others_together_mb": round(watch.together),
        "digest": json.loads((folder / "run" / "summary.json").read_text())["digest"],
    }


def parts_of(trail: Path, trails: Sequence[Path]) -> list[dict[str, float]]:
    """The seconds of each round and of its parts; all clocks are this machine's."""
    ends = {e["round"]: moment(e) for e in events(trail) if e["event"] == "round"}
    at_sites = [e for path in trails for e in events(path) if e.get("do") == "train"]
    parts = []
    for number in sorted(ends):
        asked = max(moment(e) for e in at_sites if e["event"] == "asked" and e["round"] == number)
        sent = max(moment(e) for e in at_sites if e["event"] == "sent" and e["round"] == number)
        before = ends.get(number - 1, asked)  # what comes before the first round is none of it
        parts.append(
            {
                "round_s": ends[number] - before,
                "until_asked_s": asked - before,
                "at_site_s": sent - asked,
                "until_recorded_s": ends[number] - sent,
            }
        )
    return parts


def events(trail: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trail.read_text().splitlines()]


def moment(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=16, help="width of the network; 350000 makes 105 MB")
    parser.add_argument("--look", type=float, default=0.5, help="seconds between two looks at the processes")
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    sets: list[tuple[str, Scalar]] = [("hidden", args.hidden), ("epochs", 1), ("wait", 240.0)]
    with tempfile.TemporaryDirectory(prefix="mutirao-bench-") as place:
        if args.simulated:
            seen = simulate_sites(Path(place), args.sites, args.rounds, sets)
        else:
            seen = measure(Path(place), args.sites, args.rounds, sets, args.look)
    print(json.dumps(seen, indent=2))


if __name__ == "__main__":
    main()
