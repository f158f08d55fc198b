"""The peers' own environments: each gets a virtual environment below `.bench/`, with the same torch as ours."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / ".bench"
PEERS = {
    "flower": ["flwr[simulation]==1.41.0"],
    "pfl": ["pfl==0.6.0"],
    "blaze": ["blazefl[contrib,reproducibility]==2.0.3"],
}
# It asks for Python 3.12, but its code is free of what 3.11 does not know.
LENIENT = {"blaze": ["--ignore-requires-python"]}


class CannotInstall(Exception):
    """Why a peer is not there to be measured."""


def python_of(contender: str) -> Path:
    """The interpreter a contender runs with: ours for `ours` and `plain`, the peer's own otherwise."""
    if contender not in PEERS:
        return Path(sys.executable)
    folder = BENCH / f"venv-{contender}"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    torch = f"torch=={version('torch').partition('+')[0]}"
    wanted = "\n".join([torch, *PEERS[contender]])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    prepare_folder()
    print(f"installing {contender} into {folder.relative_to(ROOT)} (once)", file=sys.stderr)
    run([sys.executable, "-m", "venv", "--clear", folder], contender)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, torch], contender)  # first and alone, so that what follows finds it there and leaves it alone
    pip += LENIENT.get(contender, [])
    run([*pip, "--constraint", ROOT / "constraints.txt", torch, *PEERS[contender]], contender)
    stamp.write_text(wanted)
    return python


def prepare_folder() -> None:
    """Make `.bench/`, which git leaves alone."""
    BENCH.mkdir(exist_ok=True)
    (BENCH / ".gitignore").write_text("*\n")


def run(command: list[str | Path], contender: str) -> None:
    """Run a step of an installation; its last line is the reason if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
        raise CannotInstall(f"{contender} could not be installed: {errors[-1]}")
