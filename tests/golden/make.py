"""Make a golden case with the command line, in a folder of its own; nothing here knows a module of Mutirão."""

import contextlib
import csv
import functools
import importlib
import io
import random
import tomllib
from pathlib import Path
from typing import Any

from tests.golden.cases import Case
from tests.golden.outputs import of_run, of_site, of_study

ROOT = Path(__file__).parents[2]


def make(case: Case, folder: Path) -> dict[str, Any]:
    """The outputs of a case."""
    settings = {key: file_of(value, folder) for key, value in case.settings.items()}
    return {"run": run, "resumed": resumed, "study": study, "deployed": deployed}[case.kind](
        case.recipe, settings, folder
    )


def run(recipe: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    command("run", recipe, "--out", folder / "run", "--progress", "quiet", *options(settings))
    return of_run(folder / "run")


def resumed(recipe: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run that ended after one round and goes on."""
    run(recipe, settings | {"rounds": 1}, folder)
    return run(recipe, settings | {"--resume": True}, folder)


def study(recipe: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    lines = [f'recipe = "{recipe}"', "seeds = 2", 'baseline = "fedavg"', "[settings]"]
    lines += [f"{key} = {value}" for key, value in settings.items()]
    lines += ["[methods.fedavg]", "[methods.scaffold]", 'aggregate = "scaffold"']
    (folder / "study.toml").write_text("\n".join(lines))
    command("study", folder / "study.toml", "--out", folder / "study", "--workers", 0)
    return of_study(folder / "study")


def deployed(recipe: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A federation of real processes: a server and two sites."""
    where = folder / "federation"
    command("site", "rehearse", where, "--sites", 2, "--rounds", 2, "--recipe", recipe, "--json", *options(settings))
    return of_run(where / "run") | {"site": of_site(where / "c0"), "server": of_site(where / "server")}


def command(*words: object) -> str:
    """Run `mutirao` in this process, so that it can be observed; what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            entry()([str(word) for word in words], standalone_mode=False, prog_name="mutirao")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(told.getvalue().strip().splitlines()[-1]) from end
    return printed.getvalue()


@functools.cache
def entry() -> Any:
    """The command, from where pyproject.toml says it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["mutirao"].partition(":")
    return getattr(importlib.import_module(module), name)


def options(settings: dict[str, Any]) -> list[str]:
    words = []
    for key, value in settings.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if key.startswith("--"):
            words += [key] if value is True else [key, text]
        else:
            words += ["--set", f"{key}={text}"]
    return words


def file_of(value: Any, folder: Path) -> Any:
    """A setting, or the path of the data that its word stands for."""
    makers = {"TABLE": make_table, "PICTURES": make_pictures}
    return makers[value](folder) if value in makers else value


def make_table(folder: Path) -> Path:
    draw, file = random.Random(0), folder / "table.csv"
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["site", "a", "b", "colour", "y"])
        for i in range(120):
            a, b = draw.gauss(0, 1), draw.gauss(0, 1)
            rows.writerow([f"s{i % 3}", f"{a:.4f}", f"{b:.4f}", draw.choice("rgb"), "yes" if a + b > 0 else "no"])
    return file


def make_pictures(folder: Path) -> Path:
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for label, name in enumerate(("abnormal", "normal")):
        (folder / "pictures" / name).mkdir(parents=True)
        for i in range(18):
            pixels = draw.normal(60 + 120 * label, 20, (16, 16, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{i:02d}.png")
    return folder / "pictures"
