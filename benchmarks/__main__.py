"""The command line: `python -m benchmarks --job M --job C`."""

import argparse
import json
import signal
import sys
from dataclasses import replace
from types import FrameType

from benchmarks import environments, machine, measure, tables
from benchmarks.jobs import JOBS, Job


def main() -> None:
    """Run the jobs asked for and print what was measured."""
    arguments = sys.argv[1:]
    args = parsed(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    settings = measure.Settings(args.only, args.workers, args.pfl_workers or args.workers, args.engine, args.record)
    document = environments.ROOT / "docs" / "benchmarks.md"
    failed = False
    for name in args.job or JOBS:
        ours = replace(settings, contenders=("ours",)) if JOBS[name].method != "fedavg" else settings
        result = measure.benchmark(changed(JOBS[name], args), ours)
        failed |= any("error" in result[contender] for contender in ours.contenders)
        print(json.dumps(result) if args.json else tables.page(result, arguments) + "\n", flush=True)
        if args.write_docs:
            tables.write_into(document, name, tables.page(result, [a for a in arguments if a != "--write-docs"]))
    sys.exit(1 if failed else 0)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="The same federated jobs with this project, Flower, pfl-research, BlazeFL and a plain loop.",
        epilog="Example: python -m benchmarks --job M --repetitions 3 --json",
    )
    parser.add_argument("--job", action="append", choices=[*JOBS], help="may be repeated; all if not given")
    parser.add_argument("--rounds", type=positive, help="rounds of a job, if not its own number")
    parser.add_argument("--repetitions", type=positive, help="how often each runs (default 5 for M, 3 for the others)")
    parser.add_argument("--samples", type=positive, help="samples a client; fewer only to try the harness out")
    parser.add_argument(
        "--only", type=contenders, default=tuple(measure.MODULES), help="some of ours,flower,pfl,blaze,plain"
    )
    parser.add_argument("--workers", type=positive, default=machine.cores(), help="processes of the peers")
    parser.add_argument("--pfl-workers", type=positive, help="processes of pfl, if not as many as Flower's")
    parser.add_argument(
        "--engine",
        choices=["auto", "fused", "stacked", "threads", "processes", "plain"],
        default="auto",
        help="of ours",
    )
    parser.add_argument("--record", action="store_true", help="ours writes its run folder during the rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object a job, a line each")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/benchmarks.md")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def contenders(text: str) -> tuple[str, ...]:
    """Names of contenders, separated by commas."""
    names = tuple(text.split(","))
    for name in names:
        if name not in measure.MODULES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(measure.MODULES)}")
    return tuple(name for name in measure.MODULES if name in names)


def changed(job: Job, args: argparse.Namespace) -> Job:
    """A job with what the options change of it."""
    return replace(job, **{k: v for k in ("rounds", "repetitions", "samples") if (v := getattr(args, k))})


def leave(number: int, frame: FrameType | None) -> None:
    """Leave in order, so that nothing is left running."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
