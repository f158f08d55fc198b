"""Differential privacy by name: `none`, `central`, `local`, `dpsgd`. Updates are clipped, Gaussian noise is added.

Who adds the noise is whom clients need not trust: the server (central), or each client itself (local, dpsgd). What
was spent is kept as a table of releases (see `accounting`): for central in the run's memory, otherwise in the site's
own state, so a run that is resumed goes on counting where it was. `docs/privacy.md` says what is promised to whom.

The noise comes from the operating system's randomness, not from the run's seed: who knows the seed could take it off
again. `repeatable=true` draws it from the seed all the same, for experiments on data that are not private.
"""

import functools
import logging
import math
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mutirao.accounting import Accountant, Releases, add_releases, at_worst, epsilon
from mutirao.config import build
from mutirao.core.arrays import Arrays, settle
from mutirao.core.bounds import SIZE_CAP, lower_median
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.parts import AnyAggregator, AnyHandler, AnySelector, Many, Merged, as_aggregator, as_handler
from mutirao.core.roster import Roster
from mutirao.core.rounds import Round, Run
from mutirao.errors import BudgetSpent, ConfigError, Refused
from mutirao.randomness import rng
from mutirao.selection import RoundRobin, Uniform, check_setting, everyone, how_many, names_in

log = logging.getLogger("mutirao")

RELEASES = "privacy.releases"  # where the table lies in the run's memory, or in a site's state
Outlook = Sequence[tuple[Arrays, AnyAggregator]]  # of each model of the round to come: its memory, its aggregator
AtServer = tuple[AnySelector, AnyAggregator]
EPSILON, NEXT = "epsilon", "epsilon_next"  # what a client tells of its own account: spent, and after one more round
SPENT = frozenset({f"metrics:{EPSILON}", f"metrics:{NEXT}"})


class Privacy:
    """What every kind of privacy offers to the flow and to those who make tasks; as it is, nothing is promised."""

    budget: float = 0.0

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler as the client runs it."""
        return handler

    def at_server(self, select: AnySelector, aggregate: AnyAggregator, clients: int, config: Any) -> AtServer:
        """The selector and the aggregator as the server runs them."""
        return select, aggregate

    def spent(self, run: Run) -> float | None:
        """Epsilon so far, of the client that has spent most; None if nothing is promised."""
        return None

    def after_another(self, run: Run, outlook: Outlook) -> float:
        """Epsilon if one more round is made: of the one model there is, or of each group's."""
        return 0.0


@dataclass(frozen=True)
class Open(Privacy):
    """No differential privacy."""


@dataclass(frozen=True)
class Settings(Privacy):
    """What all kinds have in common: noise (as a multiple of the clip), clip, delta, and epsilon's budget (0: none)."""

    noise: float = 1.0
    clip: float = 1.0
    delta: float = 1e-5
    budget: float = 0.0
    accountant: Accountant = "rdp"
    repeatable: bool = False

    def __post_init__(self) -> None:
        check_setting("noise", 0 < self.noise < math.inf, self.noise, "above 0")
        check_setting("clip", 0 < self.clip < math.inf, self.clip, "above 0")
        check_setting("delta", 0 < self.delta < 1, self.delta, "above 0 and below 1")
        check_setting("budget", 0 <= self.budget < math.inf, self.budget, "0 (none) or above")

    def epsilon(self, table: Releases | None) -> float:
        """What these releases cost."""
        return epsilon(table, self.delta, self.accountant)

    def inherit(self, before: Sequence[Arrays], noise: float) -> Arrays:
        """The memory of a new group: the worst account among the groups before, and a signature with that noise."""
        worst = at_worst([memory[RELEASES] for memory in before if RELEASES in memory])
        return {RELEASES: add_releases(worst, noise, 1.0, 1)}

    def draw(self, seed: int, round: int, client: ClientId = "") -> np.random.Generator:
        """A generator for the noise of one release."""
        if self.repeatable:
            return rng(seed, round, "privacy", client)
        return np.random.default_rng(secrets.randbits(256))


@dataclass(frozen=True)
class Central(Settings):
    """The server clips each client's update to `clip` and adds noise to their sum: x' = x + (sum_k d_k + N) / m.

    N is Gaussian with deviation `noise` x `clip`, m the number of clients expected a round, whoever came. Each client
    takes part with probability m / clients, independently, in place of `select=uniform`. The unit that is protected
    is a client with all its data. McMahan, Ramage, Talwar and Zhang, 2018.
    """

    def at_server(self, select: AnySelector, aggregate: AnyAggregator, clients: int, config: Any) -> AtServer:
        """Poisson sampling instead of a fixed number, and the aggregator on the noised mean."""
        if not as_aggregator(aggregate).mean_only:
            raise ConfigError(
                f"privacy=central adds noise to the mean update, and {aggregate!r} needs each update by itself"
            )
        if config.screen.name != "none":
            raise ConfigError(
                f"screen={config.screen.name} cannot be set with privacy=central: whom it drops depends on the others, "
                "which the account does not cover"
            )
        if config.min_replies:
            raise ConfigError("min_replies cannot be set with privacy=central, where the number selected is random")
        if isinstance(select, Uniform):
            expected = select.count * clients if isinstance(select.count, float) else min(select.count, clients)
            select = Poisson(rate := min(1.0, expected / clients))
        elif isinstance(select, RoundRobin) or select is everyone:
            count = select.count if isinstance(select, RoundRobin) else clients
            expected, rate = how_many(count, clients), 1.0  # nobody's turn is secret
        else:
            raise ConfigError(
                f"privacy=central needs select=uniform, roundrobin or everyone: {select!r} chooses by what clients tell"
            )
        return select, Noised(aggregate, self, rate, max(1.0, expected), config.seed)

    def spent(self, run: Run) -> float | None:
        """What the released models cost any client: one of groups has part in those of its own alone."""
        return max((self.epsilon(table) for table in tables_in(run.memory)), default=0.0)

    def after_another(self, run: Run, outlook: Outlook) -> float:
        """With one more model released, of every group."""
        rates = [(memory, part.rate if isinstance(part, Noised) else 1.0) for memory, part in outlook]
        after = [add_releases(memory.get(RELEASES), self.noise, rate, 1) for memory, rate in rates]
        return max([self.spent(run) or 0.0, *map(self.epsilon, after)])


@dataclass(frozen=True)
class AtClient(Settings):
    """What the kinds have in common in which each client sees to its own privacy and keeps its own account."""

    def at_server(self, select: AnySelector, aggregate: AnyAggregator, clients: int, config: Any) -> AtServer:
        """Both as they are, which find no metrics: only updates leave."""
        if config.clients_every:
            raise ConfigError(f"clients_every cannot be set with {self!r}: clients tell no metrics")
        return select, aggregate

    def spent(self, run: Run) -> float | None:
        """What the client that spent most has told, but no more than the server finds it can have spent."""
        return self.highest(run, EPSILON, 0, 1)

    def after_another(self, run: Run, outlook: Outlook) -> float:
        """The same, were it asked once more; of one with next to no samples, which refuses for itself in time."""
        known = run.roster.first_n[run.roster.first_n > 0]
        return self.highest(run, NEXT, 1, lower_median(known) / SIZE_CAP if len(known) else 1)

    def highest(self, run: Run, figure: str, more: int, fewest: float) -> float:
        """The highest figure told, each held to what it can be if the client answered whenever it was asked.

        Those told most are looked at first: as a rule one is enough.
        """
        roster, most = run.roster, 0.0
        told = roster.figure(figure, 0.0)
        for i in np.argsort(-told, kind="stable").tolist():
            if told[i] <= most:
                break
            n = max(fewest, min(int(roster.n[i]), int(roster.first_n[i])))
            noise, rate, times = self.releases(n)
            table = add_releases(at_worst(tables_in(run.memory)), noise, rate, times * (int(roster.asked[i]) + more))
            limit = epsilon(table, self.delta)  # by rdp, which is quick and above prv
            if told[i] > 1.001 * limit:
                log.warning("%s tells %s=%.4g; %.4g counts, the most it can be", roster.ids[i], figure, told[i], limit)
            most = max(most, min(float(told[i]), limit))
        return most

    @abstractmethod
    def releases(self, n: float) -> tuple[float, float, int]:
        """Noise, rate and number of the releases that a client with n samples makes in a round."""

    def charge(self, site: Site, noise: float, rate: float, times: int) -> Releases:
        """The site's account with these releases in it; Refused if its budget does not allow them."""
        table = add_releases(site.state.get(RELEASES), noise, rate, times)
        if self.budget and (after := self.epsilon(table)) > self.budget:
            before = self.epsilon(site.state.get(RELEASES))
            raise Refused(
                "privacy.budget", f"epsilon {before:.3g} of {self.budget:g} is spent; this would make {after:.3g}"
            )
        return table

    def tell_spent(self, table: Releases, noise: float, rate: float, times: int) -> dict[str, float]:
        """What a client tells of its account: nothing in it depends on its data but their number."""
        return {EPSILON: self.epsilon(table), NEXT: self.epsilon(add_releases(table, noise, rate, times))}


@dataclass(frozen=True)
class Local(AtClient):
    """Each client clips its update to `clip` and adds noise of deviation `noise` x `clip` before anything leaves.

    No two data sets a client may hold can be told apart, so the sensitivity is 2 `clip`; nothing is gained by
    sampling, since the server knows who took part. Metrics, extras and the number of samples do not leave.
    """

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler with clipping and noise around it."""
        return Shielded(handler, self)

    def releases(self, n: float) -> tuple[float, float, int]:
        """One, whatever it holds."""
        return self.noise / 2, 1.0, 1


@dataclass(frozen=True)
class DPSGD(AtClient):
    """Each step of a client clips every sample's gradient to `clip` and adds noise of deviation `noise` x `clip`.

    The unit that is protected is a sample of a client. The number of samples leaves as it is, metrics and extras do
    not. Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, 2016; by Opacus. The server knows `batch_size` and
    `epochs` from the configuration.
    """

    batch_size: int | None = None
    epochs: int | None = None

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The trainer's model, loss and optimiser, with private gradients."""
        return as_handler(handler).private_training(self)

    def releases(self, n: float) -> tuple[float, float, int]:
        """One a step."""
        batch = self.batch_size or 1
        return self.noise, min(1.0, batch / n), (self.epochs or 1) * math.ceil(n / batch)


NAMES = {"none": Open, "central": Central, "local": Local, "dpsgd": DPSGD}


@dataclass(frozen=True)
class Poisson:
    """Each client that is present with the same probability, independently: sometimes nobody."""

    rate: float
    may_be_nobody = True

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        """Who takes part."""
        here = roster.here()
        return names_in(roster, here[rng.random(len(here)) < self.rate])


@dataclass(frozen=True)
class Noised:
    """An aggregator that gets to see one model only: the current one moved by the noised mean of clipped updates.

    Arrays that are not of floating point stay as they are: a client's counter would tell of it.
    """

    then: AnyAggregator
    privacy: Central
    rate: float
    expected: float
    seed: int = field(repr=False)

    @property
    def needs(self) -> frozenset[str]:
        """What the wrapped aggregator needs of the clients."""
        return as_aggregator(self.then).needs

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        """The next model; the release is entered into the run's account."""
        noise, clip = self.privacy.noise, self.privacy.clip
        table = add_releases(memory.get(RELEASES), noise, self.rate, 1)
        floats = sorted(k for k, v in current.items() if v.dtype.kind == "f")
        sums: Arrays = {k: np.zeros(current[k].shape) for k in floats}
        scales: dict[ClientId, dict[str, float]] = {}
        for client in sorted(replies):
            update, scale = clip_update(current, replies[client].arrays, clip)
            sums = {k: sums[k] + update[k] for k in floats}
            scales[client] = {"clip_scale": scale}
        draw = self.privacy.draw(self.seed, int(table[:, 2].sum()))
        moved = add_noise(current, sums, draw, noise * clip, 1 / self.expected)
        merged = self.then(current, {"everybody": Reply(moved, n=1)}, memory)
        memory[RELEASES] = table
        return Merged(merged.arrays, dict.fromkeys(sorted(replies), 1 / self.expected), scales)


class Shielded:
    """A handler whose updates are clipped and noised where they are made; `many` clients at once if it could before."""

    def __init__(self, handler: AnyHandler, privacy: Local) -> None:
        self.handler, self.privacy = as_handler(handler), privacy

    @property
    def provides(self) -> frozenset[str]:
        """Nothing but what was spent; what the handler can be told, it can be told still."""
        return SPENT | {p for p in self.handler.provides if p.startswith("config:")}

    @property
    def many(self) -> Many | None:
        """For many clients at once, if the handler has such a way."""
        many = self.handler.many
        return None if many is None else functools.partial(self._many, many)

    def __call__(self, request: Request, site: Site) -> Reply:
        """The noised update, and what has been spent."""
        table = self._charge(request, site)
        return self._cover(self.handler(request, site), request, site, table)

    def _many(
        self, many: Many, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        tables: dict[ClientId, Releases] = {}
        outcomes: dict[ClientId, Reply | Failure] = {}
        for client, request in requests.items():
            try:
                tables[client] = self._charge(request, sites[client])
            except Refused as error:
                outcomes[client] = failure_of(error)
        replies = many({c: requests[c] for c in tables}, {c: sites[c] for c in tables}) if tables else {}
        return outcomes | {
            c: self._cover(r, requests[c], sites[c], tables[c]) if isinstance(r, Reply) else r
            for c, r in replies.items()
        }

    def _charge(self, request: Request, site: Site) -> Releases:
        if request.do != "train":
            raise Refused("privacy=local", f"only noised updates leave, no answer to {request.do!r}")
        return self.privacy.charge(site, self.privacy.noise / 2, 1.0, 1)

    def _cover(self, reply: Reply, request: Request, site: Site, table: Releases) -> Reply:
        noise, clip, config = self.privacy.noise, self.privacy.clip, request.config
        update, _ = clip_update(request.arrays, reply.arrays, clip)
        draw = self.privacy.draw(int(config.get("seed", 0)), int(config.get("round", 0)), site.id)
        moved = add_noise(request.arrays, update, draw, noise * clip)
        site.state[RELEASES] = table
        return Reply(moved, metrics=self.privacy.tell_spent(table, noise / 2, 1.0, 1), n=1)


def clip_update(current: Arrays, model: Arrays, clip: float) -> tuple[Arrays, float]:
    """The update model - current in float64, shortened to length `clip` if it is longer, and by which factor."""
    update = {k: model[k].astype(np.float64) - v for k, v in current.items() if v.dtype.kind == "f"}
    length = math.sqrt(math.fsum(float(np.vdot(u, u)) for u in update.values()))
    if not math.isfinite(length):
        return {k: np.zeros_like(u) for k, u in update.items()}, 0.0  # what cannot be bounded does not count
    scale = min(1.0, clip / length) if length else 1.0
    return {k: scale * u for k, u in update.items()}, scale


def add_noise(
    current: Arrays, update: Arrays, draw: np.random.Generator, deviation: float, share: float = 1.0
) -> Arrays:
    """current + share (update + Gaussian noise); what is not of floating point stays as it is."""
    out = dict(current)
    for name in sorted(update):
        noise = draw.normal(0.0, deviation, update[name].shape)
        out[name] = settle(current[name] + share * (update[name] + noise), current[name].dtype)
    return out


def tables_in(memory: Arrays) -> list[Releases]:
    """The accounts in a run's memory: of the one model there is, or of each group."""
    return [table for key, table in sorted(memory.items()) if key == RELEASES or key.endswith("/" + RELEASES)]


def within_budget(
    rounds: Iterator[Round], run: Run, wanted: int, privacy: Privacy, outlook: Callable[[], Outlook]
) -> Iterator[Round]:
    """Pass the rounds on with epsilon in their rows; BudgetSpent before a round that would cost too much.

    `outlook` says what the round to come would add to.
    """
    while True:
        counts = privacy.budget and run.round < wanted
        if counts and (after := privacy.after_another(run, outlook())) > privacy.budget:
            raise BudgetSpent(
                f"the privacy budget ends the run after round {run.round} of {wanted}: epsilon is "
                f"{privacy.spent(run) or 0.0:.4g} of {privacy.budget:g}, and another round would make it {after:.4g}; "
                "the model of that round is kept"
            )
        if (done := next(rounds, None)) is None:
            return  # all rounds are made, or all groups have settled
        if (spent := privacy.spent(run)) is not None:
            for name in (EPSILON, NEXT):
                done.row.pop(f"train_{name}", None)  # the mean over clients says nothing
            done.row[EPSILON] = spent
        yield done


def promise(part: Any, run: Run) -> dict[str, Any] | None:
    """What a summary says of the privacy of a run: the kind, its settings and what was spent."""
    privacy: Privacy = build("privacy", part)
    spent = run.history[-1].get(EPSILON) if run.history else privacy.spent(run)
    return None if spent is None else {"kind": part.name, EPSILON: spent, **part.settings}
