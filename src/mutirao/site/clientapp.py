"""`flwr-clientapp` as a site runs it: the site's installed code answers, and no code that came over the network.

Flower sends the app of a run, code and all, to every SuperNode, which starts `flwr-clientapp` for each message. A
policy binds only if that program ignores the code. `own_command(folder)` writes such a `flwr-clientapp` into a folder;
a SuperNode started with that folder first in its PATH runs it. Nothing is unpacked, nothing is installed.
"""

import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from mutirao.errors import ConfigError
from mutirao.files import write_whole

COMMAND = "flwr-clientapp"


def own_command(folder: Path, task: str = "") -> Path:
    """Write the command; `task` names the site's own function from Flower's context to a Task (`my_site:task_of`)."""
    if os.name == "nt":
        raise ConfigError("a site's own flwr-clientapp is a shell script: it needs Linux or macOS")
    path = folder / COMMAND
    words = [sys.executable, "-m", "mutirao.site.clientapp", *([f"--task={task}"] if task else [])]
    write_whole(path, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    """Answer the message that a SuperNode holds for us."""
    from flwr.supernode.cli import flwr_clientapp

    from mutirao.config import load_name
    from mutirao.fleets.flower import client_app

    task = next((word for word in sys.argv if word.startswith("--task=")), "")
    drop = {task, "--allow-runtime-dependency-installation"}
    sys.argv = [COMMAND, *(word for word in sys.argv[1:] if word not in drop)]

    def leave_it(*_: Any, **__: Any) -> None:
        """The app that the server sent stays packed."""

    def load(*_: Any, **__: Any) -> Any:
        return lambda *_: client_app(load_name(task.removeprefix("--task=")) if task else None)

    replace_in_flower({"install_from_fab": leave_it, "get_project_dir": leave_it, "get_load_client_app_fn": load})
    flwr_clientapp()


def replace_in_flower(functions: dict[str, Any]) -> None:
    """Put these in place of the functions with which Flower unpacks and loads an app; none of them may be missing."""
    place = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    for name, function in functions.items():
        if not hasattr(place, name):  # another version of Flower: better no answer than one by foreign code
            sys.exit(f"error: this version of Flower has no {name}; install the one that mutirao asks for")
        setattr(place, name, function)


if __name__ == "__main__":
    main()
