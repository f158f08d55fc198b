"""Run the tests that touch Flower against the newest flwr that installs, in an environment of its own.

    python scripts/nightly.py                     the newest python scripts/nightly.py --flwr 1.42.0       that one
    python scripts/nightly.py tests/deploy/server/test_access_control.py -m "not slow"    only these, with any options
    of pytest

The environment lies over the one this runs in: all but Flower is shared. It is made anew each time, and nothing of the
one below is touched. The last line says which version passed or failed; so does the exit code.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [
    "tests/deploy",
    "tests/flower",
    "tests/flower/test_aggregation_flower.py",
    "tests/systems/cytology/test_cytology_sites.py",
    "tests/systems/tabular/test_tabular_sites.py",
]
UNMET = """
import json, sys
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
wanted = map(Requirement, requires("flwr") or [])
def met(r):
    try:
        return r.specifier.contains(version(r.name), prereleases=True)
    except PackageNotFoundError:
        return False
needed = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": "simulation"})]
print(json.dumps([version("flwr"), [f"{r.name}{r.specifier}" for r in needed if not met(r)]]))
"""


def main() -> int:
    """Make the environment, install, test, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flwr", default="", metavar="VERSION", help="this version instead of the newest")
    parser.add_argument("--pre", action="store_true", help="take releases that are not final, too")
    args, given = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="mutirao-nightly-") as folder:
        python = overlay(Path(folder))
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        newest = [f"flwr=={args.flwr}" if args.flwr else "flwr", *(["--pre"] if args.pre else [])]
        run([*pip, "--ignore-installed", "--no-deps", *newest])
        lacking = unmet(python)[1]
        for requirement in lacking:  # one by one: what cannot be had must not keep the others away
            run([*pip, "--no-deps", requirement], check=False)
        version, lacking = unmet(python)
        without = f" without {', '.join(lacking)}, which cannot be installed here" if lacking else ""
        print(f"flwr {version}{without}", flush=True)
        environment = os.environ | {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
        tests = [python, "-m", "pytest", "-p", "no:cacheprovider", *(given or TESTS)]
        passed = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode == 0
        print(f"flwr {version}: {'passed' if passed else 'FAILED'}{without}")
        return 0 if passed else 1


def overlay(folder: Path) -> str:
    """The Python of a new environment in which all of this one can be imported, after what is its own."""
    venv.create(folder, with_pip=True)
    own = next(folder.glob("lib/python*/site-packages"))
    below = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in below]
    (own / "below.pth").write_text("\n".join([*lines, ""]))
    python, command = folder / "bin" / "python", folder / "bin" / "mutirao"
    command.write_text(f"#!{python}\nfrom mutirao.cli import main\n\nmain()\n")
    command.chmod(0o755)
    return str(python)


def unmet(python: str) -> tuple[str, list[str]]:
    """Which Flower an environment has, and what that Flower asks for and does not find."""
    told = subprocess.run([python, "-c", UNMET], capture_output=True, text=True, check=True).stdout
    version, lacking = json.loads(told)
    return version, lacking


def run(words: list[str], check: bool = True) -> None:
    """Run a command; what it says is shown only where the whole job ends with it."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"error: {' '.join(words[1:])}\n{done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
