"""One script a contender: `python -m benchmarks.contenders.NAME --data FOLDER` does the whole job and prints JSON."""

import argparse
from pathlib import Path


def options() -> argparse.Namespace:
    """The options every contender is started with; each uses those that concern it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="folder that benchmarks.jobs.write filled")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for temporary files")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2, help="processes of those that use several")
    parser.add_argument("--engine", default="auto", help="how this project advances the clients of a round")
    parser.add_argument("--record", action="store_true", help="this project writes its run folder")
    return parser.parse_args()
