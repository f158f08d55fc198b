"""Agreement before the first round: the server requests digests of all parties; sites refuse requests that differ."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mutirao.core.agreement import (
    AGREED,
    AgreedHandler,
    AgreementFleet,
    Combine,
    agree_on,
    bytes_from_extra,
    bytes_to_extra,
    digest_of,
)
from mutirao.core.exclusion import PopulationWithout
from mutirao.core.fleet import Fleet
from mutirao.core.parts import as_handler
from mutirao.core.roster import Roster
from mutirao.core.rounds import Patience, Round, Run, wait_for_clients
from mutirao.errors import ConfigError
from mutirao.experiments.disclosure import privacy_guarantee
from mutirao.experiments.task import Recipe, Task
from mutirao.privacy import SPENT
from mutirao.privacy.secure_aggregation import NoSecureAggregation


def require_agreement(task: Task) -> Task:
    """The task as a site trains it: every request is checked against the site's own digests first."""
    if isinstance(task.handler, AgreedHandler):
        return task
    handler = as_handler(task.handler)
    agreed = {**handler.agreed(), **task.agreed}
    # With privacy or secure aggregation nothing but updates may leave, hence no digests either.
    discloses = isinstance(task.secure, NoSecureAggregation) and SPENT.isdisjoint(handler.capabilities.metrics)
    return replace(task, agreed=agreed, handler=AgreedHandler(task.handler, agreed, task.basis, discloses))


def agree_on_task(fleet: Fleet, config: Any, task: Task, run: Run) -> tuple[Fleet, Task]:
    """Ask remote parties whether their digests equal the server's; the fleet and the task of those that agree."""
    digests = {**task.basis(), **task.agreed}
    if not digests or not fleet.is_remote():
        return fleet, task
    wait_for_all(fleet, config, task)
    agreement = AgreementFleet(fleet, digests, config={"seed": config.seed, "round": run.round})
    return agreement, only_agreeing(task, agreement)


def run_recipe(recipe: Recipe, fleet: Fleet, config: Any, task: Task, run: Run) -> Iterator[Round]:
    """The rounds of a recipe, once its parties have agreed."""
    fleet, task = agree_on_task(fleet, config, task, run)
    yield from recipe.flow(fleet, config, task, run)


def agree_on_profile(
    fleet: Fleet, config: Any, task: Task, run: Run, name: str, own: bytes, join: Combine
) -> tuple[Fleet, Task, bytes]:
    """Join the clients' profiles into the bytes that all agree on under that name; fleet, task and bytes.

    They stay in the run's memory, so that a resumed run does not ask again. With a privacy guarantee simulated clients
    get no requests besides training.
    """
    about = {"seed": config.seed, "round": run.round}
    ask_clients = fleet.is_remote() or not privacy_guarantee(config)
    content = bytes_from_extra(AGREED + name, run.memory) or own
    spent = (0, 0)  # bytes sent and received
    if ask_clients:
        wait_for_all(fleet, config, task)
    if not content:
        content, spent = agree_on(fleet, name, about, join)
        run.memory |= bytes_to_extra(AGREED + name, content)
    agreement = AgreementFleet(
        fleet, {name: digest_of(content)}, bytes_to_extra(name, content), about, ask_clients, spent
    )
    return agreement, only_agreeing(task, agreement), content


def read_given(setting: str, path: str, read: Callable[[bytes], Any]) -> bytes:
    """The content of the file that a setting names, as it is sent; empty without a file, ConfigError if unreadable."""
    if not path:
        return b""
    place = Path(path).expanduser()
    try:
        content: bytes = read(place.read_bytes()).content()
        return content
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {place}: {getattr(error, 'strerror', None) or error}") from error


def wait_for_all(fleet: Fleet, config: Any, task: Task) -> None:
    """Wait until all clients are present, or, with simulated availability, at least one."""
    if config.available.name != "always":
        wait_for_clients(Roster(), fleet, 1, Patience(wait=0.0))
    else:
        wait_for_clients(Roster(), fleet, len(task.population), Patience(wait=config.wait))


def only_agreeing(task: Task, agreement: AgreementFleet) -> Task:
    """The task without the parties that do not agree, which are no longer waited for or counted."""
    names = agreement.begin()
    remaining = len(agreement.clients())
    population = task.population
    known = [name for name in names if name in list(population)]
    others = [name for name in population if name not in known]
    # The server may not know the names of refusing sites: then any others are left out, so that the count is right.
    excluded = min(len(names), max(0, len(population) - remaining), len(population) - 1)
    if not excluded:
        return task
    return replace(task, population=PopulationWithout(population, [*known, *others][:excluded]))
