"""What was run, in one sentence: method, data, partition, clients, rounds, and what differs from the recipe's defaults.

A configuration is read as its file holds it, so that a run of any age, state or origin can be told of.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from mutirao.config import Part, dump, factory
from mutirao.errors import ConfigError
from mutirao.recipes.task import NAMES, PYTHON
from mutirao.runs.defaults import Table, declares, defaults_of, home_of, kind_of, own_defaults
from mutirao.runs.defaults import differences as differences
from mutirao.runs.reader import Record
from mutirao.runs.wording import clip, count, joined, listed, say, say_share, say_value

MOST = 8  # settings that are named
HANDED = {"data", "model", "test", "loss", "transform"}  # what Python hands over is no setting
# Told before the semicolon, so not again behind it.
TOLD = {"aggregate", "method", "data", "partition", "clients", "per_round", "rounds", "select", "cluster"}
TOLD |= {"personal", "privacy", "secure", "centralised", "sites", "attack", "liars", "populations"}
DEALT = {
    "dirichlet": "by Dirichlet labels",
    "iid": "at random (IID)",
    "even": "evenly",
    "natural": "by the user they belong to",
    "by_key": "by the key they carry",
    "auto": "by owner, or evenly where none is known",
    "quantity": "in Dirichlet sizes",
    "noise": "evenly, with noise",
}
PRIVATE = {"central": "central differential privacy", "local": "local differential privacy", "dpsgd": "DP-SGD"}
FOUND = {"name", "epsilon", "budget", "noise", "rounds", "batch_size", "epochs"}  # of privacy: one, or worked out
MADE_UP = ("generated", "synthetic")  # data without a name


def describe(
    config: Table,
    *,
    made: int | None = None,
    clients: int | None = None,
    dealt: bool | None = None,
    base: Table | None = None,
) -> str:
    """The run of a configuration, a table as in config.toml, in one sentence.

    `made` are the rounds there are, if fewer than planned, `clients` those that were found, `dealt` whether the
    partition dealt the samples to them, and `base` the defaults of a recipe that is not one of Mutirão's.

    >>> describe({"recipe": "quickstart", "lr": 0.1, "aggregate": {"name": "fedyogi"}})
    "FedYogi on digits, dealt to 50 clients by Dirichlet labels (alpha 0.3), 10 a round for 40 rounds; \
otherwise the quickstart recipe's defaults except lr 0.1."
    """
    full = Told(config, base)
    clauses = [full.method(), full.holders(clients, dealt), full.rounds(made, clients), *full.guards()]
    but = [say(key, value) for key, value in joined(full.apart.items()) if key.partition(".")[0] not in full.told]
    if len(but) > MOST:
        but[MOST - 1 :] = [f"{len(but) - MOST + 1} more settings"]
    rest = f"otherwise {full.whose}{' except ' + listed(but) if but else ''}"
    return f"{', '.join(clause for clause in clauses if clause)}; {rest}."


def describe_settings(recipe: str, config: Any) -> str:
    """A run that is about to begin, in one sentence."""
    return describe(tomllib.loads(dump(recipe, config)), base=own_defaults(type(config)))


def describe_run(record: Record) -> str:
    """The run in a folder in one sentence."""
    began = next((e for e in record.events if e.get("event") == "started"), {})
    wanted, counted = record.config.get("rounds"), record.summary.get("clients")
    return describe(
        record.config,
        made=record.rounds if isinstance(wanted, int) and record.rounds < wanted else None,
        clients=counted if isinstance(counted, int) else None,
        **known_of(began),
    )


def known_of(began: Table) -> dict[str, Any]:
    """What the first event of a trail tells of a run: its recipe's defaults, and whether the partition dealt."""
    base, dealt = began.get("defaults"), began.get("dealt")
    return {"base": base if isinstance(base, Mapping) else None, "dealt": dealt if isinstance(dealt, bool) else None}


class Told:
    """A configuration with its defaults filled in, and the clauses that tell of it."""

    def __init__(self, config: Table, base: Table | None) -> None:
        self.recipe = str(config.get("recipe", ""))
        usual = defaults_of(self.recipe, base)
        self.all: dict[str, Any] = {**usual, **config}
        self.apart = differences(config, base)
        from_python = self.recipe == PYTHON
        texts = {key for key in ("hidden", "client") if isinstance(self.all.get(key), str)}  # else another setting
        self.told = TOLD | texts | (HANDED if from_python else set())
        self.deals = "partition" in (base or {}) or declares(kind_of(self.recipe), "partition")
        self.whose = f"the {clip(self.recipe)} recipe's defaults" if self.recipe else "the defaults"
        if from_python:
            self.whose = "the defaults of mutirao.run"
        elif self.recipe not in NAMES and base is None:
            self.whose = "Mutirão's defaults"

    def is_set(self, key: str) -> bool:
        """Whether a setting, or one of the part that it names, is not the default."""
        return any(apart.partition(".")[0] == key for apart in self.apart)

    def name(self, kind: str) -> str:
        """Which part of that kind there is."""
        found = self.all.get(kind)
        return str(found.get("name", "")) if isinstance(found, Mapping) else ""

    def part(self, kind: str, always: Iterable[str] = ()) -> str:
        """A part as it is called, with its settings that are not usual and those that are `always` told."""
        found = self.all.get(kind)
        settings = {k: v for k, v in found.items() if k != "name"} if isinstance(found, Mapping) else {}
        shown = {k: v for k, v in settings.items() if f"{kind}.{k}" in self.apart or k in always}
        inside = ", ".join(say(key, value) for key, value in shown.items())
        return self.spell(kind) + (f" ({inside})" if inside else "")

    def spell(self, kind: str) -> str:
        """The name of a part as its paper writes it, which is that of its class."""
        name = self.name(kind)
        try:
            made = None if ":" in name else factory(kind, Part(name, {}, home_of(self.recipe, kind)))
        except (ConfigError, KeyError, ImportError):
            made = None
        called = str(getattr(made, "__name__", ""))
        if called.lower() == re.sub(r"\W|_", "", name.lower()):
            return called
        return f"Fed{name[3:].capitalize()}" if name.startswith("fed") else clip(name.rpartition(":")[2])

    def method(self) -> str:
        """What trained on which data."""
        on = f"on {self.data()}"
        if self.all.get("centralised"):
            trees = self.all["centralised"] == "lightgbm"
            return f"{'LightGBM' if trees else 'Centralised training'} {on}, all samples pooled in one place"
        method = self.part("aggregate")
        if isinstance(self.all.get("method"), Mapping):  # a recipe whose clients train by a method of its own
            method = self.part("method") + (f" joined by {method}" if self.is_set("aggregate") else "")
        cluster, personal = self.name("cluster"), self.name("personal")
        if cluster == "alone":
            method = "Every client alone"
        elif cluster == "one":
            method += " with everybody in one group"
        elif cluster not in ("", "none"):
            found = "automatically" if cluster == "auto" else f"by {self.part('cluster')}"
            method += f" with a model for each group of clients (found {found})"
        if personal not in ("", "none"):
            method += f" with personal models by {self.part('personal')}"
        return f"{method} {on}"

    def data(self) -> str:
        """The data by its name, or the last part of its path."""
        text = str(self.all.get("data") or "")
        if self.recipe == PYTHON:
            kind, _, many = text.rpartition(", ")[0].partition(", ")
            model = str(self.all.get("model") or "").partition(",")[0].partition(" ")[0]
            given = f"{clip(many)} from Python ({clip(kind)})" if many else "data from Python"
            return given + (f" with the model {clip(model)}" if model else "")
        name = PurePath(text.replace("\\", "/")).name if is_path(text) else text
        return clip(f"{name} data" if name in MADE_UP else name) or "its own data"

    def holders(self, clients: int | None, dealt: bool | None) -> str:
        """Who holds the data, and how they came by it."""
        many = self.clients(clients)
        if self.all.get("centralised"):
            return ""
        if self.all.get("sites"):
            return f"{many} sites with data of their own" if many else "sites with data of their own"
        hidden = self.all.get("hidden")
        if isinstance(hidden, str) and hidden not in ("", "none"):
            return f"{who(many)} of {self.all.get('populations')} hidden populations (by {hidden})"
        if self.name("partition") == "dealt" or dealt is False:
            return f"{who(many)} with data of their own"
        if column := self.all.get("client"):
            return f"{who(many)} by the column {clip(str(column))}"
        if not (dealt or self.is_set("partition") or (self.deals and not is_path(self.all.get("data")))):
            return who(many)  # what comes in files may come dealt
        if self.name("partition") == "shared":
            return f"{who(many)} who share all queries"
        return f"dealt to {who(many)} {self.dealing()}"

    def dealing(self) -> str:
        """How the partition deals."""
        name = self.name("partition")
        inside = self.part("partition", ALWAYS).removeprefix(self.spell("partition"))
        return DEALT.get(name, f"by {clip(name.rpartition(':')[2].removeprefix('by_').replace('_', ' '))}") + inside

    def clients(self, found: int | None) -> int:
        """How many clients there are; 0: all that the data has."""
        told = found if found else self.all.get("clients")
        return told if isinstance(told, int) and not isinstance(told, bool) else 0

    def rounds(self, made: int | None, found: int | None) -> str:
        """Who takes part in a round, and for how many."""
        wanted = self.all.get("rounds")
        span = f"{made} of {count(wanted, 'round')}" if made is not None else count(wanted, "round")
        if self.all.get("centralised"):
            return "" if self.all["centralised"] == "lightgbm" else f"for {span}"
        asked, select = self.asked(self.clients(found)), self.name("select")
        chosen = f" chosen by {self.part('select')}" if asked != ALL and select not in ("", "uniform") else ""
        return f"{asked}{chosen} for {span}"

    def asked(self, clients: int) -> str:
        """How many take part in a round."""
        share = self.all.get("per_round")
        whole = clients if isinstance(share, int) else 1.0
        if self.name("select") == "everyone" or (isinstance(share, int | float) and 0 < whole <= share):
            return ALL
        some = say_share(share) if isinstance(share, float) else say_value(share)
        return f"{some}{' of each group' if self.name('cluster') not in UNGROUPED else ''} a round"

    def guards(self) -> Iterable[str]:
        """Privacy, secure aggregation and simulated liars, if there are any."""
        if (privacy := self.name("privacy")) not in ("", "none"):
            found, kind = self.all["privacy"], PRIVATE.get(privacy, f"differential privacy by {self.spell('privacy')}")
            asked = next(((k, found[k]) for k in ("epsilon", "budget", "noise") if found.get(k)), ("", ""))
            rest = [(k, v) for k, v in found.items() if f"privacy.{k}" in self.apart and k not in FOUND]
            inside = ", ".join(say(key, value) for key, value in (asked, *rest) if key)
            yield f"with {kind}{f' ({inside})' if inside else ''}"
        if self.name("secure") not in ("", "none"):
            yield f"with secure aggregation ({self.part('secure')})"
        if self.name("attack") not in ("", "none"):
            yield f"{say_share(self.all.get('liars'))} of them lying ({self.part('attack')})"


ALL = "all in every round"
UNGROUPED = ("", "none", "alone", "one")
ALWAYS = ("alpha", "beta", "classes", "per_client", "sigma")  # how skewed a partition is


def is_path(data: Any) -> bool:
    """Whether data is named by a path, and not by the name of a set."""
    return isinstance(data, str) and ("/" in data or "\\" in data)


def who(many: int) -> str:
    """So many clients; 0: as many as there are."""
    return count(many, "client") if many else "all its clients"
