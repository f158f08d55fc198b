"""Compare what small runs give now with what they gave when the golden files were written; 1 if anything differs.

`python -m tests.golden` compares all cases, `python -m tests.golden scaffold study` some, and with `--write` the files
are written anew: a commit that does so says why the outputs changed.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden import observe  # first: it must look on from the beginning
from tests.golden.cases import CASES, QUICK
from tests.golden.comparing import FILES, compare, machine, store
from tests.golden.make import make


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="some cases (quick: a few of them; default: all)")
    parser.add_argument("--write", action="store_true", help="write the golden files anew")
    parser.add_argument("--list", action="store_true", help="name the cases")
    args = parser.parse_args()
    if args.list:
        print(*CASES, sep="\n")
        return 0
    asked = args.names or list(CASES)
    names = [name for word in asked for name in (QUICK if word == "quick" else [word])]
    if unknown := set(names) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    FILES.mkdir(exist_ok=True)
    wrong = []
    for name in names:
        found = outputs(name)
        lines = store(f"{name}.json", found) if args.write else compare(f"{name}.json", found)
        print(
            f"{name}: {found.get('error') or ('written' if args.write else 'DIFFERS' if lines else 'as it was')}",
            flush=True,
        )
        wrong += lines
    known = observe.known_names()
    wrong += store("names.json", known) if args.write else compare("names.json", known)
    print(*wrong, sep="\n")
    print(f"{len(names)} cases, {len(wrong)} differences")
    return bool(wrong)


def outputs(name: str) -> dict[str, Any]:
    """What one case gives, and the names that were seen while it was made."""
    for kind in observe.seen.values():
        kind.clear()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = make(CASES[name], Path(folder))
        except (Exception, SystemExit) as error:
            found = {"error": f"does not run: {error!r}"}
    found["names"] = {kind: sorted(names) for kind, names in sorted(observe.seen.items())}
    found["machine"] = machine()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:  # neither the user's settings nor the user's cache
        os.environ["XDG_CONFIG_HOME"] = f"{own}/config"
        os.environ["MUTIRAO_CACHE"] = f"{own}/cache"
        sys.exit(main())
