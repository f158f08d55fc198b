"""A recipe is a configuration, a task and a flow; the systems of this project are recipes by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.arrays import Arrays
from mutirao.config import Common, build, load_name, nearest
from mutirao.errors import ConfigError
from mutirao.evaluation import across_clients
from mutirao.fleet import ClientId, Fleet, Handler
from mutirao.rounds import Evaluate, Patience, Round, Run, check_needs, train

# Where each recipe is and what it does, said here so that listing them imports none of them.
NAMES = {
    "quickstart": ("mutirao.recipes.quickstart:recipe", "handwritten digits over 50 non-IID clients, in seconds"),
    "ranking": ("mutirao.recipes.ranking:recipe", "learning to rank with FedRisk, on LETOR or generated data"),
    "cifar10": ("mutirao.recipes.cifar10:recipe", "CIFAR-10, or a synthetic stand-in, over 100 non-IID clients"),
}


@dataclass(frozen=True)
class Task:
    """What the parties work on: what a client does, what each holds, how the model begins and is judged."""

    handler: Handler
    population: Mapping[ClientId, Any]
    initial: Callable[[], Arrays]
    evaluate: Evaluate | None = None
    judge: str = "accuracy"  # the metric that names the best round
    higher_is_better: bool = True
    pictures: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)  # file name -> draws it

    @property
    def provides(self) -> frozenset[str]:
        """What the clients send besides arrays, such as `metrics:loss`."""
        return frozenset(getattr(self.handler, "provides", ()))


def federate(fleet: Fleet, config: Any, task: Task, run: Run) -> Iterator[Round]:
    """The ordinary flow: rounds of select, train, aggregate, evaluate."""
    select = build("select", config.select, count=config.per_round)
    aggregate = build("aggregate", config.aggregate)
    check_needs(task.provides, select, aggregate)
    rounds = train(
        run,
        fleet,
        rounds=config.rounds,
        select=select,
        aggregate=aggregate,
        evaluate=task.evaluate,
        evaluate_every=config.evaluate_every,
        patience=Patience(min_replies=config.min_replies or None, wait=config.wait),
        expect=len(task.population),
    )
    for done in rounds:
        if config.clients_every and run.round % config.clients_every == 0:
            done.row.update(across_clients(fleet, run))  # how the worst client fares, not only the mean
        yield done


@dataclass(frozen=True)
class Recipe:
    """A configuration class, the task it describes and the flow that solves it."""

    config: type[Common]
    task: Callable[[Any], Task]
    flow: Callable[[Fleet, Any, Task, Run], Iterator[Round]] = federate


def find(name: str) -> Recipe:
    """The recipe of that name, or behind a dotted path `package.module:name`."""
    if ":" not in name and name not in NAMES:
        raise ConfigError(f"no recipe is called {name!r}{nearest(name, NAMES)}")
    recipe = load_name(NAMES[name][0] if name in NAMES else name)
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{name!r} is not a Recipe")
    return recipe
