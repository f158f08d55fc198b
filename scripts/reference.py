"""The reference of commands and settings, written from the package itself whenever the documentation is built.

A MkDocs hook, named in `mkdocs.yml`: a page that has a line `<!-- commands -->`, `<!-- recipes -->` or `<!-- parts -->`
gets there what the command line and the configuration know of themselves. Nothing is written down a second time.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import click

from mutirao.cli import main
from mutirao.cli.listing import recipes
from mutirao.config import KINDS, Common, Part, can_set
from mutirao.experiments.task import find

KIND = {  # what the parts of a kind are called
    "select": "who takes part in a round",
    "aggregate": "how updates are aggregated",
    "partition": "how samples are divided among clients",
    "available": "which clients are available (simulated)",
    "devices": "how fast the clients' devices are (simulated)",
    "drift": "how clients' data change (simulated)",
    "track": "a tracker that gets every round",
    "privacy": "differential privacy",
    "screen": "how odd updates are kept out",
    "secure": "secure aggregation",
    "compress": "how updates are compressed",
    "schedule": "the clients' learning rate by round",
    "personal": "personalised models",
    "cluster": "clustered learning: how groups are found",
    "signature": "groups: what a client sends of its warm-up",
    "per_group": "groups: hyperparameters of each group",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its marks replaced."""
    for mark, write in WRITERS.items():
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", "\n".join(write()))
    return markdown


def write_commands() -> Iterator[str]:
    """Every command: what it does, how it is called, its examples, its options."""
    for path, command in walk(main, "mutirao"):
        context = click.Context(command, info_name=path)
        says, examples = split_help(command)
        yield f"\n{'#' * min(4, 1 + len(path.split()))} `{path}`\n"
        yield f"{says}\n"
        yield f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        if examples:
            yield "```console\n" + "\n".join(f"$ {line}" for line in examples) + "\n```\n"
        options = [p for p in command.params if isinstance(p, click.Option)]
        yield from table(["option", "what it does"], [describe_option(o, context) for o in options])


def walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, in the order of their names."""
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            yield from walk(inner, f"{path} {name}")


def split_help(command: click.Command) -> tuple[str, list[str]]:
    """What a command says of itself as Markdown, and the commands that it gives as examples."""
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    examples = [line.strip().removeprefix("Example: ") for line in text.splitlines() if is_example(line)]
    said = [
        line for line in text.splitlines() if not is_example(line) and line.strip() not in ("Example:", "Examples:")
    ]
    paragraphs = re.split(r"\n\s*\n", "\n".join(said).strip())
    return "\n\n".join(as_list(p) for p in paragraphs if p), examples


def is_example(line: str) -> bool:
    """Whether a line of help is a command to type."""
    return line.strip().removeprefix("Example: ").startswith("mutirao ")


def as_list(paragraph: str) -> str:
    """A paragraph, or a list of what stands in columns in the terminal."""
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in paragraph.splitlines()]
    if len(rows) > 1 and all(len(row) == 2 for row in rows):
        return "\n".join(f"- `{name}`: {escape(text)}" for name, text in rows)
    return escape(" ".join(paragraph.split()))


def describe_option(option: click.Option, context: click.Context) -> tuple[str, str]:
    """An option as it is typed, and what it does."""
    names, text = option.get_help_record(context) or (", ".join(option.opts), "")
    return f"`{names}`", text


def write_recipes() -> Iterator[str]:
    """The settings that all recipes share, then what each recipe has of its own or begins with."""
    yield "## All recipes\n"
    shared = {f.name: f for f in dataclasses.fields(Common)}
    yield from table(["setting", "default", "what it is"], [describe_setting(f) for f in shared.values()])
    for name, about in recipes().items():
        fields = dataclasses.fields(find(name).config)
        own = [f for f in fields if f.name not in shared]
        other = [f for f in fields if f.name in shared and default_of(f) != default_of(shared[f.name])]
        yield f"\n## `{name}`\n\n{escape(about)}\n"
        yield from table(["setting of its own", "default", "what it is"], [describe_setting(f) for f in own])
        if other:
            begins = ", ".join(f"`{f.name}={default_of(f)}`" for f in other)
            yield f"\nOf the settings above, it begins with {begins}.\n"
        rows = [row for f in fields if isinstance(f.default, Part) and f.default.home for row in own_parts(f)]
        yield from table(["part of its own", "settings", "what it does"], rows)


def own_parts(field: dataclasses.Field[Any]) -> Iterator[tuple[str, str, str]]:
    """The parts of a kind that a recipe has besides those that all have."""
    all_have = importlib.import_module(KINDS[field.name]).NAMES if field.name in KINDS else {}
    for name, make in importlib.import_module(field.default.home).NAMES.items():
        if name not in all_have:
            yield describe_part(field.name, name, make)


def describe_setting(field: dataclasses.Field[Any]) -> tuple[str, str, str]:
    """A setting: its name, its default, and its line of help with what it may be."""
    meta, limits = field.metadata, []
    if meta.get("choices"):
        limits.append(", ".join(f"`{choice}`" for choice in meta["choices"]))
    low, high = meta.get("low"), meta.get("high")
    if low is not None:
        limits.append("above 0" if 0 < low < 1e-6 else f"from {low:g}")
    if high is not None and high < 1e15:
        limits.append(f"to {high:g}")
    return f"`{field.name}`", f"`{default_of(field)}`", meta["doc"] + (f" ({' '.join(limits)})" if limits else "")


def default_of(field: dataclasses.Field[Any]) -> str:
    """A default as it would be typed."""
    if isinstance(field.default, Part):
        own = [f"{field.name}.{key}={value}" for key, value in field.default.settings.items()]
        return " ".join([field.default.name, *own])
    return str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}" or '""'


def write_parts() -> Iterator[str]:
    """The parts of each kind by name, with their settings."""
    for kind, module in KINDS.items():
        yield f"\n## `{kind}`: {KIND[kind]}\n"
        rows = [describe_part(kind, name, make) for name, make in importlib.import_module(module).NAMES.items()]
        yield from table(["part", "settings", "what it does"], rows)


def describe_part(kind: str, name: str, make: Callable[..., Any]) -> tuple[str, str, str]:
    """A part: the setting that chooses it, its own settings with their defaults, and its first line."""
    part = getattr(make, "func", make)
    own = [f"`{key}`" if p.default in (None, p.empty) else f"`{key}={p.default}`" for key, p in can_set(make).items()]
    return f"`{kind}={name}`", " ".join(own), (inspect.getdoc(part) or "").split("\n")[0]


def table(header: list[str], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """A table in Markdown; nothing if it has no rows."""
    if rows:
        yield "\n| " + " | ".join(header) + " |\n|" + "---|" * len(header)
        yield from ("| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows)
        yield ""


def escape(text: str) -> str:
    """Text of a cell or paragraph in which no sign means anything to Markdown, but for code in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [p.replace("<", "&lt;").replace("*", r"\*").replace("[", r"\[") for p in parts[::2]]
    return "".join(parts).replace("|", r"\|")


WRITERS = {"commands": write_commands, "recipes": write_recipes, "parts": write_parts}
