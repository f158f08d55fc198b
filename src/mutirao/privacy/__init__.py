"""Differential privacy by name: `none`, `central`, `local`, `dpsgd`. Updates are clipped, Gaussian noise is added.

The methods differ in who adds the noise, and thus in which party clients must trust: the server (central), or only the
client itself (local, dpsgd). The privacy spent is kept as a table of releases (see `accounting`): in the run's memory
for central, otherwise in the site's own state, so that a resumed run continues its account. `docs/privacy.md` states
the guarantees.

The noise comes from the operating system's randomness, not from the run's seed: every client has the seed, and could
remove it. `repeatable=true` draws it from the seed all the same, for experiments on data that are not private.

The noise can be set, or derived: `epsilon=3` finds the noise that the planned rounds need.
"""

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mutirao.config import Part, Scalar, build, handed_over
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.handler_wrapper import Forward, HandlerWrapper
from mutirao.core.needs import Capabilities
from mutirao.core.parts import AnyAggregator, AnyHandler, AnySelector, as_aggregator, as_handler
from mutirao.core.rounds import Round, Run
from mutirao.core.sparse_rows import to_dense
from mutirao.core.validation import SIZE_CAP, lower_median
from mutirao.deprecation import former_names
from mutirao.errors import BudgetSpent, ConfigError, Refused
from mutirao.privacy.accounting import Releases, add_releases, epsilon, worst_case
from mutirao.privacy.central_noise import CLIP, AdaptiveClip, NoisyMean, Poisson
from mutirao.privacy.central_noise import RELEASES as RELEASES
from mutirao.privacy.central_noise import add_noise as add_noise
from mutirao.privacy.central_noise import clip_update as clip_update
from mutirao.privacy.settings import EPSILON as EPSILON
from mutirao.privacy.settings import NEXT as NEXT
from mutirao.privacy.settings import NOISE, AtServer
from mutirao.privacy.settings import NextRound as NextRound
from mutirao.privacy.settings import Privacy as Privacy
from mutirao.privacy.settings import Settings as Settings
from mutirao.selection import RoundRobin, Uniform, check_setting, everyone, how_many

log = logging.getLogger("mutirao")

SPENT = frozenset({EPSILON, NEXT})  # the metrics of a private client


@dataclass(frozen=True)
class NoPrivacy(Privacy):
    """No differential privacy.

    >>> from mutirao.config import Common, resolve
    >>> build_privacy(resolve(Common, {}))  # by default
    NoPrivacy()
    """


@dataclass(frozen=True)
class Central(Settings):
    """The server clips each client's update to `clip` and adds noise to their sum: x' = x + (sum_k d_k + N) / m.

    N is Gaussian with deviation `noise` x `clip`, m the expected number of clients a round, however many came. Each
    client takes part with probability m / clients, independently, in place of `select=uniform`. It protects a client
    with all its data. McMahan, Ramage, Talwar and Zhang, 2018.

    With `clip_quantile` above 0 the clip follows that quantile of the updates' lengths, beginning at `clip`; the share
    of clients below it gets noise of deviation `clip_noise` (0: m / 20, or `noise` if that is more), and the updates
    so much more that both together cost what `noise` says.

    >>> from mutirao.config import Common, resolve
    >>> privacy = build_privacy(resolve(Common, {"privacy": {"name": "central", "noise": 1.0, "clip": 0.5}}))
    >>> privacy.noise * privacy.clip  # the deviation of the noise on the sum of a round
    0.5
    """

    clip_quantile: float = 0.0
    clip_lr: float = 0.2
    clip_noise: float = 0.0
    protects = "a client with all its data"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("clip_quantile", 0 <= self.clip_quantile < 1, self.clip_quantile, "0 (a fixed clip) or below 1")
        check_setting("clip_lr", 0 < self.clip_lr < math.inf, self.clip_lr, "above 0")
        check_setting("clip_noise", 0 <= self.clip_noise < math.inf, self.clip_noise, "0 (a choice of ours) or above")

    def at_server(self, select: AnySelector, aggregate: AnyAggregator, clients: int, config: Any) -> AtServer:
        """Poisson sampling instead of a fixed number of clients, and an aggregator that sees the noised mean only."""
        if not as_aggregator(aggregate).mean_only:
            raise ConfigError(
                f"privacy=central adds noise to the mean update, and {aggregate!r} needs each update by itself"
            )
        if config.screen.name != "none":
            raise ConfigError(
                f"screen={config.screen.name} cannot be set with privacy=central: which clients it drops depends "
                "on the others, which the account does not cover"
            )
        if config.min_replies:
            raise ConfigError("min_replies cannot be set with privacy=central, where the number selected is random")
        select, rate, expected = self.sample(select, clients)
        noise = self.noise_for(rate, 1)
        adaptive_clip = self.adaptive_clip(noise, expected)
        draw = functools.partial(self.draw, config.seed)
        added = float(config.secure.settings.get("noise", 0.0))
        return select, NoisyMean(aggregate, noise, self.clip, rate, expected, adaptive_clip, added, draw)

    def sample(self, select: AnySelector, clients: int) -> tuple[AnySelector, float, float]:
        """The selector, the probability of each client, and the expected number of clients a round."""
        if isinstance(select, Uniform):
            expected: float = min(select.count, clients)
            if isinstance(select.count, float):
                # Not rounded: the expected number of a Poisson sample need not be whole.
                expected = select.count * clients
            rate = min(1.0, expected / clients)
            return Poisson(rate, self.repeatable), rate, max(1.0, expected)
        if isinstance(select, RoundRobin) or select is everyone:
            count = select.count if isinstance(select, RoundRobin) else clients
            # The order is public, so nothing is gained by sampling.
            return select, 1.0, max(1.0, how_many(count, clients))
        raise ConfigError(
            f"privacy=central needs select=uniform, roundrobin or everyone: {select!r} selects by what clients report"
        )

    def adaptive_clip(self, noise: float, expected: float) -> AdaptiveClip | None:
        """The adaptive clip, if `clip_quantile` is set."""
        if not self.clip_quantile:
            return None
        count_noise = self.clip_noise or max(expected / 20, noise)
        if noise >= 2 * count_noise:
            raise ConfigError(
                f"privacy.clip_noise is {count_noise:g}, but must be above half of the noise, {noise:.4g}"
            )
        return AdaptiveClip(self.clip_quantile, self.clip_lr, count_noise)

    def found(self, config: Any, clients: int) -> dict[str, Scalar]:
        """The noise for this sampling rate."""
        if self.noise is not None:
            return super().found(config, clients)
        _, rate, _ = self.sample(build("select", config.select, count=config.per_round), clients)
        return self.written(self.noise_for(rate, 1))

    def figures(self, run: Run) -> dict[str, float]:
        """The privacy spent and, if it is adaptive, the clip; with groups, the largest."""
        clips = [float(v[0]) for key, v in run.memory.items() if key == CLIP or key.endswith("/" + CLIP)]
        figures = super().figures(run)
        if clips:
            figures["clip"] = max(clips)
        return figures

    def spent(self, run: Run) -> float | None:
        """The epsilon of the released models; with groups, that of the group that spent most."""
        return max((self.cost(table) for table in tables_in(run.memory)), default=0.0)

    def spent_after_round(self, run: Run, outlook: NextRound) -> float:
        """Epsilon with one more model of every group released."""
        parts = [(memory, part) for memory, part in outlook if isinstance(part, NoisyMean)]
        after = [add_releases(memory.get(RELEASES), part.noise, part.rate, 1) for memory, part in parts]
        return max([self.spent(run) or 0.0, *map(self.cost, after)])


@dataclass(frozen=True)
class AtClient(Settings):
    """Base class of the methods in which each client protects its own updates and keeps its own account."""

    def at_server(self, select: AnySelector, aggregate: AnyAggregator, clients: int, config: Any) -> AtServer:
        """Selector and aggregator unchanged; clients send updates and no metrics."""
        if config.clients_every > 0:
            raise ConfigError(f"clients_every cannot be set with {self!r}: clients send no metrics")
        return select, aggregate

    def spent(self, run: Run) -> float | None:
        """The highest epsilon that a client reports, limited to what the server finds possible."""
        return self.highest(run, EPSILON, 0, 1)

    def spent_after_round(self, run: Run, outlook: NextRound) -> float:
        """The same after one more round; a client with very few samples refuses by itself in time."""
        known = run.roster.first_n[run.roster.first_n > 0]
        return self.highest(run, NEXT, 1, lower_median(known) / SIZE_CAP if len(known) else 1)

    def highest(self, run: Run, figure: str, more: int, fewest: float) -> float:
        """The highest reported figure, each limited to what the client can have spent if it answered every request.

        The highest reports are checked first: usually one is enough.
        """
        roster = run.roster
        most = 0.0
        reported = roster.figure(figure, 0.0)
        for i in np.argsort(-reported, kind="stable").tolist():
            if reported[i] <= most:
                break
            n = max(fewest, min(int(roster.n[i]), int(roster.first_n[i])))
            noise, rate, times = self.releases(n)
            table = add_releases(worst_case(tables_in(run.memory)), noise, rate, times * (int(roster.asked[i]) + more))
            # The rdp accountant is quick, and its result is never below that of prv.
            limit = epsilon(table, self.delta)
            if reported[i] > 1.001 * limit:
                log.warning(
                    "%s reports %s=%.4g; %.4g is used, its highest possible value",
                    roster.ids[i],
                    figure,
                    reported[i],
                    limit,
                )
            most = max(most, min(float(reported[i]), limit))
        return most

    @abstractmethod
    def releases(self, n: float) -> tuple[float, float, int]:
        """Noise, rate and number of the releases of a client with n samples in one round."""

    def charge(self, site: Site, noise: float, rate: float, times: int) -> Releases:
        """The site's account including these releases; Refused if its budget does not allow them."""
        table = add_releases(site.state.get(RELEASES), noise, rate, times)
        if self.budget and (after := self.cost(table)) > self.budget:
            before = self.cost(site.state.get(RELEASES))
            raise Refused(
                "privacy.budget", f"epsilon {before:.3g} of {self.budget:g} is spent; this would make {after:.3g}"
            )
        return table

    def spent_metrics(self, table: Releases, noise: float, rate: float, times: int) -> dict[str, float]:
        """The epsilon that a client reports; of its data it depends on the number of samples only."""
        return {EPSILON: self.cost(table), NEXT: self.cost(add_releases(table, noise, rate, times))}


@dataclass(frozen=True)
class Local(AtClient):
    """Each client clips its update to `clip` and adds noise of deviation `noise` x `clip` before anything leaves.

    Any two data sets of a client are indistinguishable, so the sensitivity is 2 `clip`; nothing is gained by
    sampling, since the server sees who took part. Metrics, extras and the number of samples do not leave.

    >>> Local(noise=4.0, clip=0.5).deviation  # times the clip; an account enters half of it
    4.0
    """

    protects = "all data of a client"

    @property
    def deviation(self) -> float:
        """The noise, as a multiple of the clip; an account enters half of it, as a release may move by 2 `clip`."""
        return self.noise_for(1.0, 1, sensitivity=2.0)

    def found(self, config: Any, clients: int) -> dict[str, Scalar]:
        """The noise for a client that takes part in every round."""
        return self.written(self.deviation)

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler with clipping and noise around it."""
        return LocalPrivacyHandler(handler, self)

    def releases(self, n: float) -> tuple[float, float, int]:
        """One release, whatever the client's data."""
        return self.deviation / 2, 1.0, 1


@dataclass(frozen=True)
class DPSGD(AtClient):
    """Each step of a client clips every sample's gradient to `clip` and adds noise of deviation `noise` x `clip`.

    The unit that is protected is a sample of a client. The number of samples leaves as it is, metrics and extras do
    not. With `epsilon`, each client finds its own noise, as few samples need more of it than many. Abadi, Chu,
    Goodfellow, McMahan, Mironov, Talwar and Zhang, 2016; by Opacus. The server takes `batch_size` and `epochs` from
    the configuration.

    A client with 1,000 samples in batches of 100 makes ten releases an epoch, each of a tenth of its samples:

    >>> noise, rate, steps = DPSGD(noise=1.1, clip=1.0, batch_size=100, epochs=1).releases(1000)
    >>> noise, rate, steps
    (1.1, 0.1, 10)
    """

    batch_size: int | None = handed_over()
    epochs: int | None = handed_over()
    protects = "a sample of a client"

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The trainer with private gradients."""
        return as_handler(handler).private_training(self)

    def releases(self, n: float) -> tuple[float, float, int]:
        """One release per step."""
        batch = self.batch_size or 1
        rate = min(1.0, batch / n)
        steps = (self.epochs or 1) * math.ceil(n / batch)
        return self.noise_for(rate, steps), rate, steps


NAMES = {"none": NoPrivacy, "central": Central, "local": Local, "dpsgd": DPSGD}


class LocalPrivacyHandler(HandlerWrapper):
    """A handler that clips and noises updates where they are made."""

    def __init__(self, handler: AnyHandler, privacy: Local) -> None:
        super().__init__(handler)
        self.privacy = privacy

    @property
    def capabilities(self) -> Capabilities:
        """The privacy spent, and the hyperparameters that the inner handler supports."""
        return Capabilities(metrics=SPENT, config=self.handler.capabilities.config)

    def before(self, request: Request, site: Site) -> Forward:
        """Charge the update to the client's account before it is made."""
        return Forward(site, note=self._charge(request, site))

    def after(self, request: Request, site: Site, reply: Reply, note: Any) -> Reply:
        """The noised update and the privacy spent."""
        return self._cover(reply, request, site, note)

    def _charge(self, request: Request, site: Site) -> Releases:
        if request.do != "train":
            raise Refused("privacy=local", f"only noised updates leave, no answer to {request.do!r}")
        return self.privacy.charge(site, self.privacy.deviation / 2, 1.0, 1)

    def _cover(self, reply: Reply, request: Request, site: Site, table: Releases) -> Reply:
        noise = self.privacy.deviation
        clip = self.privacy.clip
        config = request.config
        update, _ = clip_update(request.arrays, to_dense(request.arrays, reply.arrays), clip)
        draw = self.privacy.draw(int(config.get("seed", 0)), int(config.get("round", 0)), site.id)
        moved = add_noise(request.arrays, update, draw, noise * clip)
        site.state[RELEASES] = table
        # Any two updates of length C are up to 2 C apart: relative to that sensitivity the noise is half.
        return Reply(moved, metrics=self.privacy.spent_metrics(table, noise / 2, 1.0, 1), n=1)


def tables_in(memory: Arrays) -> list[Releases]:
    """The accounts in a run's memory: of the single model, or of each group."""
    return [table for key, table in sorted(memory.items()) if key == RELEASES or key.endswith("/" + RELEASES)]


def within_budget(
    rounds: Iterator[Round], run: Run, wanted: int, privacy: Privacy, outlook: Callable[[], NextRound]
) -> Iterator[Round]:
    """Yield the rounds with epsilon in their rows; BudgetSpent before a round that would cost too much.

    `outlook` says what the round to come would add to.
    """
    while True:
        counts = privacy.budget and run.round < wanted
        if counts and (after := privacy.spent_after_round(run, outlook())) > privacy.budget:
            raise BudgetSpent(
                f"the privacy budget ends the run after round {run.round} of {wanted}: {privacy.column} is "
                f"{privacy.spent(run) or 0.0:.4g} of {privacy.budget:g}, and another round would make it {after:.4g}; "
                "the model of that round is kept"
            )
        if (done := next(rounds, None)) is None:
            # All rounds are made, or all groups have converged.
            return
        if figures := privacy.figures(run):
            for name in (EPSILON, NEXT):
                # A mean of epsilons over clients has no meaning.
                done.row.pop(f"train_{name}", None)
            done.row.update(figures)
        yield done


def build_privacy(config: Any) -> Privacy:
    """The configured privacy, with the planned rounds, batch size and epochs.

    >>> from mutirao.config import Common, resolve
    >>> privacy = build_privacy(resolve(Common, {"rounds": 50, "privacy": {"name": "local", "epsilon": 8.0}}))
    >>> type(privacy).__name__, privacy.rounds, privacy.budget
    ('Local', 50, 8.0)
    """
    part = config.privacy
    settings = part.settings
    # With `rounds`, a run has written down the noise that it found.
    if settings.get("epsilon") and "noise" in settings and "rounds" not in settings:
        raise ConfigError("privacy.noise and privacy.epsilon are both set: epsilon finds the noise, so leave one out")
    made: Privacy = build("privacy", part, rounds=config.rounds, batch_size=config.batch_size, epochs=config.epochs)
    return made


def resolve_privacy(config: Any, clients: int) -> Part:
    """The privacy settings as written down with a run: including the noise that was found, and its rounds."""
    part = config.privacy
    privacy = build_privacy(config)
    found = privacy.found(config, clients)
    if "rounds" in found and "rounds" not in part.settings:
        noise = "each client finds its own noise"
        if "noise" in found:
            noise = f"noise {found['noise']:.4g}"
        log.warning("privacy.epsilon=%g over %s rounds: %s", part.settings["epsilon"], found["rounds"], noise)
    if privacy.repeatable:
        log.warning("privacy.repeatable=true: noise and sampling follow from the seed, so that NO client is protected")
    return Part(part.name, {**part.settings, **found}, part.home)


def without_resolved(part: Part) -> Part:
    """The privacy settings as the user set them, without those that `resolve_privacy` added."""
    settings = part.settings
    drop: set[str] = set()
    if settings.get("epsilon"):
        drop = {"noise", "rounds"}
    elif settings.get("noise") == NOISE:
        drop = {"noise"}
    return Part(part.name, {k: v for k, v in settings.items() if k not in drop}, part.home)


def privacy_summary(part: Part, run: Run) -> dict[str, Any] | None:
    """The privacy entry of a summary: method, settings, unit protected and privacy spent."""
    privacy: Privacy = build("privacy", part)
    spent = run.history[-1].get(privacy.column) if run.history else privacy.spent(run)
    if spent is None:
        return None
    protected = privacy.protects
    if privacy.repeatable:
        protected = "nobody: repeatable=true, so that noise and draws follow from the seed"
    terms = {"target" if k == EPSILON else k: v for k, v in part.settings.items() if k != EPSILON or v}
    return {"kind": part.name, "protects": protected, privacy.column: spent, **terms, "budget": privacy.budget}


if not TYPE_CHECKING:  # a module-level __getattr__ would let every misspelt name pass
    __getattr__ = former_names(
        __name__,
        {
            "Follow": "AdaptiveClip",
            "Noised": "NoisyMean",
            "Open": "NoPrivacy",
            "Shielded": "LocalPrivacyHandler",
            "promise": "privacy_summary",
        },
    )
