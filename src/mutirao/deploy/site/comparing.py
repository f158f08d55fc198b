"""Digests of what all parties must agree on, short enough to be compared by telephone."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mutirao.core.digests import fingerprint
from mutirao.core.fleet import ClientId
from mutirao.deploy.flower.run_tasks import recipe_from, settings_at_site
from mutirao.deploy.policy.pins import ARCHITECTURE
from mutirao.deploy.policy.rules import Policy
from mutirao.experiments.party_agreement import require_agreement
from mutirao.experiments.task import find

SHORT = 12  # characters of a digest that are shown


@dataclass(frozen=True)
class AgreedDigests:
    """A site's digests for a recipe by name, and its samples by class if they are known."""

    recipe: str
    digests: dict[str, str]
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def all(self) -> str:
        """One digest of all digests."""
        return fingerprint(self.digests)

    def words(self) -> str:
        """All of it in one line."""
        shown = [f"{name} {digest[:SHORT]}" for name, digest in sorted(self.digests.items())]
        classes = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        if classes:
            shown.append(f"{sum(self.counts.values())} pictures: {classes}")
        return "; ".join([f"{self.recipe} {self.all[:SHORT]}", *shown])


def agreed_digests_of(policy: Policy, client: ClientId) -> Iterator[AgreedDigests | tuple[str, str]]:
    """For each recipe that a policy allows its digests, or the recipe's name and why they are not available.

    Settings are those that the policy pins or sets; others have the recipe's defaults.
    """
    for recipe in policy.recipes:
        pinned = {k: v for k, v in policy.pinned.get(recipe, {}).items() if k != ARCHITECTURE}
        try:
            name, config = recipe_from(settings_at_site({"recipe": recipe, **pinned}, {}, policy.settings))
            task = require_agreement(find(name).prepare(config))
            count = getattr(task.population, "counts", None)
            yield AgreedDigests(recipe, {**task.basis(), **task.agreed}, count(client) if callable(count) else {})
        except Exception as error:  # reading a site's data may raise anything
            yield recipe, " ".join(str(error).split())[:300] or type(error).__name__
