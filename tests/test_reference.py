"""The API reference has an entry for every public name, and every entry an example that does what it shows."""

import ast
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import io
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import torch
import yaml

import mutirao
from mutirao.cli import main
from mutirao.cli.listing import list_settings, parts, recipes
from mutirao.config import KINDS, Part
from mutirao.experiments import task as experiments

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def entries() -> list[str]:
    """What has an entry on the pages of the reference: that is what public means."""
    return [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)]


def find(path: str) -> Any:
    """The object behind a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def imported(code: str) -> set[str]:
    """What a piece of Python imports from the package by name."""
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in found if node.module and re.match(r"mutirao(\.|$)", node.module)]
    return {f"{node.module}.{alias.name}" for node in ours for alias in node.names}


def shown_to_users() -> set[str]:
    """What the pages of the documentation, the README, the examples and the notebooks import."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("README*.md")]
    code = [block for page in pages for block in PYTHON.findall(page.read_text("utf-8"))]
    code += [script.read_text("utf-8") for script in (ROOT / "examples").rglob("*.py")]
    notebooks = [json.loads(path.read_text("utf-8")) for path in (ROOT / "notebooks").glob("*.ipynb")]
    cells = [cell for notebook in notebooks for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code += ["".join(line for line in cell["source"] if not line.startswith(("%", "!"))) for cell in cells]
    return set().union(*(imported(block) for block in code))


def named_by_settings() -> dict[str, Any]:
    """The parts that a setting can name: those of all recipes, and those that one has of its own."""
    homes = set(KINDS.items())
    for recipe in recipes():
        own = {f.name: f.default for f in dataclasses.fields(experiments.find(recipe).config)}
        homes |= {(kind, part.home) for kind, part in own.items() if isinstance(part, Part) and part.home}
    found = ((kind, importlib.import_module(module).NAMES) for kind, module in sorted(homes))
    return {f"{kind}={name}": getattr(make, "func", make) for kind, names in found for name, make in names.items()}


def without_entry(public: dict[str, Any], known: Iterable[str]) -> list[str]:
    """The public names that no entry is about; one object may be imported from several places."""
    there = {id(find(path)) for path in known}
    return sorted(name for name, thing in public.items() if id(thing) not in there and not inspect.ismodule(thing))


def docstring_of(path: str) -> tuple[str, dict[str, Any]]:
    """The docstring of an entry, and the module that its example is run in."""
    thing = inspect.unwrap(find(path))
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return inspect.cleandoc(thing.__doc__ or ""), vars(sys.modules[thing.__module__])
    module, _, name = path.rpartition(".")  # an alias of a type, or a value: only its source says what it is
    home = importlib.import_module(f"mutirao.{mutirao._MODULE_OF[name]}" if module == "mutirao" else module)
    _, _, below = inspect.getsource(home).partition(f"\n{name} = ")
    return inspect.cleandoc(below.partition('"""')[2].partition('"""')[0]), vars(home)


def fault_of_example(path: str, docstring: str, module: dict[str, Any]) -> str:
    """What is wrong with the example in a docstring; nothing if it prints what it shows."""
    test = doctest.DocTestParser().get_doctest(docstring, dict(module), path, path, 0)
    if not any(example.want for example in test.examples):
        return f"{path} has no example that shows anything"
    said = io.StringIO()
    failed = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.write).failed
    return said.getvalue() if failed else ""


def reference() -> ModuleType:
    """The hook that writes the pages of commands and settings."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts/reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(page: str) -> str:
    text: str = reference().on_page_markdown((ROOT / "docs/reference" / page).read_text("utf-8"))
    assert "<!--" not in text
    return text


def test_every_public_name_has_an_entry() -> None:
    found = entries()
    assert len(found) == len(set(found)) > 300
    public = {f"mutirao.{name}": getattr(mutirao, name) for name in mutirao.__all__}
    public |= {path: find(path) for path in shown_to_users()} | named_by_settings()
    assert len(public) > 180
    assert not without_entry(public, found)
    assert without_entry(public, set(found) - {"mutirao.aggregation.FedAvg"}) == [
        "aggregate=fedavg",
        "mutirao.aggregation.FedAvg",
    ]


def test_every_entry_has_an_example_that_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = []
    for path in entries():
        (tmp_path / path).mkdir()
        monkeypatch.chdir(tmp_path / path)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            faults.append(fault_of_example(path, *docstring_of(path)))
    assert not any(faults), "\n".join(filter(None, faults))


def test_an_example_that_is_missing_or_wrong_is_noticed() -> None:
    assert "no example" in fault_of_example("plain", "One sentence.", {})
    assert "no example" in fault_of_example("silent", "One sentence.\n\n>>> x = 1\n", {})
    assert "Expected:\n    3\nGot:\n    2" in fault_of_example("wrong", "One sentence.\n\n>>> 1 + 1\n3\n", {})
    assert not fault_of_example("right", "One sentence.\n\n>>> 1 + 1\n2\n", {})


def test_every_page_of_the_reference_is_in_the_menu() -> None:
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("", lambda *_: None)
    menu = str(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), loader)["nav"])
    assert [page.name for page in PAGES if f"reference/{page.name}" not in menu] == []


def commands(command: click.Command, path: str) -> Iterable[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), name)
            assert inner
            yield from commands(inner, f"{path} {name}")


def test_every_command_is_on_the_page_with_its_options_and_an_example() -> None:
    page = rendered("command-line.md")
    sections = dict(re.findall(r"^##+ `(mutirao[^`]*)`\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE))
    all_of_them = dict(commands(main, "mutirao"))
    assert sections.keys() == all_of_them.keys()
    for path, command in all_of_them.items():
        assert f"$ {path}" in sections[path] or isinstance(command, click.Group), f"{path} has no example"
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[-1] in sections[path]


def test_every_setting_and_every_part_is_on_its_page() -> None:
    settings, page = rendered("settings.md"), rendered("parts.md")
    for recipe in recipes():
        section = settings.partition(f"## `{recipe}`")[2].partition("\n## ")[0]
        shared = settings.partition("## All recipes")[2].partition("\n## ")[0]
        assert not [key for key in list_settings(recipe) if f"| `{key}` |" not in section + shared]
    for kind, names in parts().items():
        assert not [name for name in names if f"| `{kind}={name}` |" not in page]
    assert "inspect" not in page  # no default is shown as Python's word for none


def test_docstrings_are_shown_to_the_letter() -> None:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "scripts/docstrings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module).failed == 0
    assert module.as_markdown("a * b, <h, y> and `x * <y>`") == r"a \* b, &lt;h, y> and `x * <y>`"
