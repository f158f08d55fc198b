"""The rules of a site's `policy.toml`: whatever they do not allow is refused."""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mutirao.config import coerce, nearest, parse_assignment, read_toml
from mutirao.core.fleet import Scalar
from mutirao.deploy.policy.pins import ARCHITECTURE, check_pins, content_hash, pin_lines
from mutirao.errors import ConfigError, Refused
from mutirao.privacy.accounting import Accountant
from mutirao.selection import PROBE_SAMPLES

NOT_SETTINGS = {"recipe", "set", "out", "resume", "timeout"}  # keys of a run configuration that set nothing in a recipe
PATH_MARKS = (":", "/", "\\", "~")  # text that may name code or files
REPEATABLE = "repeatable"  # the setting that derives noise from the run's seed, which is known to the server
PREDICTABLE = "noise from the run's seed can be subtracted by anyone with the seed; only the site may allow it"
PAUSED = "paused"  # a file beside the policy: the site's pause switch
SPENT = ("epsilon", "epsilon_next")  # metrics of the privacy account, which reveal no data


@dataclass(frozen=True)
class RequestRules:
    """What may be asked of the site.

    >>> RequestRules(requests=("train", "evaluate"), min_samples=20).min_samples
    20
    """

    requests: tuple[str, ...] = ()
    min_samples: int = 1  # of those used, and of those left out if any are
    probe_samples: int = PROBE_SAMPLES  # exactly: two probes that differ by one sample would reveal that sample
    names: tuple[str, ...] = ()  # paths and dotted names the server may set, letter by letter
    extras: tuple[str, ...] = ()  # what may come in besides the model; names may hold `*`
    told: tuple[str, ...] = ()  # hyperparameters that a method may send, `name=value`; they may hold `*`


@dataclass(frozen=True)
class ReplyRules:
    """What may leave the site; names may hold `*`.

    >>> ReplyRules(arrays=("*",), metrics=("loss",)).metrics
    ('loss',)
    """

    arrays: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    remove: bool = False  # other metrics and extras are taken out, instead of refusing the reply
    largest: int = 64 * 2**20  # bytes
    decimals: int = 17  # of metrics; 17: as they are
    samples_step: int = 1  # the number of samples is rounded down to a multiple


@dataclass(frozen=True)
class PrivacyRules:
    """Clipping and noise the site adds by itself, and how much privacy it is willing to spend."""

    clip: float = 0.0
    noise: float = 0.0
    budget: float = 0.0
    run_budget: float = 0.0
    delta: float = 1e-5
    accountant: Accountant = "rdp"


@dataclass(frozen=True)
class Policy:
    """All a site allows; `recipes` maps names to content hashes, `settings` replace those the server sends.

    `pinned` are, by recipe, settings that must be as they are there, and the model's architecture.

    >>> policy = Policy(asked=RequestRules(requests=("train",)))
    >>> policy.approve("quickstart", {})
    Traceback (most recent call last):
        ...
    mutirao.errors.Refused: recipes: 'quickstart' is not allowed here
    """

    recipes: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    pinned: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    asked: RequestRules = field(default_factory=RequestRules)
    reply: ReplyRules = field(default_factory=ReplyRules)
    privacy: PrivacyRules = field(default_factory=PrivacyRules)
    audit: Path = Path("audit.jsonl")
    ledger: Path = Path("ledger.json")
    paused: Path = Path(PAUSED)  # while this file is there, nothing is answered

    def __post_init__(self) -> None:
        cover = self.privacy
        reply = self.reply
        if cover.noise and not cover.clip:
            raise ConfigError("privacy.noise needs privacy.clip: noise is measured against the longest update")
        exposed = [name for name in reply.metrics if name not in SPENT]
        if cover.noise:
            exposed += reply.extras
        if (cover.budget or cover.run_budget) and exposed:
            raise ConfigError("with a privacy budget reply.extras and reply.metrics must be empty: they are not noised")

    def approve(self, recipe: str, run_config: Mapping[str, Scalar], replaces: bool = True) -> None:
        """Refused unless the site allows this recipe, as it is installed, with these settings; nothing is imported.

        `replaces`: whether `settings` take the place of what the server says, which the site's own code may read.
        """
        if fault := self.fault_of(recipe):
            raise Refused("recipes", fault)
        for key, value in assignments(run_config):
            if replaces and key in self.settings:
                continue
            # The server may repeat what the site itself has written into its policy.
            agreed = value in self.asked.names or value == self.pinned.get(recipe, {}).get(key)
            if isinstance(value, str) and may_name_code(value) and not agreed:
                raise Refused("asked.names", f"{key}={value!r} may name code or files; the server may not choose those")
            # The recipe is not imported yet, so that its settings are unknown: any key that contains the word counts.
            if REPEATABLE in key.lower() and value is not False:
                raise Refused(f"settings.{key}", PREDICTABLE)

    def hold(self, recipe: str, settings: Mapping[str, Scalar], replaces: bool = True) -> None:
        """Refused if a setting, as it would be used, makes noise predictable or is not what it is pinned to."""
        instead = self.settings if replaces else {}
        for key in repeatable_settings(settings):
            if instead.get(key) is not True:  # only the site itself may say so
                raise Refused(f"settings.{key}", PREDICTABLE)
        check_pins({k: v for k, v in self.pinned.get(recipe, {}).items() if k not in instead}, settings)

    def fault_of(self, recipe: str) -> str:
        """Why a recipe, as it is installed, may not run here; empty if it may."""
        if recipe not in self.recipes:
            return f"{recipe!r} is not allowed here"
        try:
            found = content_hash(recipe)
        except ConfigError as error:
            return str(error)
        same = found == self.recipes[recipe]
        if same:
            return ""
        return f"{recipe!r} is installed with other content than allowed: {found[:19]}..."


def repeatable_settings(settings: Mapping[str, Scalar]) -> list[str]:
    """The settings that derive noise from the run's seed."""
    return [k for k, v in settings.items() if k.lower().endswith(REPEATABLE) and v is not False]


def assignments(run_config: Mapping[str, Scalar]) -> list[tuple[str, Any]]:
    """Every setting in a run configuration, those of parts after the parts, then those in its `set`."""
    plain = sorted(((k, v) for k, v in run_config.items() if k not in NOT_SETTINGS), key=lambda pair: "." in pair[0])
    try:
        more = [parse_assignment(text) for text in shlex.split(str(run_config.get("set", "")))]
    except ValueError as error:
        raise ConfigError(f"set={run_config['set']!r} is not a list of key=value: {error}") from error
    return [*plain, *more]


def may_name_code(value: str) -> bool:
    """Whether a text may name code or files."""
    return any(mark in value for mark in PATH_MARKS)


def is_allowed(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of those, or fits one with `*` in it."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def load_policy(path: Path) -> Policy:
    """The policy in a file; ConfigError names a key that is unknown or wrong. Its records lie beside it."""
    table = read_toml(path)
    kinds = {"asked": RequestRules, "reply": ReplyRules, "privacy": PrivacyRules, "records": RecordPaths}
    known = {"recipes", "settings", "pinned", *kinds}
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, known)}")
        if not isinstance(table[key], dict):
            raise ConfigError(f"{path}: {key!r} is a table: write [{key}]")
    recipes = {k: coerce(f"{path}: recipes.{k}", v, str) for k, v in table.get("recipes", {}).items()}
    settings = flat_settings(path, "settings", table.get("settings", {}))
    pinned = read_pins(path, table.get("pinned", {}))
    parts = {name: read_section(path, name, table.get(name, {}), kind) for name, kind in kinds.items()}
    parts |= {k: path.parent / Path(file).expanduser() for k, file in vars(parts.pop("records")).items()}
    try:
        return Policy(recipes, settings, pinned, **parts, paused=path.parent / PAUSED)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


@dataclass(frozen=True)
class RecordPaths:
    """Where the site writes down what happened; a relative path is beside the policy."""

    audit: str = "audit.jsonl"
    ledger: str = "ledger.json"


def read_section(path: Path, name: str, table: Mapping[str, Any], kind: type[Any]) -> Any:
    """A table of the file as the dataclass that describes it."""
    known = {f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}: {name}.{key}"
        if key not in known:
            raise ConfigError(f"{where} is unknown{nearest(key, known)}")
        default = known[key].default
        if isinstance(default, tuple):
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise ConfigError(f"{where}: {value!r} is not a list of texts")
            values[key] = tuple(value)
        elif key == "accountant":
            values[key] = coerce(where, value, Accountant)
        else:
            values[key] = coerce(where, value, type(default), low=0 if isinstance(default, int | float) else None)
            if isinstance(values[key], float) and not math.isfinite(values[key]):
                raise ConfigError(f"{where}: {value!r} is not a finite number")
    if not 0 < values.get("delta", 0.5) < 1:
        raise ConfigError(f"{path}: {name}.delta must be above 0 and below 1")
    if values.get("samples_step", 1) < 1:
        raise ConfigError(f"{path}: {name}.samples_step must be at least 1")
    return kind(**values)


def flat_settings(path: Path, where: str, table: Mapping[str, Any]) -> dict[str, Scalar]:
    """Settings in a table of the file, `key` or `part.key`."""
    out: dict[str, Scalar] = {}
    for key, value in table.items():
        pairs = {key: value}
        if isinstance(value, dict):
            pairs = {f"{key}.{sub}": v for sub, v in value.items()}
        for name, v in pairs.items():
            out[name] = coerce(f"{path}: {where}.{name}", v, Any)
    return out


def read_pins(path: Path, table: Mapping[str, Any]) -> dict[str, dict[str, Scalar]]:
    """What each recipe is pinned to."""
    out: dict[str, dict[str, Scalar]] = {}
    for recipe, pins in table.items():
        if not isinstance(pins, dict):
            raise ConfigError(f"{path}: pinned.{recipe} is a table: write [pinned.RECIPE]")
        out[recipe] = flat_settings(path, f"pinned.{recipe}", pins)
        if not re.fullmatch("sha256:[0-9a-f]{64}", str(out[recipe].get(ARCHITECTURE, f"sha256:{'0' * 64}"))):
            raise ConfigError(f"{path}: pinned.{recipe}.{ARCHITECTURE} is not a digest such as sha256:12ab...")
    return out


def policy_template(recipes: Iterable[str] = (), sets: Iterable[tuple[str, Any]] = ()) -> str:
    """A policy that allows nothing yet but these recipes as they are installed, with a word on every key.

    They are pinned to their settings: the defaults, or what `sets` says.
    """
    names = list(recipes)
    agreed = tuple(sets)
    hashes = "\n".join(f'"{name}" = "{content_hash(name)}"' for name in names)
    pins = "\n\n".join(pin_lines(name, agreed) for name in names)
    text = TEMPLATE.replace("@RECIPES@", hashes or '# quickstart = "sha256:..."')
    return text.replace("@PINS@", pins or "# [pinned.quickstart]\n# batch_size = 16")


TEMPLATE = """\
# What this site allows. It belongs to the site: nothing the server sends can change it.
# Whatever is not allowed here is refused, each decision is written to the audit trail, and the server learns
# which rule it was. Check it with: mutirao site check policy.toml

[recipes]
# The recipes that may run, each with the hash of its content (mutirao site hash NAME).
# After an upgrade of mutirao the hash is another one: look at what changed, then allow it again.
@RECIPES@

[settings]
# Settings this site insists on, whatever the server says: where its data lie, how much it computes.
# data = "/srv/mutirao/data"
# epochs = 1
# secure = "secagg+"  # the server sees sums of updates alone, and nothing is answered in the clear
# Noise that a run derives from its seed, so that the server can subtract it, is refused unless allowed here:
# privacy.repeatable = true

# Settings of a run that must be as they are here, or it is refused: with another model, batch size or number of steps
# a server could read single samples out of an update (see: mutirao drill leak). They are the recipe's own, as it is
# installed; change them to what all sites agree on. A line that is taken out leaves that setting to the server.
@PINS@

[asked]
# Kinds of requests: agree (whether this site has what all must have in common; without it, it takes no part), train (an
# update of the model), evaluate (metrics on local data), probe (the same, on a few); for tables profile (columns,
# counts, means, common categories).
requests = []
# With fewer samples than this used, or fewer than this left out of those that are here, nothing leaves.
min_samples = 50
# On how many samples a model is probed: on this many, no more and no fewer.
probe_samples = 100
# Paths or dotted names that the server may use in settings; without this it may send only numbers and plain names.
names = []
# Arrays that a request may carry besides the model, by name, such as the schema of tables; * stands for any letters.
extras = []
# Hyperparameters that the server's method may send, such as "mu=0.1", the pull of FedProx towards the model that
# was sent. A server that chooses it freely can undo all steps but the last, and read single samples out of an update.
told = []

[reply]
# What may leave, by name; * stands for any letters. arrays = ["*"] allows the whole model.
arrays = []
# The extra squared_errors, which FedRisk needs, reveals the error of each single sample. Beside the answer to agree a
# site may send its "versions", and "counts": how many samples it has of each class.
extras = []
metrics = []
# true: other metrics and extras are taken out; false: a reply that has any is refused.
remove = false
# Most bytes of a reply.
largest = 67108864
# Metrics are rounded to so many decimals (17: as they are).
decimals = 3
# The number of samples is rounded down to a multiple of this (1: as it is).
samples_step = 10

[privacy]
# The longest update that leaves (0: any length); longer ones are shortened.
clip = 0.0
# Gaussian noise on each number of the update, as a multiple of clip (0: none).
noise = 0.0
# The most epsilon this site spends: over all runs together, and in one run (0: it keeps no account).
# With a budget, a run must add noise: by the line above, or by its own privacy=local or privacy=dpsgd.
budget = 0.0
run_budget = 0.0
delta = 1e-5
# rdp (quick) or prv (tighter, slower).
accountant = "rdp"

[records]
# Where decisions and spending are written down, beside this file. Keep both: a lost ledger is a lost account.
audit = "audit.jsonl"
ledger = "ledger.json"
"""
