"""What a site has of what all parties agree on, shown so that two engineers can compare it by telephone."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mutirao.core.digests import fingerprint
from mutirao.core.fleet import ClientId
from mutirao.deploy.flower.run_tasks import recipe_from, settings_at_site
from mutirao.deploy.policy.pins import ARCHITECTURE
from mutirao.deploy.policy.rules import Policy
from mutirao.experiments.party_agreement import require_agreement
from mutirao.experiments.task import find

SHORT = 12  # characters of a digest that are read out


@dataclass(frozen=True)
class AgreedDigests:
    """What a site holds for a recipe: digests by name, all of them as one, and its samples by class if it knows."""

    recipe: str
    digests: dict[str, str]
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def all(self) -> str:
        """One digest of all, which is the same wherever each is."""
        return fingerprint(self.digests)

    def words(self) -> str:
        """The same in one line."""
        told = [f"{name} {digest[:SHORT]}" for name, digest in sorted(self.digests.items())]
        classes = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        held = [f"{sum(self.counts.values())} pictures: {classes}"] if classes else []
        return "; ".join([f"{self.recipe} {self.all[:SHORT]}", *told, *held])


def agreed_digests_of(policy: Policy, client: ClientId) -> Iterator[AgreedDigests | tuple[str, str]]:
    """Of each recipe that a policy allows what the site holds, or the recipe's name and why that cannot be told.

    Settings are those the policy pins and insists on; what the server chooses freely is as the recipe has it.
    """
    for recipe in policy.recipes:
        pinned = {k: v for k, v in policy.pinned.get(recipe, {}).items() if k != ARCHITECTURE}
        try:
            name, config = recipe_from(settings_at_site({"recipe": recipe, **pinned}, {}, policy.settings))
            task = require_agreement(find(name).prepare(config))
            count = getattr(task.population, "counts", None)
            yield AgreedDigests(recipe, {**task.basis(), **task.agreed}, count(client) if callable(count) else {})
        except Exception as error:  # a site's own data may raise anything: whoever asks is told which recipe it was
            yield recipe, " ".join(str(error).split())[:300] or type(error).__name__
