"""Every command of the README and the cheat sheet is run as a newcomer would: in order, from an empty folder.

Commands are taken out of the pages, so that none escapes. They run in this process, where torch is imported once,
for few rounds (`SMALLER`); pages that stay open are started as processes, asked and stopped (`OPEN`); and what another
test or no test of ours can run stands in `ELSEWHERE` with that test's name.
"""

import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from living import mutirao
from mutirao.cli import main
from mutirao.cli.listing import list_settings, parts
from mutirao.systems.cytology.slides.tile_labels import tiles_in
from pages import HOME, Shown, commands, files
from sets import write_classes

README, SHEET = "README.md", "docs/cheat-sheet.md"

# What makes a command short. The longest beginning of a command that is named here counts.
SMALLER = {
    "mutirao run": "--set rounds=2",
    "mutirao run groups": "--set rounds=1 --set epochs=1 --set warm_epochs=4 --set references=0 --set clients=15",
    "mutirao run quickstart --set cluster=auto": "--set rounds=1 --set epochs=1 --set warm_epochs=2 --set clients=10",
    "mutirao run ranking": "--set rounds=2 --set queries=50",
    "mutirao run cytology": "--set rounds=2 --set side=1024 --set slides=2 --set views=1 --set weights=random",
    "mutirao run recsys --set data=films": "--set rounds=2 --set evaluate_every=1 --set per_round=4",
    "mutirao study": "--set rounds=2 --set seeds=2 --workers 1",
    "mutirao tune": "--set rounds=2 --workers 1",
    "mutirao catalogue pretrain": "--epochs 2",
    "mutirao catalogue judge-cold": "--seeds 1",
}
# Pages that stay open: started with these words, asked for once, and ended.
OPEN = ("mutirao dash", "mutirao slides label", "mutirao site admin")
# What is not run here, and what runs it: a test, or the reason why none does.
DEPLOYED = "tests/deploy/test_processes.py::test_a_site_is_admitted_connects_and_leaves_nothing_behind"
REHEARSED = "tests/deploy/test_rehearsal.py::test_a_rehearsal_from_an_empty_folder"
ELSEWHERE = {
    "make run": "it installs as `make test` does on a clean checkout, and the quickstart is run here",
    "make test": "it is what runs this",
    "pip install mutirao": "tests/test_wheel.py::test_the_quickstart_runs_in_an_empty_folder_without_a_compiler",
    "pip install mutirao[dash]": "tests/test_release.py::test_every_extra_can_be_installed_from_wheels",
    "pip install mutirao[all]": "tests/test_release.py::test_every_extra_can_be_installed_from_wheels",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "it is torch's own",
    "python3 -m venv .venv && source .venv/bin/activate": "it is Python's own",
    "py -m venv .venv": "it is Python's own, on Windows",
    "mutirao run quickstart --fleet flower": "tests/deploy/test_flower_deployment.py"
    "::test_a_simulated_run_equals_the_local_one_and_is_quiet",
    "mutirao site rehearse rehearsal": REHEARSED,
    "mutirao site up server": DEPLOYED,
    "mutirao site admit server recife/recife.pub": DEPLOYED,
    "mutirao site dismiss server recife": "tests/deploy/test_processes.py"
    "::test_the_doctor_of_a_server_sees_its_sites_and_a_site_can_be_shut_out",
    "mutirao site status server": DEPLOYED,
    "mutirao site down server": DEPLOYED,
    "mutirao site run server quickstart --set clients=3 --wait": REHEARSED,
    "mutirao site doctor server": "tests/deploy/test_doctor.py::test_the_server_is_sound_too",
    "mutirao drill leak --folder drilled": "tests/deploy/drill/test_leak.py::test_there_is_a_picture_and_a_table",
    "mutirao data get fashion-mnist": "tests/datasets/test_get_data_set.py"
    "::test_the_command_says_where_it_is_and_how_it_is_used",
    "mutirao reproduce groups": "tests/cli/test_reproduce.py::test_each_system_runs_on_its_stand_in_and_says_so",
}


def patients(path: Path) -> None:
    """A table of two hospitals whose outcome depends on age and pressure."""
    draw = np.random.default_rng(0)
    rows = ["hospital,age,pressure,smoker,outcome"]
    for i in range(120):
        age, pressure = draw.integers(20, 90), draw.integers(90, 180)
        rows.append(f"{['recife', 'natal'][i % 2]},{age},{pressure},{['yes', 'no'][i % 3 > 0]},{int(age > 55)}")
    path.write_text("\n".join(rows) + "\n")


def judged(path: Path) -> None:
    """A few queries in LETOR's format, with as many features as generated data have."""
    draw = np.random.default_rng(0)
    rows = (
        f"{draw.integers(5)} qid:{i // 8} " + " ".join(f"{j + 1}:{draw.random():g}" for j in range(136))
        for i in range(24)
    )
    path.write_text("\n".join(rows) + "\n")


def movielens(path: Path, seed: int) -> None:
    """Ratings of films by people with a taste, as MovieLens-100K has them."""
    draw = np.random.default_rng(seed)
    path.mkdir()
    genres = [f"{g:d}|{1 - g:d}" + "|0" * 17 for g in draw.integers(0, 2, 40)]
    films = [
        f"{i + 1}|Film {chr(65 + i % 26)}{i} (19{50 + i})|01-Jan-19{50 + i}||http://x|{genres[i]}" for i in range(40)
    ]
    (path / "u.item").write_text("\n".join(films) + "\n", encoding="latin-1")
    rows = [
        f"{user + 1}\t{film + 1}\t{1 + (user + film) % 2 * 3}\t{1000 + film}"
        for user in range(40)
        for film in draw.choice(36, 20, replace=False)
    ]
    (path / "u.data").write_text("\n".join(rows) + "\n")


# What the cheat sheet says is the reader's to bring.
BROUGHT: dict[str, Callable[[Path], object]] = {
    "patients.csv": patients,
    "pictures": lambda path: write_classes(path, count=12),
    "test.txt": judged,
    "films": lambda path: movielens(path, 0),
    "ratings": lambda path: movielens(path, 1),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with nothing but what a reader brings; modules that are imported from it are forgotten."""
    known, paths = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    for name, bring in BROUGHT.items():
        bring(tmp_path / name)
    for name, content in files(SHEET).items():
        (tmp_path / name).write_text(content)
    yield tmp_path
    sys.path[:] = paths
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def begins(shown: Shown, names: object) -> str:
    """The longest of some names that the command begins with; "" if it begins with none."""
    return max((n for n in names if f"{shown.command} ".startswith(f"{n} ")), key=len, default="")  # type: ignore[attr-defined]


def look_at(words: list[str], folder: Path) -> str:
    """Start a page, ask for it, and end it; what went wrong, if anything did."""
    process = mutirao(*words, "--no-open", cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        if " at http" not in said:
            return f"it said {said!r}"
        with urllib.request.urlopen(said.split(" at ")[1].strip(), timeout=60) as answer:
            page = answer.read()
    finally:
        process.terminate()
        process.communicate(timeout=60)
    return "" if b"</html>" in page else f"it answered {page[:200]!r}"


def label(folder: Path) -> None:
    """Two readers label all tiles, as they would on the page; they differ in one."""
    names = [tile.name for tile in tiles_in(folder).tiles]
    for reader, first in (("ana", "normal"), ("rui", "abnormal")):
        kinds = [first, *(["normal", "abnormal"][i % 2] for i in range(len(names) - 1))]
        rows = "".join(f"{n},{k},2026-01-01T00:00:00+00:00\n" for n, k in zip(names, kinds, strict=True))
        (folder / f"labels-{reader}.csv").write_text("tile,class,time\n" + rows)


def carry_out(shown: Shown, folder: Path) -> str:
    """Run a command; what went wrong, if anything did."""
    more = SMALLER.get(begins(shown, SMALLER), "")
    words = [*shown.words[1:], *shlex.split(more)]
    if begins(shown, OPEN):
        wrong = look_at(words, Path.cwd())
        if "label" in words and not wrong:
            label(folder / "tiles")
        return wrong
    done = CliRunner().invoke(main, words, prog_name="mutirao")
    return "" if done.exit_code == 0 else f"exit code {done.exit_code}: {done.output[-500:]} {done.exception!r}"


@pytest.mark.parametrize("page", [README, pytest.param(SHEET, marks=pytest.mark.slow)])
def test_every_command_runs_from_an_empty_folder(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, block = {}, -1
    for shown in commands(page):
        if shown.block != block:
            block = shown.block
            monkeypatch.chdir(folder)
        if shown.command in ELSEWHERE:
            continue
        if shown.words[0] == "cd":
            monkeypatch.chdir(shown.words[1])
            continue
        assert shown.words[0] == "mutirao", f"{page} shows {shown.text!r}: run it here, or name what does in ELSEWHERE"
        if said := carry_out(shown, folder):
            wrong[shown.command] = said
    assert not wrong


def test_what_is_run_elsewhere_is_still_shown_and_its_test_exists() -> None:
    shown = {c.command for page in (README, SHEET) for c in commands(page)}
    assert set(ELSEWHERE) <= shown
    assert all(any(begins(Shown(c, 0), [name]) for c in shown) for name in (*SMALLER, *OPEN))
    for where in ELSEWHERE.values():
        file, found, test = where.partition("::")
        assert not found or f"def {test}(" in (HOME / file).read_text(encoding="utf-8"), where


def test_the_cheat_sheet_has_every_command_there_is() -> None:
    def leaves(group: click.Group, path: str) -> Iterator[str]:
        for name, command in group.commands.items():
            yield from leaves(command, f"{path} {name}") if isinstance(command, click.Group) else [f"{path} {name}"]

    shown = commands(SHEET)
    assert [leaf for leaf in leaves(main, "mutirao") if not any(begins(c, [leaf]) for c in shown)] == []


def test_the_settings_of_the_cheat_sheet_are_those_of_the_quickstart_and_their_values_exist() -> None:
    known, kinds = list_settings("quickstart"), parts()
    rows = [line.split(" | ") for line in (HOME / SHEET).read_text().splitlines() if line.startswith("| `")]
    rows = [row for row in rows if len(row) == 3 and not row[0].endswith(("csv`", "txt`", "pictures`", "ratings`"))]
    assert len(rows) > 10
    for first, _, values in rows:
        names = [n for n in first.replace("| ", "").replace("`", "").split(", ") if n]
        assert set(names) <= set(known)
        lists = values.rstrip(" |").split("; ")
        for name, shown in zip(names, lists, strict=False):
            if name in kinds:
                assert {v for v in shown.replace("`", "").split(", ") if v != "..."} <= set(kinds[name]), name


def test_the_five_lines_of_the_readme_run(folder: Path) -> None:
    code = (HOME / README).read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line]) == 5
    space: dict[str, object] = {}
    exec(compile(code.replace("rounds=20", "rounds=4"), README, "exec"), space)
    assert (folder / "runs" / "python" / "report.html").exists()


def test_the_readme_has_one_picture_and_its_links_lead_somewhere() -> None:
    text = (HOME / README).read_text(encoding="utf-8")
    assert text.count("![") == 1
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (HOME / target).exists(), target
