"""Configuration of recipes: frozen dataclasses, with fields that are set by `key=value` or a TOML file."""

import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import logging
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mutirao.deprecation import former_names
from mutirao.errors import ConfigError
from mutirao.registry import check_module, check_part, is_dotted

log = logging.getLogger("mutirao")

C = TypeVar("C", bound="Common")
Scalar = bool | int | float | str

# The module of each kind; its dictionary NAMES has the parts.
KINDS = {
    "select": "mutirao.selection",
    "aggregate": "mutirao.aggregation",
    "partition": "mutirao.partitioning",
    "available": "mutirao.simulation.availability",
    "devices": "mutirao.simulation.devices",
    "drift": "mutirao.simulation.drift",
    "track": "mutirao.runs.trackers",
    "privacy": "mutirao.privacy",
    "screen": "mutirao.robustness.filters",
    "secure": "mutirao.privacy.secure_aggregation",
    "compress": "mutirao.compression",
    "schedule": "mutirao.training.lr_schedules",
    "personal": "mutirao.personalization",
    "cluster": "mutirao.clustering.groupers",
    "signature": "mutirao.clustering.signatures",
    "per_group": "mutirao.clustering.group_hyperparameters",
}
ENGINES = ("auto", "fused", "stacked", "threads", "processes", "plain")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad")
# Arguments that the run passes to a part; users cannot set these.
HANDED_OVER = {
    "labels",
    "keys",
    "owners",
    "laboratories",
    "slides",
    "queries",
    "x",
    "clients",
    "rng",
    "roster",
    "round",
}


@dataclass(frozen=True)
class Part:
    """A part by name, with its own settings: `Part("dirichlet", {"alpha": 0.5})`.

    >>> resolve(Common, {"partition": {"name": "dirichlet", "alpha": 0.1}}).partition
    Part(name='dirichlet', settings={'alpha': 0.1, 'min_size': 1, 'balance': False})
    """

    name: str
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    home: str = field(default="", repr=False, compare=False)  # the module of a recipe with more parts of this kind


def setting(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, choices: Iterable[str] = ()
) -> Any:
    """A dataclass field with a line of help and the range it must lie in.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Wine(Common):
    ...     hidden: int = setting(16, "width of the hidden layer", low=1)
    >>> resolve(Wine, {"hidden": 0})
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: hidden: 0 is too small, at least 1 is needed
    """
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": tuple(choices)})


def handed_over() -> Any:
    """A field of a part that is filled in by the run, such as the number of classes; users cannot set it.

    >>> @dataclass(frozen=True)
    ... class Smoothed:
    ...     alpha: float = 0.1
    ...     population: int | None = handed_over()
    >>> list(can_set(Smoothed)), Smoothed(population=50)
    (['alpha'], Smoothed(alpha=0.1, population=50))
    """
    return field(default=None, metadata={"handed_over": True})


@dataclass(frozen=True, kw_only=True)
class Common:
    """The settings all recipes share.

    >>> config = resolve(Common, {"rounds": 5}, [("select", "aoiu"), ("select.alpha", 0.7)])
    >>> config.rounds, config.select.name, config.select.settings["alpha"]
    (5, 'aoiu', 0.7)
    """

    seed: int = setting(0, "random seed of the run", low=0, high=2**63 - 1)
    rounds: int = setting(20, "how many rounds", low=1)
    clients: int = setting(50, "how many clients", low=1)
    per_round: int | float = setting(10, "clients selected a round: a count, or a share such as 0.2", low=1e-9)
    epochs: int = setting(1, "epochs: passes over its data a client makes in a round", low=1)
    batch_size: int = setting(32, "samples a step", low=1)
    lr: float = setting(0.1, "learning rate of the clients", low=1e-12)
    momentum: float = setting(0.0, "momentum of the clients' SGD or RMSprop", low=0, high=1)
    weight_decay: float = setting(0.0, "weight decay of the clients' optimiser", low=0)
    optimizer: str = setting("sgd", "optimiser of the clients", choices=OPTIMIZERS)
    schedule: Part = setting(Part("constant"), "schedule of the clients' learning rate by round")
    clip: float = setting(0.0, "largest norm of a client's gradient; larger ones are clipped (0: any)", low=0)
    samples: int = setting(0, "most samples a client uses (0: all)", low=0)
    data: str = setting("", "an embedded set's name, or the path to a data set as published")
    partition: Part = setting(Part("dirichlet"), "how samples are divided among clients")
    select: Part = setting(Part("uniform"), "client selection")
    aggregate: Part = setting(Part("fedavg"), "aggregation method")
    screen: Part = setting(Part("none"), "filter for suspicious updates")
    size_cap: float = setting(10.0, "times the median samples that a client counts for at most (0: any number)", low=0)
    available: Part = setting(Part("always"), "which clients are available in a round (simulated)")
    devices: Part = setting(Part("none"), "how much time and energy the clients' devices take (simulated)")
    drift: Part = setting(Part("none"), "whether clients' data change as training goes on (simulated)")
    privacy: Part = setting(Part("none"), "differential privacy: who adds noise, and how much")
    secure: Part = setting(Part("none"), "secure aggregation: the server sees only the sum of updates")
    compress: Part = setting(Part("none"), "compression of updates")
    personal: Part = setting(Part("none"), "personal models: which part of the model is each client's own")
    cluster: Part = setting(Part("none"), "groups of similar clients with a model each: how they are found")
    signature: Part = setting(Part("projection"), "groups: the signature that a client sends after its warm-up")
    warm_epochs: int = setting(10, "groups: passes over its data a client makes in the warm-up", low=1)
    regroup: int = setting(0, "groups: rounds after which they are formed anew, for data that change (0: never)", low=0)
    references: int = setting(
        0,
        "groups: rounds of FedAvg to compare with at the end, and each client alone (-1: as the run, 0: neither)",
        low=-1,
    )
    per_group: Part = setting(Part("none"), "groups: hyperparameters of each: the same for all, given, or tuned")
    exclude: str = setting("", "clients that take no part, separated by commas")
    engine: str = setting(
        "auto", "how clients are simulated", choices=("auto", "fused", "stacked", "threads", "processes", "plain")
    )
    device: str = setting("cpu", "device to train on: auto, cpu, cuda, cuda:N or mps")
    precision: str = setting("float32", "numbers of a forward pass on a GPU", choices=("float32", "bf16"))
    min_replies: int = setting(0, "usable replies a round needs (0: half of the selected)", low=0)
    wait: float = setting(60.0, "seconds to wait for clients to appear", low=0)
    evaluate_every: int = setting(1, "rounds between evaluations", low=1)
    clients_every: int = setting(
        0, "rounds between evaluations on every client's own test data (0: at the end, -1: never)", low=-1
    )
    keep: int | Literal["few", "all"] = setting(
        "few", "checkpoints kept besides the best: few (the last three, and some early ones), all, or a count", low=1
    )
    keep_bytes: int = setting(
        2 * 2**30, "bytes of checkpoints beyond which the oldest are removed, but not the last", low=0
    )
    track: Part = setting(Part("none"), "tracker for metrics: mlflow or tensorboard")
    centralised: bool = setting(False, "train on the pooled data instead: the centralised baseline")


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt name: the closest valid one, and all of them if they are few."""
    names = sorted(valid)
    if not names:
        return "; it has none"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = ""
    if close:
        hint = f"; did you mean {close[0]!r}?"
    if len(names) <= 20 or not close:
        hint += f" (valid: {', '.join(names)})"
    return hint


def one_line(error: Exception) -> str:
    """The text of an error without line breaks, or its kind if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def load_name(path: str) -> Any:
    """The object behind a dotted path `package.module:name`; a path from a file must have been trusted before."""
    module, _, name = path.partition(":")
    if not is_dotted(path):
        raise ConfigError(f"cannot load {path!r}: it is not of the form package.module:name")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"cannot load {path!r}: {one_line(error)}") from error


def load_part(kind: str, path: str, like: Iterable[Callable[..., Any]]) -> Callable[..., Any]:
    """A user's own part behind a dotted path, checked before it is called."""
    check_module(kind, path)
    found = load_name(path)
    # Some kinds accept parts of other libraries, too: a partitioner of flwr-datasets becomes a partition.
    if kind in KINDS and (adapt := getattr(importlib.import_module(KINDS[kind]), "adapt", None)):
        found = adapt(found)
    try:
        check_part(kind, path, found, like)
    except (TypeError, ValueError, AttributeError) as error:  # not every callable can say what it takes
        raise ConfigError(f"{kind}: the settings of {path!r} cannot be read: {one_line(error)}") from error
    return typing.cast("Callable[..., Any]", found)


def factory(kind: str, part: Part) -> Callable[..., Any]:
    """The part of that kind and name, from the kind's dictionary or by a dotted path."""
    name = part.name
    names: dict[str, Callable[..., Any]] = importlib.import_module(part.home or KINDS[kind]).NAMES
    if ":" in name:
        return load_part(kind, name, names.values())
    if name not in names:
        raise ConfigError(f"{kind}: no part is called {name!r}{nearest(name, names)}")
    return names[name]


def parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The settings of a part: the parameters of its constructor, or of the function itself."""
    found = inspect.signature(make).parameters.items()
    return {k: p for k, p in found if k not in HANDED_OVER and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def can_set(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Those parameters that a user may set: a function's required arguments are passed by the run."""
    if not inspect.isclass(make):
        return {k: p for k, p in parameters(make).items() if p.default is not p.empty}
    own = dataclasses.fields(make) if dataclasses.is_dataclass(make) else ()
    filled_in = {f.name for f in own if f.metadata.get("handed_over")}
    return {k: p for k, p in parameters(make).items() if k not in filled_in}


def retired_of(make: Any) -> Mapping[str, Scalar]:
    """The settings that earlier versions of a part or recipe had, with the constant that each is now."""
    found: Mapping[str, Scalar] = getattr(make, "retired_settings", {})
    return found


def constants_of(config: Any) -> dict[str, Scalar]:
    """The retired settings of a configuration and all its parts, by their full names."""
    found = dict(retired_of(config))
    for kind, part in vars(config).items():
        if isinstance(part, Part):
            found |= {f"{kind}.{key}": value for key, value in retired_of(factory(kind, part)).items()}
    return found


def without_retired(make: Any, given: Mapping[str, Any], kind: str = "") -> dict[str, Any]:
    """The given settings without those of earlier versions that are constants now.

    Old run folders and TOML files still name them. The constant's own value changes nothing and is ignored with a
    warning; any other is refused, because the run could not follow it.

    >>> from types import SimpleNamespace
    >>> phones = SimpleNamespace(retired_settings={"slowest": 10.0})
    >>> without_retired(phones, {"slowest": 10.0, "jitter": 0.2}, "devices")
    {'jitter': 0.2}
    >>> without_retired(phones, {"slowest": 5.0}, "devices")
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: devices.slowest: 5.0 cannot be set any more, it is always 10.0; remove it
    """
    constants = retired_of(make)
    found = {f"{kind}.{key}".lstrip("."): key for key in given if key in constants}
    for name, key in found.items():
        if given[key] != constants[key]:
            raise ConfigError(
                f"{name}: {given[key]!r} cannot be set any more, it is always {constants[key]!r}; remove it"
            )
    if found:
        warn_retired(", ".join(found))
    return {key: value for key, value in given.items() if key not in constants}


@functools.cache  # a run reads its configuration several times
def warn_retired(names: str) -> None:
    """Warn once that settings are ignored."""
    log.warning("%s: ignored, no longer a setting; the value is the constant that is used now", names)


def complete_part(kind: str, part: Part) -> Part:
    """Check a part's settings and add the defaults it would use, so that the configuration is complete."""
    make = factory(kind, part)
    try:
        takes = can_set(make)
        hints = typing.get_type_hints(make_hints(make))
    except Exception as error:  # not every callable can say what it takes, nor every annotation be resolved
        raise ConfigError(f"{kind}: the settings of {part.name!r} cannot be read: {one_line(error)}") from error
    full: dict[str, Scalar] = {}
    for key, value in part.settings.items():
        if key not in takes and key in parameters(make):
            raise ConfigError(f"{kind}.{key} is not a setting of {part.name}: the run fills it in; remove it")
        if key not in takes:
            raise ConfigError(f"{kind}={part.name} has no setting {key!r}{nearest(key, takes)}")
        full[key] = coerce(f"{kind}.{key}", value, hints.get(key, object))
    for key, p in takes.items():
        if key not in full and isinstance(p.default, bool | int | float | str):
            full[key] = p.default
    return Part(part.name, full, part.home)


def make_hints(make: Callable[..., Any]) -> Any:
    """The object with the type hints of a part's settings: for a class its constructor, for a partial its function."""
    if isinstance(make, functools.partial):
        return make.func
    if inspect.isclass(make):
        return make.__init__
    return make


def build(kind: str, part: Part, **offers: Any) -> Any:
    """Make the part; `offers` are values for settings that the part has and the user did not set.

    >>> build("aggregate", Part("fedavgm", {"momentum": 0.5}))
    FedAvgM(lr=1.0, momentum=0.5)
    """
    make = factory(kind, part)
    known = parameters(make)
    given = {k: v for k, v in offers.items() if k in known} | dict(part.settings)
    if not inspect.isclass(make):
        if given:
            return functools.partial(make, **given)
        return make
    try:
        return make(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind}={part.name}: {one_line(error)}") from error


def coerce(key: str, value: Any, hint: Any, low: float | None = None, high: float | None = None) -> Any:
    """`value` as the type that `hint` names, within its range, or a clear refusal."""
    wanted: tuple[Any, ...] = (hint,)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        wanted = typing.get_args(hint)
    words = [word for kind in wanted if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    if value in words:
        return value
    if words and (len(wanted) == 1 or isinstance(value, str)):
        known = list(map(str, words))
        if bool in wanted:
            known = ["true", "false", *known]
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(known)}")
    plain = tuple(k for k in wanted if isinstance(k, type))
    if object in wanted or typing.Any in wanted:
        plain = (bool, int, float, str)
    # TOML guarantees no larger integers, and such a number may be too long to print.
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{key}: the number is too large")
    # A whole number is written for a float, as in lr=1; a bool is an int in Python, but not a number here.
    if isinstance(value, int) and not isinstance(value, bool) and int not in plain and float in plain:
        value = float(value)
    if (isinstance(value, bool) and bool not in plain) or not isinstance(value, plain):
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        right = " or ".join(names.get(k, k.__name__) for k in plain if k is not type(None)) or str(hint)
        raise ConfigError(f"{key}: {value!r} is not {right}")
    # Python reads bytes of the command line that are not UTF-8 as surrogates, which config.toml could not store.
    if isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise ConfigError(f"{key}: {value!r} is not valid Unicode text")
    if not isinstance(value, int | float):
        return value
    if value != value:
        raise ConfigError(f"{key}: must be a finite number, not nan")
    if low is not None and value < low:
        right = f"at least {low} is needed"
        # A tiny `low` stands for an open range: the rate may be anything above 0.
        if 0 < low < 1e-6:
            right = "it must be above 0"
        raise ConfigError(f"{key}: {value!r} is too small, {right}")
    if high is not None and value > high:
        raise ConfigError(f"{key}: {value!r} is too large, must be at most {high}")
    return value


def parse_value(text: str) -> Any:
    """A value as written after `=`: a TOML scalar, or else plain text."""
    try:
        table = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):  # not TOML, a number of too many digits, brackets without end
        return text
    value = table["v"]
    if isinstance(value, bool | int | float | str) and len(table) == 1:
        return value
    return text


def parse_assignment(text: str) -> tuple[str, Any]:
    """`key=value` taken apart.

    >>> parse_assignment("select.alpha=0.5"), parse_assignment("data=~/MQ2008")
    (('select.alpha', 0.5), ('data', '~/MQ2008'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} is not of the form key=value")
    return key.strip(), parse_value(value.strip())


def resolve(recipe_config: type[C], table: Mapping[str, Any], sets: Iterable[tuple[str, Any]] = ()) -> C:
    """The configuration made of defaults, then a TOML table, then single settings, each checked.

    >>> resolve(Common, {"lr": 0.05}, [("rounds", 3)]).rounds
    3
    >>> resolve(Common, {"lrr": 0.05})
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: unknown setting 'lrr'; did you mean 'lr'?
    """
    fields = {f.name: f for f in dataclasses.fields(recipe_config)}
    hints = typing.get_type_hints(recipe_config)
    chosen: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for layer in (flatten(table), sets):
        # Names of parts come before their settings, so that the order of the user's settings does not matter.
        for key, value in sorted(layer, key=lambda pair: is_below(pair[0])):
            name, dot, sub = key.partition(".")
            if name not in fields and not without_retired(recipe_config, {key: value}):
                continue
            if name not in fields:
                raise ConfigError(f"unknown setting {key!r}{nearest(name, fields)}")
            if dot and hints[name] is not Part:
                raise ConfigError(f"unknown setting {key!r}: {name!r} has no settings of its own")
            if is_below(key):
                below.setdefault(name, {})[sub] = value
            elif hints[name] is not Part:
                chosen[name] = value
            elif value != {}:  # an empty table sets nothing
                # To another part the settings of the one before do not apply.
                if value != chosen.get(name, fields[name].default.name):
                    below.pop(name, None)
                chosen[name] = value
    values: dict[str, Any] = {}
    for name, f in fields.items():
        meta = f.metadata
        if hints[name] is Part:
            part: Part = f.default  # type: ignore[assignment]  # a part setting always has a default
            if name in chosen:
                wanted = coerce(name, chosen[name], str)
                if wanted != part.name:
                    part = Part(wanted, home=part.home)
            values[name] = resolve_part(name, part, below.get(name, {}))
        else:
            value = chosen.get(name, f.default)
            values[name] = coerce(name, value, hints[name], meta.get("low"), meta.get("high"))
            if meta.get("choices") and values[name] not in meta["choices"]:
                raise ConfigError(f"{name}: {value!r} is not a choice{nearest(str(value), meta['choices'])}")
    return recipe_config(**values)


def resolve_part(kind: str, part: Part, given: Mapping[str, Any]) -> Part:
    """A recipe's part with the user's settings; the recipe's own settings are dropped if they conflict with these."""
    if given:
        given = without_retired(factory(kind, part), given, kind)
    both = (Part(part.name, own, part.home) for own in ({**part.settings, **given}, dict(given)))
    full, alone = (complete_part(kind, each) for each in both)
    if given and is_refused(kind, full) and not is_refused(kind, alone):
        return alone
    return full


def is_refused(kind: str, part: Part) -> bool:
    """Whether the part itself refuses its settings."""
    try:
        build(kind, part)
    except ConfigError:
        return True
    return False


def validate(recipe_config: type[C], given: Any) -> C:
    """A configuration from Python (a configuration, a table of settings or None), checked as on the command line."""
    table = dict(given or {}) if given is None or isinstance(given, Mapping) else dict(vars(given))
    parts = {k: {"name": v.name, **v.settings} for k, v in table.items() if isinstance(v, Part)}
    return resolve(recipe_config, table | parts)


def is_below(key: str) -> bool:
    """Whether the key is a setting of a part (`select.count`) and not its name (`select`, `select.name`)."""
    _, dot, sub = key.partition(".")
    return bool(dot) and sub != "name"


def flatten(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A TOML table as `key` and `key.sub` pairs."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            pairs += [(f"{key}.{sub}", v) for sub, v in value.items()]
        else:
            pairs.append((key, value))
    return pairs


def dump(recipe: str, config: Any) -> str:
    """The configuration as TOML; reading it back gives the same one.

    >>> print(dump("quickstart", resolve(Common, {"rounds": 5})).splitlines()[:3])
    ['recipe = "quickstart"', 'seed = 0', 'rounds = 5']
    """
    plain = [f"recipe = {toml_string(recipe)}"]
    tables = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, Part):
            tables += [f"\n[{f.name}]", f"name = {toml_string(value.name)}", *toml_lines(value.settings)]
        else:
            plain += toml_lines({f.name: value})
    return "\n".join(plain + tables) + "\n"


def toml_lines(values: Mapping[str, Scalar | None]) -> list[str]:
    """`key = value` lines of TOML; None is left out, as TOML has no null."""
    lines = []
    for key, value in values.items():
        if value is None:
            continue
        # TOML allows only ASCII in a key without quotes.
        name = key if key.isascii() else toml_string(key)
        lines.append(f"{name} = {write_value(value)}")
    return lines


def write_value(value: Scalar) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        if value:
            return "true"
        return "false"
    if isinstance(value, str):
        return toml_string(value)
    return repr(value)


def toml_string(text: str) -> str:
    """Text as a TOML string: JSON's, but characters stand for themselves and DEL is escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_toml(path: Path) -> dict[str, Any]:
    r"""A TOML file as a table, or a ConfigError of one line.

    >>> _ = Path("mine.toml").write_text('recipe = "quickstart"\nrounds = 5\n[aggregate]\nname = "fedyogi"\n')
    >>> read_toml(Path("mine.toml"))
    {'recipe': 'quickstart', 'rounds': 5, 'aggregate': {'name': 'fedyogi'}}
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {one_line(error)}") from error


if not TYPE_CHECKING:  # a module-level __getattr__ would let every misspelt name pass
    __getattr__ = former_names(
        __name__,
        {
            "complete": "complete_part",
            "read": "read_toml",
        },
    )
