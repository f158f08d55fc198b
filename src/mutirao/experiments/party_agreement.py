"""The parties of a task agree before its first round: the server asks them, and a site keeps to what it has."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mutirao.core.agreed_handler import AgreedHandler
from mutirao.core.agreement import AGREED, AgreementFleet, Join, agree_on, bytes_from_extra, bytes_to_extra, digest_of
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
    """The task as a site works on it: whatever it is asked, it looks at what it has first."""
    if isinstance(task.handler, AgreedHandler):
        return task
    handler = as_handler(task.handler)
    agreed = {**handler.agreed(), **task.agreed}
    tells = isinstance(task.secure, NoSecureAggregation) and handler.provides.isdisjoint(
        SPENT
    )  # else nothing but updates leaves
    return replace(task, agreed=agreed, handler=AgreedHandler(task.handler, agreed, task.basis, tells))


def agree_on_task(fleet: Fleet, config: Any, task: Task, run: Run) -> tuple[Fleet, Task]:
    """Ask all who are other parties whether they have what the server has; the fleet and the task of those who do."""
    told = {**task.basis(), **task.agreed}
    if not told or not fleet.is_remote():
        return fleet, task
    wait_for_all(fleet, config, task)
    agreement = AgreementFleet(fleet, told, config={"seed": config.seed, "round": run.round})
    return agreement, only_agreeing(task, agreement)


def run_recipe(recipe: Recipe, fleet: Fleet, config: Any, task: Task, run: Run) -> Iterator[Round]:
    """The rounds of a recipe, once its parties have agreed."""
    fleet, task = agree_on_task(fleet, config, task, run)
    yield from recipe.flow(fleet, config, task, run)


def agree_on_profile(
    fleet: Fleet, config: Any, task: Task, run: Run, name: str, own: bytes, join: Join
) -> tuple[Fleet, Task, bytes]:
    """Find what all agree on under that name from the clients' profiles, unless it is known; who agrees, and the bytes.

    What was found stays in the run's memory, so that one that is resumed asks nobody again. Where privacy is promised
    clients of this process are asked nothing but rounds.
    """
    about = {"seed": config.seed, "round": run.round}
    asks = fleet.is_remote() or not privacy_guarantee(config)
    content, spent = bytes_from_extra(AGREED + name, run.memory) or own, (0, 0)
    if asks:
        wait_for_all(fleet, config, task)
    if not content:
        content, spent = agree_on(fleet, name, about, join)
        run.memory |= bytes_to_extra(AGREED + name, content)
    agreement = AgreementFleet(fleet, {name: digest_of(content)}, bytes_to_extra(name, content), about, asks, spent)
    return agreement, only_agreeing(task, agreement), content


def read_given(setting: str, path: str, read: Callable[[bytes], Any]) -> bytes:
    """What a setting names a file of, as it travels; empty if it names none, ConfigError if that cannot be read."""
    if not path:
        return b""
    place = Path(path).expanduser()
    try:
        content: bytes = read(place.read_bytes()).content()
        return content
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {place}: {getattr(error, 'strerror', None) or error}") from error


def wait_for_all(fleet: Fleet, config: Any, task: Task) -> None:
    """Wait until all are there, or, where clients come and go, anybody."""
    churns = config.available.name != "always"
    wait_for_clients(
        Roster(), fleet, 1 if churns else len(task.population), Patience(wait=0.0 if churns else config.wait)
    )


def only_agreeing(task: Task, agreement: AgreementFleet) -> Task:
    """The task of those who agree: it is not waited for others, nor are they counted on."""
    names, left, population = agreement.begin(), len(agreement.clients()), task.population
    known = [name for name in names if name in list(population)]
    others = [name for name in population if name not in known]  # a site's name may be new to the server
    fewer = min(len(names), max(0, len(population) - left), len(population) - 1)
    return replace(task, population=PopulationWithout(population, [*known, *others][:fewer])) if fewer else task
