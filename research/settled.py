"""The ranking recipe's task once clients have agreed on a scale: a plain trainer over samples on that scale."""

from dataclasses import replace
from functools import partial
from typing import Any

from mutirao.core.fleet import Request
from mutirao.experiments.task import Task
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.ranking import recipe
from mutirao.systems.ranking.feature_scale import scale_from_profiles


def settled_task(config: Any) -> Task:
    """The task as the recipe's own flow works on it after the first messages."""
    task = recipe.task(config)
    client, asked = task.knows.client, dict.fromkeys(task.population, Request("profile", {}, {"seed": 0, "round": 0}))
    scale = scale_from_profiles(LocalFleet(client, task.population).ask(asked).replies, config.transform)
    trainer = client.trainers(scale)
    return replace(
        task,
        handler=trainer,
        population={c: client.encoded(c, held, scale) for c, held in task.population.items()},
        initial=partial(trainer.initial, config.seed),
        evaluate=partial(client.evaluate, data=task.knows.source.test_set(scale), scale=scale),
    )
