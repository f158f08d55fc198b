"""What secure aggregation costs: `python -m benchmarks.secure` prints bytes and seconds a round, with and without it.

The quickstart's clients, one round of everybody: 3, 10 and 100 clients, with the quickstart's model and a larger one.
`--fleet flower` measures over Flower's simulation engine instead of in process.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.tables import seconds
from mutirao.config import resolve
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Run
from mutirao.experiments.task import Task, find
from mutirao.simulation.local_fleet import LocalFleet

KINDS = {
    "plain": {},
    "secagg+": {"secure": "secagg+"},
    "secagg+, 16 bits": {"secure": "secagg+", "secure.bits": 16, "secure.most_samples": 500},
}
WIDTHS = (64, 1400)
SIZES = (3, 10, 100)


@contextlib.contextmanager
def fleet_of(name: str, config: object, task: Task) -> Iterator[Fleet]:
    """The fleet of that name, ended afterwards."""
    if name == "local":
        yield LocalFleet(task.secure.at_client(task.handler), task.population)
        return
    from mutirao.deploy.flower.ray_simulation import Simulation

    with contextlib.closing(Simulation("quickstart", config)) as fleet:
        yield fleet


def measure(fleet_name: str, clients: int, width: int, kind: str, rounds: int) -> tuple[int, float, float, float]:
    """Numbers in the model, and bytes down, bytes up and seconds of a round: the median, without the first.

    In process it is the time of the processor that counts, so that other work on the machine does not."""
    settings = {"clients": clients, "per_round": clients, "hidden": width, "rounds": rounds + 1, "epochs": 1}
    settings |= {"partition": "iid"} | KINDS[kind]  # every client has samples, however many there are
    config = resolve(find("quickstart").config, {}, list(settings.items()))
    task = find("quickstart").prepare(config)
    run = Run(task.initial(), seed=0)
    with fleet_of(fleet_name, config, task) as fleet:
        rows, clock = [], time.process_time if fleet_name == "local" else time.perf_counter
        began = clock()
        for done in find("quickstart").flow(fleet, config, task, run):
            rows.append(done.row | {"taken": clock() - began})
            began = clock()
    rows = rows[1:]
    assert all(row["replied"] == clients for row in rows)
    size = sum(v.size for v in run.arrays.values())
    down, up, taken = (float(np.median([row[k] for row in rows])) for k in ("bytes_down", "bytes_up", "taken"))
    return size, down, up, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", choices=["local", "flower"], default="local")
    parser.add_argument("--clients", type=int, action="append", help="may be repeated (default: 3, 10, 100)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    print("| model | clients | | down a client | up a client | a round |\n|---:|---:|---|---:|---:|---:|")
    for width in WIDTHS:
        for clients in args.clients or SIZES:
            for kind in KINDS:
                size, down, up, taken = measure(args.fleet, clients, width, kind, args.rounds)
                each = " | ".join(f"{part / clients / 1000:.1f} kB" for part in (down, up))
                print(f"| {size:,} | {clients} | {kind} | {each} | {seconds(taken)} |", flush=True)


if __name__ == "__main__":
    main()
