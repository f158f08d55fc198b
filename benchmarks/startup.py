"""What a command costs before its first round, and a study beside its cells: `python -m benchmarks.startup`.

Processor seconds (user and system, of all processes), the median of the repetitions. With `--against PYTHON`, an
interpreter that has another version of the project, the two take turns. Modules are compiled beforehand, as they are
once installed. Linux only.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import machine
from benchmarks.processes import ADOPT_ORPHANS

PHASES = Path(__file__).with_name("phases.py")
COMMANDS = {"mutirao --help": ["--help"], "mutirao run --help": ["run", "--help"], "mutirao list": ["list"]}
STUDY = """
recipe = "quickstart"
seeds = 4
[settings]
rounds = 5
[methods.fedavg]
[methods.slow]
lr = 0.001
[methods.adam]
aggregate = { name = "fedadam", lr = 0.05 }
"""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--against", metavar="PYTHON", help="another interpreter, to take turns with")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="of the study [default: one a core]")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)  # so that the time of all their processes is counted
    pythons = [*([args.against] if args.against else []), sys.executable]
    found: list[dict[str, list[float]]] = [{} for _ in pythons]
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(args.repetitions + 1):
            for place, python in enumerate(pythons):
                for name, seconds in measure(python, Path(scratch) / f"{turn}-{place}", args.workers):
                    if turn:  # the first compiles
                        found[place].setdefault(name, []).append(seconds)
                        print(f"{turn} {place} {name}: {seconds:.3f}", file=sys.stderr, flush=True)
    print("\n".join(table(found)) + "\n")
    told = machine.describe()
    print(", ".join(f"{key} {value}" for key, value in told.items()) + f"; repetitions {args.repetitions}")


def measure(python: str, folder: Path, workers: int) -> Iterator[tuple[str, float]]:
    """Each phase and command with its seconds."""
    folder.mkdir()
    for name, words in COMMANDS.items():
        yield name, spend([python, "-m", "mutirao.cli", *words], folder)[0]
    said = spend([python, "-P", str(PHASES), "run"], folder)[1]
    yield from json.loads(said.splitlines()[-1]).items()
    (folder / "study.toml").write_text(STUDY)
    words = ["study", "study.toml", "--out", "study", "--json", "--workers", str(workers)]
    yield "a study of 12 cells", spend([python, "-m", "mutirao.cli", *words], folder)[0]


def spend(command: list[str], folder: Path) -> tuple[float, str]:
    """The processor seconds of a command with all that it started, and what it printed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = taken()
    cache = {"PYTHONPYCACHEPREFIX": str(folder.parent / "compiled")}
    done = subprocess.run(command, cwd=folder, env=env | cache, stdout=subprocess.PIPE, text=True, check=True)
    while True:  # orphans, which are ours now
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return taken() - before, done.stdout


def taken() -> float:
    """Processor seconds of all ended children and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(found: list[dict[str, list[float]]]) -> Iterator[str]:
    """Medians, a row a phase; with two versions, the ratio, too."""
    heads = ["seconds of processor", *(["before", "after", "after : before"] if len(found) > 1 else ["median"])]
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    for name in found[0]:
        medians = [statistics.median(of[name]) for of in found]
        ratio = [f"{medians[-1] / medians[0]:.2f}" if medians[0] >= 0.05 else ""] if len(found) > 1 else []
        yield f"| {' | '.join([name, *(f'{m:.2f}' for m in medians), *ratio])} |"


if __name__ == "__main__":
    main()
