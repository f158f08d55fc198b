"""What is published: an sdist with all that a build needs, and a wheel that runs where no compiler is.

The environments here are empty but for the wheel and exactly the packages that it declares, which are linked from the
environment of the tests: a package that is used and not declared is not found.
"""

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mutirao

ROOT = Path(__file__).parents[1]
KERNELS = ["_attention", "_dense", "_pools", "_recurrent", "_winograd"]
FILES = ["pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "constraints.txt", "src"]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
QUICK = """#!/bin/sh
for word; do shift; [ "$word" = -O3 ] && word=-O0; set -- "$@" "$word"; done
exec cc "$@"
"""  # a compiler that does not take its time
OF_OTHERS = {"ray", "datasets", "ir_datasets"}  # Flower's extra brings the first, and users hand us things of the rest
IMPORT_ALL = """
import importlib, json, pkgutil, mutirao
missing = {}
for module in pkgutil.walk_packages(mutirao.__path__, "mutirao.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing.setdefault(error.name.partition(".")[0], module.name)
    except mutirao.MutiraoError as error:  # it says which extra it needs
        pass
print(json.dumps(missing))
"""


def build(kind: str, source: Path, into: Path, **settings: str) -> Path:
    """Build an sdist or a wheel of what is in a folder, with the setuptools of this environment."""
    into.mkdir(parents=True)
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(into)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=source, env=kept | settings, check=True, capture_output=True)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(ROOT / name, source)
    return build("sdist", source, source / "dist")


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    quick = unpacked.with_name("quick-cc")
    quick.write_text(QUICK, encoding="utf-8")
    quick.chmod(0o755)
    return build("wheel", unpacked, unpacked.with_name("wheel"), CC=str(quick))


@pytest.fixture(scope="module")
def bare(unpacked: Path) -> Path:
    copy = unpacked.with_name("bare-source")
    shutil.copytree(unpacked, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    return build("wheel", copy, unpacked.with_name("bare-wheel"), CC="false")


def about(wheel: Path) -> Metadata:
    """The wheel's own description, which must be valid."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)


def needed(requirements: Iterable[Requirement], extra: str = "") -> Iterator[str]:
    """The names of the packages that these ask for here, and those ask for in turn."""
    seen: set[tuple[str, str]] = set()
    waiting = [(r, extra) for r in requirements]
    while waiting:
        requirement, of = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of}):
            continue
        for wanted in {"", *requirement.extras}:
            name = canonicalize_name(requirement.name)
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                yield name
                waiting += [(Requirement(r), wanted) for r in importlib.metadata.requires(name) or ()]


def empty_environment(folder: Path, wheel: Path) -> Path:
    """An environment with a wheel and what it declares, without pip or anything else; the Python in it."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in set(needed(about(wheel).requires_dist or ())):
        package = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(package.locate_file(top))))
    uv, python = Path(sys.executable).parent / "uv", folder / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel]
    subprocess.run([*map(str, install)], check=True)
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_environment(tmp_path_factory.mktemp("environment") / "venv", wheel)


def run(python: Path, folder: Path, *words: str) -> str:
    """Run a program of an environment where there is no other, in an empty folder; what it says."""
    folder.mkdir()
    alone = {"PATH": str(python.parent), "HOME": str(folder.parent), "CC": "false", "PYTHONUTF8": "1"}
    done = subprocess.run([str(python.parent / words[0]), *words[1:]], cwd=folder, env=alone, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_the_sdist_holds_what_a_build_needs_and_no_half_of_the_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {str(p.relative_to(ROOT)) for p in (ROOT / "src").rglob("*.[ch]")}
    assert len(tracked) > 10
    assert tracked | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt"} <= names
    assert not any(name.startswith("tests") for name in names)
    assert sdist.name == f"mutirao-{mutirao.__version__}.tar.gz"


@pytest.mark.slow
def test_one_wheel_serves_every_python_from_3_11_on_and_carries_kernels_and_data(wheel: Path) -> None:
    assert wheel.name.startswith(f"mutirao-{mutirao.__version__}-cp311-abi3-")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    compiled = {Path(name).name for name in names if name.startswith("mutirao/training/engine/") and ".abi3." in name}
    assert compiled == {f"{kernel}.abi3.so" for kernel in KERNELS}
    tracked = subprocess.run(["git", "ls-files", "src/mutirao"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {name.removeprefix("src/") for name in tracked.stdout.split() if not name.endswith((".c", ".h"))}
    assert sorted(name for name in wanted - names if (ROOT / "src" / name).exists()) == []


def test_the_wheel_describes_itself_as_an_index_wants_it(wheel: Path) -> None:
    told = about(wheel)
    assert (str(told.version), told.license_expression) == (mutirao.__version__, "Apache-2.0")
    assert told.description_content_type == "text/markdown"
    assert told.requires_python is not None
    assert "3.11" in told.requires_python
    assert not [r.name for r in told.requires_dist or () if r.url]


@pytest.mark.slow
def test_the_quickstart_runs_in_an_empty_folder_without_a_compiler(python: Path, tmp_path: Path) -> None:
    loaded = f"from mutirao.training.engine import {', '.join(KERNELS)} as last; print(last.__file__)"
    assert str(python.parent.parent) in run(python, tmp_path / "a", "python", "-c", loaded)
    said = run(python, tmp_path / "b", "mutirao", "run", "quickstart", "--set", "rounds=2", "--json")
    assert json.loads(said)["rounds"] == 2
    assert (tmp_path / "b/runs/quickstart/report.html").exists()
    assert run(python, tmp_path / "c", "mutirao", "--version").split()[-1] == mutirao.__version__


@pytest.mark.slow
def test_a_build_without_a_compiler_lacks_the_kernels_and_runs_all_the_same(bare: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(bare) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".pyd"))]
    python = empty_environment(tmp_path / "venv", bare)
    said = run(python, tmp_path / "a", "mutirao", "run", "quickstart", "--set", "rounds=1", "--json")
    assert json.loads(said)["rounds"] == 1


def declared_modules() -> set[str]:
    """The names under which the packages that we declare, for us or for an extra, are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {canonicalize_name(Requirement(r).name) for each in lists for r in each}
    found = importlib.metadata.packages_distributions()
    return {module for module, owners in found.items() if {canonicalize_name(owner) for owner in owners} & names}


def test_what_cannot_be_imported_without_an_extra_belongs_to_one(python: Path, tmp_path: Path) -> None:
    missing = json.loads(run(python, tmp_path / "a", "python", "-W", "ignore", "-c", IMPORT_ALL))
    assert "flwr" in missing  # else nothing was looked at
    assert {name: by for name, by in missing.items() if name not in declared_modules()} == {}


def test_no_module_imports_a_package_that_is_not_declared() -> None:
    known = declared_modules() | OF_OTHERS | sys.stdlib_module_names | {"mutirao"}
    strange: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if (top := name.partition(".")[0]) not in known:
                    strange.setdefault(top, set()).add(path.name)
    assert strange == {}
