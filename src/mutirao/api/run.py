"""`mutirao.run`: a model and data, or a recipe by name, run as the command line runs it."""

import dataclasses
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mutirao.api.result import Result
from mutirao.config import Common, Part, can_set, coerce, factory, flatten, is_below, nearest, read_toml, resolve
from mutirao.errors import ConfigError
from mutirao.experiments.presets import expand
from mutirao.experiments.task import NAMES, PYTHON, Recipe, find
from mutirao.partitioning.flwr_partitioners import is_partitioner
from mutirao.report import execute
from mutirao.runs.execute import MAY_CHANGE, default_out, different_settings, name_recipe
from mutirao.runs.progress import Progress, in_notebook
from mutirao.runs.reader import Record
from mutirao.runs.trust import check_trust, distrust, is_own_run
from mutirao.training.lr_schedules import has_same_past

Pairs = tuple[tuple[str, Any], ...]


def route(config: type[Common], keywords: Mapping[str, Any]) -> Pairs:
    """Keywords as pairs that `resolve` takes; `alpha` is `partition.alpha` if the chosen partition alone has it.

    >>> route(Common, {"partition": "dirichlet", "alpha": 0.3, "aggregate": {"name": "fedyogi", "lr": 0.02}})
    (('partition', 'dirichlet'), ('partition.alpha', 0.3), ('aggregate.name', 'fedyogi'), ('aggregate.lr', 0.02))
    """
    pairs = flatten({key: as_plain(value) for key, value in keywords.items() if value is not None})
    known = {f.name for f in dataclasses.fields(config)}
    parts = parts_chosen(config, pairs)
    return tuple((key if key.partition(".")[0] in known else home_of(key, known, parts), value) for key, value in pairs)


def as_plain(value: Any) -> Any:
    """A value as a TOML file would hold it."""
    if isinstance(value, Part):
        return {"name": value.name, **value.settings}
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner) for key, inner in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return value


def parts_chosen(config: type[Common], pairs: list[tuple[str, Any]]) -> dict[str, Part]:
    """The part of each kind: the one that was named, or else the default."""
    hints = typing.get_type_hints(config)
    chosen: dict[str, Part] = {f.name: f.default for f in dataclasses.fields(config) if hints[f.name] is Part}  # type: ignore[misc]
    for key, value in pairs:
        kind = key.partition(".")[0]
        if kind in chosen and not is_below(key) and value != {}:
            chosen[kind] = Part(coerce(kind, value, str), home=chosen[kind].home)
    return chosen


def home_of(key: str, known: set[str], parts: Mapping[str, Part]) -> str:
    """The full name of a setting that is known by its last name alone."""
    takes = {kind: can_set(factory(kind, part)) for kind, part in parts.items()}
    homes = [kind for kind, settings in takes.items() if key in settings]
    if len(homes) == 1:
        return f"{homes[0]}.{key}"
    if homes:
        named = " and ".join(f"{kind}={parts[kind].name}" for kind in homes)
        right = f'say which, such as settings={{"{homes[0]}.{key}": ...}}'
        raise ConfigError(f"{key!r} is a setting of {named}; {right}")
    raise ConfigError(f"unknown setting {key!r}{nearest(key, known | {s for own in takes.values() for s in own})}")


if TYPE_CHECKING:
    from torch import nn

    from mutirao.api.recipe import Handed

Mode = Literal["auto", "lines", "quiet"]


def run(
    model: Any = None,
    /,  # recipes have a setting of that name, too
    data: Any = None,
    *,
    target: str | None = None,
    client: str | None = None,
    test: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    transform: Any = None,
    rounds: int | None = None,
    clients: int | None = None,
    per_round: int | float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    partition: Any = None,
    select: Any = None,
    aggregate: Any = None,
    seed: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    progress: Mode = "auto",
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Result:
    """Train `model` on `data` over many clients, into a run folder, and return the result.

    `model` is a torch module, which stays unchanged and gives the initial weights, or a class or function that makes
    one, initialised by the seed. `data` is a pair (x, y), a Dataset, a DataLoader, a frame, a table or a dict of
    columns (`target` names the column to learn), split by `partition`; or a dict of clients; or columns, of which
    `client` names the client each row belongs to. `test` is the share held out for testing, or another data set. `loss`
    and `optimizer` are torch's or your own: by default cross-entropy of classes, squared error of numbers, and SGD.
    `partition` may be a partitioner of flwr-datasets, which then says how many clients there are.

    The name of a recipe, a `Recipe` or the path of a config.toml may stand in the place of both. All other keywords are
    settings, as `mutirao list RECIPE` shows them; a part's own may be given by their name alone.

    >>> import torch
    >>> from torch import nn
    >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> result = run(lambda: nn.Linear(4, 2), (x, y), clients=5, alpha=1.0, rounds=10, lr=0.5, out="runs/doc")
    >>> result.best["accuracy"] > 0.8, type(result.model()).__name__
    (True, 'Linear')
    """
    own = {"rounds": rounds, "clients": clients, "per_round": per_round, "epochs": epochs, "batch_size": batch_size}
    partitioner = partition if is_partitioner(partition) else None
    own |= {
        "lr": lr,
        "partition": None if partitioner else partition,
        "select": select,
        "aggregate": aggregate,
        "seed": seed,
        "optimizer": optimizer,
    }
    what = more.pop("model", None) if model is None else model
    entry = enter(
        what, data, target=target, client=client, test=test, loss=loss, transform=transform, partitioner=partitioner
    )
    name, recipe = name_recipe(entry.recipe)
    config = resolve(recipe.config, {}, entry.settle({**own, **more, **(settings or {})}))
    folder = Path(out) if out is not None else default_out(name, resume)
    check_folder(folder, name, config, resume)
    with Progress(config.rounds, mode=how_shown(progress)) as watch:
        summary = execute(entry.recipe, config, folder, resume=resume, watch=watch)
    handed = entry.handed
    return Result(folder, handed.model.make if handed else lambda: module_of(recipe, config), summary)


@dataclass(frozen=True)
class Entry:
    """What to run, the settings it implies, and the model and data, if they were passed."""

    recipe: str | Recipe
    base: Mapping[str, Any]
    handed: "Handed | None" = None

    def settle(self, keywords: Mapping[str, Any]) -> Pairs:
        """All settings; keywords override those it implies."""
        given = {key: value for key, value in keywords.items() if value is not None}
        if self.handed is not None:
            given = self.handed.take(given)
        return route(self.config, {**self.base, **given})

    @property
    def config(self) -> type[Common]:
        """The class of its settings."""
        return (self.recipe if isinstance(self.recipe, Recipe) else find(self.recipe)).config


def enter(model: Any, data: Any, **handed: Any) -> Entry:
    """What to run: a model with data, a recipe, its name, or the path of a configuration."""
    if model is None:
        raise ConfigError("model: expected a torch module, a function that makes one, or a recipe's name, got None")
    if not isinstance(model, str | Path | Recipe):
        from mutirao.api.recipe import Handed  # late: it brings torch

        whole = Handed.of(model, data, **handed)
        return Entry(whole.recipe(), whole.settings, whole)
    recipe: str | Recipe
    base: Mapping[str, Any] = {}
    if isinstance(model, Recipe):
        recipe = model
    else:
        recipe, base = expand(str(model))
    if isinstance(model, Path) or str(recipe).endswith(".toml"):
        recipe, base = read_config(Path(str(model)))
    if handed.pop("partitioner", None) is not None:
        raise ConfigError("partition: a recipe takes it by its name, such as flwr_datasets.partitioner:IidPartitioner")
    given = {key: value for key, value in {"data": data, **handed}.items() if value is not None}
    for key, value in given.items():
        if not isinstance(value, bool | int | float | str | Path):
            raise ConfigError(f"{key}: a recipe takes it as a setting, not as a {type(value).__name__}; give a model")
    return Entry(recipe, {**base, **given})


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The recipe and settings in a file; code that it names is run only if the user ran the same file before."""
    table = read_toml(path)
    check_trust(path, table, distrust, (), lambda: path.name == "config.toml" and is_own_run(path.parent))
    recipe = str(table.pop("recipe", ""))
    if not recipe:
        raise ConfigError(f'{path} does not say which recipe it is for; add: recipe = "quickstart"')
    return recipe, table


def check_folder(folder: Path, name: str, config: Any, resume: bool) -> None:
    """Refuse a folder that holds another run, or a run that `resume` does not ask to continue."""
    if (folder / "study.json").exists():
        raise ConfigError(f"out: {folder} holds a study; choose another")
    if not (folder / "config.toml").exists():
        return
    if not resume:
        raise ConfigError(
            f"out: {folder} already holds a run; pass resume=True to continue it, or choose another folder"
        )
    other = different_settings(folder, name, config)
    then = Record.of(folder).config
    # More rounds are allowed unless the learning rates of those already made depend on their number.
    if "rounds" in other and has_same_past(config.schedule, int(then["rounds"]), config.rounds):
        other.remove("rounds")
    if fixed := [key for key in other if key == "rounds" or key not in MAY_CHANGE]:
        here = name if fixed[0] == "recipe" else getattr(config, fixed[0])
        said = f"there it is {then.get(fixed[0])}, here {here}"
        raise ConfigError(f"{fixed[0]} cannot change in a run that has begun: {said}; choose another out")


def how_shown(progress: str) -> Mode:
    """How progress is shown: a progress line on a terminal or in a notebook, nothing in a pipe."""
    if progress not in ("auto", "lines", "quiet"):
        raise ConfigError(f"progress: {progress!r} is none of auto, lines, quiet")
    if progress == "auto" and in_notebook() is None and not sys.stderr.isatty():
        return "quiet"
    return progress  # type: ignore[return-value]  # it is one of the three


def module_of(recipe: Recipe, config: Any) -> "nn.Module":
    """A fresh module of a recipe, if its clients train a torch module."""
    from mutirao.training.plain import PlainTrainer

    handler = recipe.prepare(config).handler
    # Personalization wraps the trainer of the recipe.
    if config.personal.name != "none":
        handler = getattr(handler, "trainer", handler)
    if not isinstance(handler, PlainTrainer):
        raise ConfigError("model: the clients of this recipe do not train one torch module; see Result.arrays()")
    return handler.model()


def load(folder: Path | str, model: Any = None) -> Result:
    """The result of a run in a folder; pass `model`, the module or its factory, if the run came from Python.

    >>> run("quickstart", rounds=2, epochs=1, out="runs/two").digest == load("runs/two").digest
    True
    """
    path = Path(folder)
    record = Record.of(path)
    if model is not None:
        from mutirao.api.input_data import Model  # late: it brings torch

        return Result(path, Model.of(model).make, record.summary)
    recipe = str(record.config.get("recipe", ""))
    # To make the module of a recipe from elsewhere, its code must be run.
    known = recipe in NAMES or (recipe != PYTHON and is_own_run(path))
    return Result(path, (lambda: remade(path, recipe)) if known else None, record.summary)


def remade(folder: Path, recipe: str) -> "nn.Module":
    """A fresh module of the run in a folder."""
    _, table = read_config(folder / "config.toml")
    return module_of(find(recipe), resolve(find(recipe).config, table))
