"""Users' own code by its dotted name `package.module:name`: where such names occur, and whether one is a part.

Importing a module runs it, so a name out of a file is a request to run code: see `mutirao.runs.trust`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mutirao.errors import ConfigError

PLAIN = {"exclude"}  # names of clients: never code
PATHS = {"data"}  # settings that hold paths: code only if the whole is a dotted name
# A backbone by its name in timm is no code; a file is, except ONNX.
BACKBONE = "body"
TIMM = "timm:"
FILE = "file:"
WORDS = {"recipe": "a recipe", "select": "a selector", "aggregate": "an aggregator", "screen": "a filter"}
WORDS |= {"partition": "a partition", "track": "a tracker", "scores": "a score"}
WORDS |= {"data": "a function that gives a data set", "model": "a function that gives a torch module"}


def is_dotted(text: str) -> bool:
    """Whether the text is a dotted name, and nothing but one.

    >>> is_dotted("mine.parts:Longest"), is_dotted("dirichlet"), is_dotted("../x:y")
    (True, False, False)
    """
    module, colon, name = text.partition(":")
    return bool(colon) and all(word.isidentifier() for word in (*module.split("."), *name.split(".")))


def is_program(text: str) -> bool:
    """Whether the text names a file that is run, as a network in TorchScript is; one in ONNX is arithmetic alone.

    >>> is_program("file:/srv/uni.pt"), is_program("file:/srv/uni.onnx"), is_program("/srv/uni.pt")
    (True, False, False)
    """
    return text.startswith(FILE) and not text.lower().endswith(".onnx")


def dotted_in(content: Any) -> list[str]:
    """The names of code anywhere in a table or list, each once; a mixture of scores may hold several.

    >>> dotted_in({"select": {"name": "mix", "scores": "age + 0.5 mine:score"}, "recipe": "wine:recipe"})
    ['mine:score', 'wine:recipe']
    >>> dotted_in({"body": "timm:resnet50"}), dotted_in({"body": "file:/srv/uni.pt"})
    ([], ['file:/srv/uni.pt'])
    >>> dotted_in({"data": "mine.sets:load"}), dotted_in({"data": "/srv/a b:c"})
    (['mine.sets:load'], [])
    """
    # A file is one name as a whole: its path may have blanks in it.
    if isinstance(content, str) and is_program(content):
        found = [content]
    elif isinstance(content, str):
        found = [word for word in content.split() if is_dotted(word)]
    elif isinstance(content, Mapping):
        kept = {k: v for k, v in content.items() if k not in PLAIN and not (k == BACKBONE and is_of_timm(v))}
        for key in PATHS & kept.keys():
            kept[key] = [v for v in listed(kept[key]) if is_dotted(str(v))]
        found = [name for value in kept.values() for name in dotted_in(value)]
    elif isinstance(content, list | tuple):
        found = [name for value in content for name in dotted_in(value)]
    else:
        found = []
    return list(dict.fromkeys(found))


def is_of_timm(value: Any) -> bool:
    """Whether all values of a setting are names of timm's networks."""
    return all(str(v).startswith(TIMM) for v in listed(value))


def listed(value: Any) -> list[Any]:
    """The values of a setting; a study may have several."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def check_module(kind: str, path: str) -> None:
    """Refuse a name of Python's own library before anything is imported: nothing in it is a part."""
    if path.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"{kind}: {path!r} is not {word_for(kind)} but part of Python itself")


def check_part(kind: str, path: str, found: Any, like: Iterable[Callable[..., Any]]) -> None:
    """Refuse what is defined in another module, or cannot be called as the parts in `like`."""
    home = home_of(found)
    module = path.partition(":")[0]
    if home and home != module and not home.startswith(f"{module}."):
        raise ConfigError(f"{kind}: {path!r} is defined in {home}, not there; a part is named by its own module")
    parts = list(like)
    fits = has_methods
    # A kind of part is either called, such as an aggregator, or has several methods, such as a tracker.
    if any(call_of(part) for part in parts):
        fits = takes_same_arguments
    if not home or not fits(found, parts):
        raise ConfigError(f"{kind}: {path!r} is not {word_for(kind)}; right would be {right_form(parts)}")


def word_for(kind: str) -> str:
    """The words for a part of that kind, in errors."""
    return WORDS.get(kind, f"a part for {kind!r}")


def home_of(found: Any) -> str:
    """The module in which a function, class or part is defined; empty for anything else."""
    if isinstance(found, functools.partial):
        return home_of(found.func)
    if not inspect.isfunction(found) and not inspect.isclass(found):
        found = type(found) if callable(found) and not inspect.isbuiltin(found) else None
    return str(getattr(found, "__module__", "") or "")


def call_of(part: Any) -> list[inspect.Parameter]:
    """The parameters of a part when it is called; empty if it is not callable."""
    if not inspect.isclass(part):
        return list(inspect.signature(part).parameters.values())
    call = next((vars(c)["__call__"] for c in part.__mro__ if "__call__" in vars(c)), None)
    if inspect.isfunction(call):
        return list(inspect.signature(call).parameters.values())[1:]
    return []


def required(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """The names of required parameters."""
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def takes_same_arguments(found: Any, parts: Iterable[Any]) -> bool:
    """Whether it has as many required parameters as one of the parts; those with a default are settings."""
    return len(required(call_of(found))) in {len(required(call)) for part in parts if (call := call_of(part))}


def has_methods(found: Any, parts: Iterable[Any]) -> bool:
    """Whether it is a class with the methods that all the parts have."""
    return inspect.isclass(found) and all(callable(getattr(found, name, None)) for name in methods(parts))


def methods(parts: Iterable[Any]) -> list[str]:
    """The methods that all of these classes have."""
    names = []
    for part in parts:
        names.append({k for k in dir(part) if not k.startswith("_") and callable(getattr(part, k))})
    return sorted(set.intersection(*names))


def right_form(parts: Iterable[Any]) -> str:
    """A description of the expected part, for errors."""
    calls = [call for part in parts if (call := call_of(part))]
    if not calls:
        return f"a class with {', '.join(methods(parts))}"
    return f"a function, or a class with __call__, of ({', '.join(required(calls[0]))})"
