"""Where the time of a job's rounds goes, as a picture: `python -m benchmarks.profile --job M --out profile.svg`.

py-spy looks at this project's contender two hundred times a second and notes what each busy thread is doing.
"""

import argparse
import collections
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import jobs
from benchmarks.measure import data_of

RATE = 200
# What a stack is about: the innermost frame that one of these names decides.
STAGES = {
    "fused.py": "descent of the clients (kernel)",
    "stacked.py": "descent of the clients (stack)",
    "machine.py": "descent of the clients (stack)",
    "threads.py": "descent of the clients (threads)",
    "training.py:order": "shuffling of their samples",
    "randomness.py": "seeds",
    "filters.py": "checks of the replies",
    "arrays.py:is_finite": "checks of the replies",
    "aggregation.py": "average",
    "arrays.py": "average",
    "jobs.py": "preparation of the jobs",
    "samples.py": "preparation of the jobs",
    "workers.py": "handing work to threads",
    "engine/__init__.py": "preparation of the jobs",
    "local.py": "fleet",
    "selection.py": "selection",
    "roster.py": "roster",
    "rounds.py": "the round itself",
}
IDLE = ("thread.py:81", "threading.py:32", "_worker (concurrent")  # waiting for work, or for the last client


def main() -> None:
    """Profile a job and draw it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--job", choices=[*jobs.JOBS], default="M")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--out", type=Path, default=Path("profile.svg"))
    args = parser.parse_args()
    with data_of(replace(jobs.JOBS[args.job], rounds=args.rounds)) as data, tempfile.TemporaryDirectory() as scratch:
        stacks = Path(scratch) / "stacks.txt"
        ours = ["-m", "benchmarks.contenders.ours", "--data", str(data), "--scratch", scratch]
        record = ["py-spy", "record", "--format", "raw", "--rate", str(RATE), "--output", str(stacks), "--"]
        command = [*record, sys.executable, *ours, "--rounds", str(args.rounds), "--engine", args.engine]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seen = shares(stacks.read_text())
    for stage, share in seen:
        print(f"{share:6.1%}  {stage}")
    draw(seen, args.job, args.out)


def shares(text: str) -> list[tuple[str, float]]:
    """The share of each stage in the time that threads were busy in rounds, largest first."""
    counts: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        stack, number = line.rsplit(" ", 1)
        if ("rounds.py" in stack or "_worker" in stack) and (stage := stage_of(stack.split(";"))):
            counts[stage] += int(number)
    return [(stage, count / counts.total()) for stage, count in counts.most_common()]


def stage_of(frames: list[str]) -> str | None:
    """What a thread is about; None if it waits."""
    if any(mark in frames[-1] for mark in IDLE):
        return None
    for frame in reversed(frames):
        function, _, place = frame.partition(" (")
        for key, stage in STAGES.items():
            file, _, name = key.partition(":")
            if f"{file}:" in place and f"/{file}" in f"/{place}" and "mutirao/" in place and name in function:
                return stage
    return "the round itself"


def draw(seen: list[tuple[str, float]], job: str, path: Path) -> None:
    """A bar a stage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.5 + 0.32 * len(seen)), layout="constrained")
    axes = figure.subplots()
    names, values = zip(*reversed(seen), strict=True)
    axes.barh(names, [100 * v for v in values], color="#4477AA")
    for i, value in enumerate(values):
        axes.annotate(f" {value:.1%}", (100 * value, i), va="center", fontsize=9)
    axes.set_xlabel("share of the busy time of all threads, %")
    axes.set_title(f"Where the rounds of Job {job} spend their time", loc="left", fontsize=11)
    axes.set_xlim(0, 112 * max(values))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
