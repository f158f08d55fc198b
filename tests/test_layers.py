"""The rooms of the house: imports go one way, there is no ring, and nothing of ours is imported late to hide one."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import mutirao

HOME = Path(mutirao.__file__).parent
# From the ground up; rooms on one line may use each other as long as there is no ring.
FLOORS = [
    "errors deprecation randomness metrics stats registry config io risk templates research_notice",
    "core",
    "aggregation selection clustering robustness privacy compression partitioning",
    "training",
    "personalization",
    "simulation flower",
    "datasets",
    "systems",  # readers, models, metrics of a system; its recipe and report are `recipes`
    "experiments",
    "runs",
    "studies",
    "report",
    "recipes",
    "api",
    "dashboard",
    "deploy",
    "cli",
]
# Modules of a system that know experiments, runs or reports. Whoever is below them knows them by name only.
OF_RECIPES = {"recipe", "report", "trained", "centralised", "run_scale", "rating_drill"}
# Import paths of earlier versions, which only hand on what has moved.
FORMER = {"attacks", "filters", "partition"}
# Modules above the systems that import from one of them, instead of finding it by its name in a table.
KNOWS_A_SYSTEM = {
    "mutirao.api.result",
    "mutirao.dashboard.labelling_page",
    "mutirao.deploy.leak_drill",
    "mutirao.deploy.processing_record",
}
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms.split()}
HEAVY = {"torch", "flwr", "sklearn", "scipy", "matplotlib", "pyarrow", "mlflow", "opacus", "numba"}
HEAVY |= {"openslide", "PIL", "onnx", "fastapi", "uvicorn", "rich", "optuna"}


class Import(NamedTuple):
    module: str
    target: str  # one of our modules, or another package
    late: bool  # inside a function
    typed: bool = False  # for editors and mypy alone: nothing is imported


def name_of(path: Path) -> str:
    return ".".join(["mutirao", *path.relative_to(HOME).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(HOME.rglob("*.py"))}


def imports_in(module: str, text: str) -> Iterator[Import]:
    tree = ast.parse(text)
    late = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    blocks = (n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    typed = {n for block in blocks for n in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{a.name}" for a in node.names} & MODULES.keys()
            rest = {node.module} if len(inside) < len(node.names) else set()
            yield from (Import(module, target, node in late, node in typed) for target in inside | rest)
        elif isinstance(node, ast.Import):
            yield from (Import(module, a.name, node in late, node in typed) for a in node.names)


ALL = [found for name, path in MODULES.items() for found in imports_in(name, path.read_text(encoding="utf-8"))]
OURS = [i for i in ALL if i.target.split(".")[0] == "mutirao" and i.module != "mutirao" and i.target != "mutirao"]
OURS = [i for i in OURS if i.module.split(".")[1] not in FORMER]


def room(module: str) -> str:
    """The folder of a module; of a system's folder, `systems` or `recipes`."""
    first, *rest = module.split(".")[1:]
    if first != "systems" or not rest:
        return first
    alone = len(rest) == 1 and MODULES[module].name != "__init__.py"
    high = rest[-1] in OF_RECIPES or rest[-1].endswith("_plot")
    return "recipes" if alone or high else "systems"


def upward(found: list[Import]) -> list[str]:
    return [f"{i.module} imports {i.target}" for i in found if FLOOR[room(i.target)] > FLOOR[room(i.module)]]


def heavy(module: str, seen: set[str] | None = None) -> set[str]:
    """The heavy packages that come with a module when it is imported."""
    seen = seen if seen is not None else set()
    out = set()
    for i in (i for i in ALL if i.module == module and not i.late and not i.typed and i.target not in seen):
        seen.add(i.target)
        out |= heavy(i.target, seen) if i.target in MODULES else {i.target.split(".")[0]} & HEAVY
    return out


def test_every_module_has_a_floor() -> None:
    assert {room(m) for m in MODULES if m != "mutirao"} - FORMER == FLOOR.keys()


def test_imports_go_down() -> None:
    assert upward(OURS) == []


def test_an_import_upwards_is_found() -> None:
    assert upward(
        list(imports_in("mutirao.core.rounds", "def f():\n    from mutirao.runs.run_folder import Folder"))
    ) == ["mutirao.core.rounds imports mutirao.runs.run_folder"]


def test_upper_floors_know_systems_by_name_only() -> None:
    above = [i for i in OURS if FLOOR[room(i.module)] > FLOOR["systems"] and room(i.module) not in ("recipes", "cli")]
    assert {i.module for i in above if i.target.startswith("mutirao.systems")} == KNOWS_A_SYSTEM


@pytest.mark.parametrize("kind", ["modules", "rooms"])
def test_there_is_no_ring(kind: str) -> None:
    graph: dict[str, set[str]] = {}
    for i in OURS:
        a, b = (i.module, i.target) if kind == "modules" else (room(i.module), room(i.target))
        if a != b:
            graph.setdefault(a, set()).add(b)
    TopologicalSorter(graph).prepare()  # CycleError names the ring


def test_ours_is_imported_late_only_where_it_is_heavy_or_for_the_start_of_the_command_line() -> None:
    late = [i for i in OURS if i.late and room(i.module) != "cli"]
    assert [f"{i.module} imports {i.target}" for i in late if not heavy(i.target) - heavy(i.module)] == []


def test_the_core_knows_numpy_alone() -> None:
    assert [i for i in ALL if i.module.startswith("mutirao.core") and i.target.split(".")[0] in HEAVY] == []
