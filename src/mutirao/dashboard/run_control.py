"""Cancel and resume: only a process that is provably at work in that folder is ended, and only runs at rest go on."""

import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import IO

from mutirao.config import parse_assignment
from mutirao.dashboard.run_index import Item
from mutirao.experiments.task import PYTHON
from mutirao.registry import dotted_in
from mutirao.report.run_state import holder
from mutirao.runs.reader import json_of, text_in
from mutirao.runs.trust import is_own_run, is_own_study, names_in_file

FOREIGN = "{} names code to run, {}, and was not run by you on this machine; go on with it from a terminal"
FROM_PYTHON = "it was started from Python with mutirao.{}; call that again there"


class Refused(Exception):
    """The wish cannot be granted, and why."""


class Control:
    """The processes this page started, and the words to end or begin one."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}

    def cancel(self, item: Item) -> None:
        """End the process at work; what was done is kept, and the run can go on later."""
        if item.study:
            raise Refused(f"this run is a cell of the study {item.study}; cancel that")
        pid, alive = holder(item.path)
        if not alive:
            raise Refused("nothing is running there")
        if not pid:
            raise Refused("the process at work is not one of yours on this machine")
        os.kill(pid, signal.SIGTERM)

    def resume(self, item: Item) -> None:
        """Start a process that goes on with the run or study."""
        if item.study:
            raise Refused(f"this run is a cell of the study {item.study}; resume that")
        if holder(item.path)[1] or self.problem(item.key) is None:
            raise Refused("it is running already")
        words = resume_words(item)
        says = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        # -P: no module is imported from the working folder.
        command = [sys.executable, "-P", "-m", "mutirao.cli", *words]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=says, start_new_session=True
        )
        self._begun[item.key] = (process, says)

    def begun(self) -> list[str]:
        """What this page has started."""
        return list(self._begun)

    def problem(self, key: str) -> str | None:
        """How the process this page started ended: empty if well or if there is none, None while it is at work."""
        if key not in self._begun:
            return ""
        process, says = self._begun[key]
        code = process.poll()
        if code is None:
            return None
        if code in (0, -signal.SIGTERM):
            return ""
        says.seek(0)
        lines = says.read()[-4000:].decode("utf-8", errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
        return f"it ended with code {code}"


def resume_words(item: Item) -> list[str]:
    """The words after `mutirao` that go on with a run or study.

    Code that a folder names is run only if the user ran it here before: the folder may have been put there. A recipe
    of the user's own is named by the run's file, so that the command checks it again; a study has a mark, too.
    """
    if item.kind == "run":
        file = item.path.absolute() / "config.toml"
        recipe = first_value(text_in(file))
        if not recipe:
            raise Refused("config.toml does not say which recipe it is for")
        if recipe == PYTHON:
            raise Refused(FROM_PYTHON.format("run"))
        if (names := names_in_file(file)) and not is_own_run(item.path):
            raise Refused(FOREIGN.format("config.toml", ", ".join(names)))
        return ["run", str(file) if ":" in recipe else recipe, "--out", str(item.path), "--resume", "--json"]
    plan = json_of(item.path / "study.json")
    file = Path(str(plan.get("file", "")))
    sets = plan.get("sets", [])
    if plan and not plan.get("file"):
        raise Refused(FROM_PYTHON.format("compare"))
    if not file.is_file() or not file.is_absolute():
        raise Refused(f"the study's file {file} is not there any more")
    names = dotted_in([names_in_file(file), [parse_assignment(text)[1] for text in sets if "=" in str(text)]])
    if names and not is_own_study(item.path, text_in(file)):
        raise Refused(FOREIGN.format("the study", ", ".join(names)))
    flags = [word for text in sets if isinstance(text, str) for word in ("--set", text)]
    return ["study", str(file), "--out", str(item.path), "--json", *flags]


def first_value(text: str) -> str:
    """The recipe named in a configuration; nothing that could be taken for an option."""
    try:
        recipe = str(tomllib.loads(text).get("recipe", ""))
    except (ValueError, RecursionError) as error:
        raise Refused(f"config.toml cannot be read: {error}") from error
    if recipe.startswith("-") or recipe.endswith(".toml"):
        return ""
    return recipe
