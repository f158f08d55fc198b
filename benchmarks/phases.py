"""One run of quickstart with its processor time by phase, as a line of JSON: what `benchmarks.startup` starts.

It is a file of its own, with no other import of ours, so that any interpreter with any version of the project runs it.
"""

import builtins
import json
import sys
import time
from typing import Any

BEGAN = time.process_time()  # of a fresh process: what Python itself took
PACKAGES = {"numpy": "numpy", "torch": "torch", "sklearn": "scikit-learn, scipy, pandas", "matplotlib": "matplotlib"}
IMPORT = builtins.__import__

spent = dict.fromkeys(PACKAGES.values(), 0.0)
marks: dict[str, float] = {}  # without the time of packages
inside: list[str] = []


def watched(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """An import, whose time counts for the outermost of the packages."""
    package = name.partition(".")[0]
    if level or inside or package not in PACKAGES:
        return IMPORT(name, globals, locals, fromlist, level)
    inside.append(package)
    before = time.process_time()
    try:
        return IMPORT(name, globals, locals, fromlist, level)
    finally:
        inside.pop()
        spent[PACKAGES[package]] += time.process_time() - before


def mark(place: str) -> None:
    """Note the time, and that without packages; the first time counts."""
    now = time.process_time()
    marks.setdefault(place, now - sum(spent.values()))
    marks.setdefault(f"{place}, all", now)


def marked(function: Any, place: str) -> Any:
    """A function that notes when it is done."""

    def call(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        mark(place)
        return found

    return call


def main() -> None:
    """Run the command line here."""
    builtins.__import__ = watched
    from mutirao.cli import main as command
    from mutirao.runs.run_folder import Folder  # the command imports it in any case

    Folder.begin = marked(Folder.begin, "ready")  # type: ignore[method-assign]
    Folder.commit = marked(Folder.commit, "round")  # type: ignore[method-assign]
    command(["run", "quickstart", "--set", "rounds=1", "--out", sys.argv[1], "--json"], standalone_mode=False)
    mark("end")
    found = {
        "Python itself": BEGAN,
        **{f"import of {package}": seconds for package, seconds in spent.items()},
        "our modules, settings, data": marks["ready"] - BEGAN,
        "the first round": marks["round"] - marks["ready"],
        "to the end of the first round": marks["round, all"],
        "pictures, page and summary": marks["end"] - marks["round"],
        "the whole run": marks["end, all"],
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
