"""Who takes part in a round. A selector is called as `(roster, round, rng) -> clients` and picks among those present.

A selector that must ask clients first offers `.probes(roster, round, rng)`; one that uses what clients report says so
in `needs`. All that is known of clients stands in the roster's columns, so a choice among a million is a few array
operations.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.parts import names_of
from mutirao.core.roster import ClientId, Roster
from mutirao.scores import AGES, UTILITIES, Floats, mix_scores, needs_of, parse_scores, scale_to_one, seconds_of, top

Refresh = Literal["selected", "all", "share"]
PROBE_SAMPLES = 100


def everyone(roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
    """All clients that are present."""
    return names_in(roster, roster.here())


@dataclass(frozen=True)
class Counted:
    """`count` is a whole number of clients (1 is one client), or a share in (0, 1] of those present (1.0 is all)."""

    count: int | float

    def __post_init__(self) -> None:
        check_count(self.count)


@dataclass(frozen=True)
class Uniform(Counted):
    """So many of those present, drawn without replacement, each as likely as any other."""

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        return names_in(roster, rng.choice(here, how_many(self.count, len(here)), replace=False, shuffle=False))


@dataclass(frozen=True)
class RoundRobin(Counted):
    """Everybody in turn: those who have waited longest, and by name among equals."""

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        turn = np.argsort(roster.last_selected[here], kind="stable")  # rows are sorted by name
        return names_in(roster, here[turn[: how_many(self.count, len(here))]])


@dataclass(frozen=True)
class Mix(Counted):
    """The clients with the highest weighted sum of scores, each scaled to 0..1 over those present; ties by lot.

    `scores` names them with their weights: `0.5 age + 0.3 entropy + 0.2 mine:score`. A utility is renewed whenever its
    client is selected (`refresh="selected"`: it comes with the update and costs no message), or also for a random
    `share` of the clients before each selection, or for `all` of them; `samples` is how many samples it may look at.
    """

    scores: str = "0.5 age + 0.5 entropy"
    refresh: Refresh = "selected"
    share: float = 0.1
    samples: int = PROBE_SAMPLES
    classes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probe(self.refresh, self.share, self.samples)
        parse_scores(self.scores)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each score that has one."""
        return {name: weight for name, weight in parse_scores(self.scores).items() if weight}

    @property
    def needs(self) -> frozenset[str]:
        """What its scores need: told with an update, or in a probe, or found by the server in the replies."""
        needs = frozenset().union(*(needs_of(score) for score in self.weights))
        told = names_of(needs, "metrics")
        kinds = {"selected": ("metrics",), "share": ("metrics", "probe"), "all": ("probe",)}[self.refresh]
        asked = {f"{kind}:{name}" for kind in kinds for name in told} | ({limit(self.samples)} if told else set())
        return frozenset(asked | {need for need in needs if not need.startswith("metrics:")})

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        if not names_of(self.needs, "probe"):
            return []
        here = roster.here()
        if self.refresh == "all":
            return names_in(roster, here)
        return names_in(roster, rng.choice(here, how_many(self.share, len(here)), replace=False, shuffle=False))

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        values = mix_scores(self.weights, roster, round, here, self.classes)
        return names_in(roster, here[top(values, how_many(self.count, len(here)), rng)])


class AsMix(ABC):
    """A selector that is a `mix` under a name of its own."""

    @property
    @abstractmethod
    def mix(self) -> Mix:
        """What it amounts to."""

    def __post_init__(self) -> None:
        self.mix  # noqa: B018  # wrong settings are refused here

    @property
    def needs(self) -> frozenset[str]:
        return self.mix.needs

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        return self.mix.probes(roster, round, rng)

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        return self.mix(roster, round, rng)


@dataclass(frozen=True)
class AoI(AsMix):
    """The clients with the greatest age of information: rounds since they were selected; ties by lot.

    With m of K clients a round everybody takes part once in K / m rounds.
    """

    count: int | float

    @property
    def mix(self) -> Mix:
        return Mix(self.count, "age")


@dataclass(frozen=True, kw_only=True)
class AsMixOfUtilities(AsMix):
    """One whose clients tell a utility: how often they are asked, and on how many samples they find it out."""

    refresh: Refresh = "selected"
    share: float = 0.1
    samples: int = PROBE_SAMPLES
    classes: int | None = None

    def mix_of(self, count: int | float, scores: str) -> Mix:
        """The mix of these scores, with the settings above."""
        return Mix(count, scores, self.refresh, self.share, self.samples, self.classes)


@dataclass(frozen=True)
class Entropy(AsMixOfUtilities):
    """The clients on whose samples the global model is least sure: the highest mean entropy of its predictions.

    u_i = mean over at most `samples` of client i of -sum_c p_c ln p_c, with the model of the round in which i was last
    selected; ln(classes) before that, so that everybody is visited once before anybody is again.
    """

    count: int | float

    @property
    def mix(self) -> Mix:
        return self.mix_of(self.count, "entropy")


@dataclass(frozen=True)
class AoIU(AsMixOfUtilities):
    """Age and utility together: the highest alpha age_i + (1 - alpha) utility_i, both scaled to 0..1; ties by lot.

    age_i is the number of rounds since i was selected, utility_i the entropy above. alpha = 1 is `AoI`, alpha = 0 is
    `Entropy`. Other ages (`since_reply`, `since_improvement` of its loss) and utilities (`loss`, `rms_loss`,
    `gradient_norm`, `update_norm`) go by name; a utility not known yet counts as the highest.

    >>> roster = Roster(["ana", "bia", "caio"], np.ones(3, np.bool_), *np.array([[1, 1, 1]] * 5))
    >>> roster.last_selected[:] = [3, 2, 1]
    >>> roster.figures["entropy"] = np.array([2.0, 0.5, 1.0])
    >>> [AoIU(1, alpha)(roster, 4, np.random.default_rng(0)) for alpha in (1.0, 0.5, 0.0)]
    [['caio'], ['caio'], ['ana']]
    """

    count: int | float
    alpha: float = 0.5
    age: Literal["age", "since_reply", "since_improvement"] = "age"
    utility: Literal["entropy", "loss", "rms_loss", "gradient_norm", "update_norm"] = "entropy"

    @property
    def mix(self) -> Mix:
        check_setting("alpha", 0 <= self.alpha <= 1, self.alpha, "between 0 and 1")
        check_setting("age", self.age in AGES, self.age, f"one of {', '.join(AGES)}")
        check_setting("utility", self.utility in UTILITIES, self.utility, f"one of {', '.join(UTILITIES)}")
        return self.mix_of(self.count, f"{self.alpha!r} {self.age} + {1 - self.alpha!r} {self.utility}")


@dataclass(frozen=True)
class PowerOfChoice(Counted):
    """Of some candidates, drawn in proportion to their samples, those on which the global model's loss is highest.

    Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated Learning", AISTATS 2022. The
    candidates (0: twice as many as are selected) are asked for their loss on at most `samples` before each round.
    """

    candidates: int = 0
    samples: int = PROBE_SAMPLES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("candidates", self.candidates >= 0, self.candidates, "at least 0")
        check_probe("all", 1.0, self.samples)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"probe:loss", limit(self.samples)})

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        wanted = how_many(self.count, len(here))
        return names_in(
            roster, here[draw_weighted(sizes(roster)[here], max(wanted, self.candidates or 2 * wanted), rng)]
        )

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        asked = (roster.last_probed[here] == round) & ~np.isnan(roster.figure("loss")[here])
        loss = np.where(asked, roster.figure("loss")[here], -np.inf)  # too few answered: the others go by lot
        return names_in(roster, here[top(loss, how_many(self.count, len(here)), rng)])


@dataclass(frozen=True)
class Oort(Counted):
    """Clients of high statistical utility, some of them new, none too slow.

    Lai, Zhu, Madhyastha and Chowdhury, "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI
    2021: n_i sqrt(mean loss^2), cut at the quantile `clip` and scaled to 0..1 as in the authors' code, plus
    sqrt(0.1 ln R / last round of i), times (duration / t_i)^penalty where a client takes longer (t_i seconds) than the
    preferred `duration` (0: speed does not matter). A share of explore * explore_decay^(R - 1), at least
    `explore_least`, of the places goes to clients never tried, quick ones first. The others are drawn, in proportion to
    their utility, among those with at least `cut` of the utility of the last to be admitted. The losses are those of
    the model received, on at most `samples`. Who was selected more than `most` times as often as the mean of those
    tried (0: no matter) is passed over while there are others, so that a false loss pays no better; the paper does so
    after a fixed number of rounds. Left out is the pacer, which changes the duration.
    """

    explore: float = 0.9
    explore_decay: float = 0.98
    explore_least: float = 0.2
    clip: float = 0.95
    cut: float = 0.95
    duration: float = 0.0
    penalty: float = 2.0
    samples: int = PROBE_SAMPLES
    most: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probe("all", 1.0, self.samples)
        check_setting("most", self.most == 0 or self.most >= 1, self.most, "0 (no limit) or at least 1")
        for name in ("explore", "explore_decay", "explore_least", "clip", "cut"):
            check_setting(name, 0 <= getattr(self, name) <= 1, getattr(self, name), "between 0 and 1")
        for name in ("duration", "penalty"):
            check_setting(name, getattr(self, name) >= 0, getattr(self, name), "at least 0")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"metrics:rms_loss", limit(self.samples)})

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        known = ~np.isnan(roster.figure("rms_loss")[here])
        old, new, wanted = here[known], here[~known], how_many(self.count, len(here))
        share = max(self.explore_least, self.explore * self.explore_decay ** (round - 1))
        exploited = min(len(old), wanted - min(len(new), int(share * wanted)))
        chosen = [new[draw_weighted(self.quickness(roster)[new], wanted - exploited, rng)]]
        if exploited:
            often = roster.selected[old] > self.most * roster.selected[old].mean()
            if self.most and len(old) - np.count_nonzero(often) >= exploited:
                old = old[~often]
            utility = self.utility(roster, round, old)
            admitted = np.flatnonzero(utility >= self.cut * np.partition(utility, -exploited)[-exploited])
            chosen.append(old[admitted[draw_weighted(utility[admitted], exploited, rng)]])
        return names_in(roster, np.concatenate(chosen))

    def utility(self, roster: Roster, round: int, rows: npt.NDArray[np.intp]) -> Floats:
        """The utility of clients that were heard of."""
        raw = np.clip(roster.n[rows] * roster.figure("rms_loss")[rows], 0, 1e300)
        value: Floats = scale_to_one(np.minimum(raw, np.quantile(raw, self.clip, method="lower")))
        value += np.sqrt(0.1 * np.log(max(1, round)) / np.maximum(1, roster.last_replied[rows]))
        if not self.duration:
            return value
        slowness = np.fmax(1.0, seconds_of(roster)[rows] / self.duration)  # one not known is not slow
        return np.asarray(value * slowness**-self.penalty)

    def quickness(self, roster: Roster) -> Floats:
        """How gladly each client is tried: all the same, or the quicker the better if speed matters."""
        if not self.duration:
            return np.ones(len(roster))
        return np.asarray(1 / np.maximum(1e-9, unknown_as_median(seconds_of(roster))))


@dataclass(frozen=True)
class FedCS(Counted):
    """As many clients as can reply before a deadline, at most `count`, the quickest first.

    Nishio and Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge", ICC
    2019: candidates drawn by lot (0: all) declare how long they need to get ready (download and train) and to upload;
    whoever adds least to the length of the round is added while the round ends within `deadline` seconds. With
    `in_turn` uploads go one after the other, as in the paper; otherwise side by side. What the roster does not know
    (`ready_seconds`, `upload_seconds`, told by the system model) counts as the median of what it does.
    """

    deadline: float = 180.0
    candidates: int | float = 0
    in_turn: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("deadline", self.deadline > 0, self.deadline, "above 0")
        if self.candidates:
            check_count(self.candidates)

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        drawn = how_many(self.candidates or 1.0, len(here))
        rows = rng.choice(here, drawn, replace=False)  # in an order by lot, which decides among equals
        ready = unknown_as_median(roster.figure("ready_seconds"))[rows]
        upload = unknown_as_median(roster.figure("upload_seconds"))[rows]
        most = min(how_many(self.count, len(here)), drawn)
        if self.in_turn:
            return names_in(roster, rows[self.turns(ready, upload, most)])
        seconds = ready + upload
        quickest = top(-seconds, most, rng)
        in_time = seconds[quickest] <= max(self.deadline, seconds.min())  # if nobody can: a round needs someone
        return names_in(roster, rows[quickest[in_time]])

    def turns(self, ready: Floats, upload: Floats, most: int) -> npt.NDArray[np.intp]:
        """The greedy choice of the paper: whoever makes the round end soonest, while it ends in time."""
        clock, chosen = 0.0, list[int]()
        while len(chosen) < most:
            end = np.maximum(clock, ready) + upload
            end[chosen] = np.inf
            quickest = int(end.argmin())
            if end[quickest] > self.deadline and chosen:
                break  # nobody else is quicker; the first is taken in any case
            chosen.append(quickest)
            clock = float(end[quickest])
        return np.array(chosen, np.intp)


PARTS = (everyone, Uniform, RoundRobin, AoI, Entropy, AoIU, Mix, PowerOfChoice, Oort, FedCS)
NAMES: dict[str, Callable[..., Any]] = {part.__name__.lower(): part for part in PARTS}


def check_count(count: int | float) -> None:
    """Refuse what is neither a number of clients nor a share of them."""
    whole = isinstance(count, int) and not isinstance(count, bool)
    if not (count >= 1 if whole else isinstance(count, float) and 0 < count <= 1):
        raise ValueError(f"count is {count!r}, but must be a whole number of at least 1 or a share above 0 up to 1.0")


def how_many(count: int | float, present: int) -> int:
    """A count or a share as a number of clients: at least one, at most all that are present."""
    wanted = round(count * present) if isinstance(count, float) else count
    return min(max(1, wanted), present)


def names_in(roster: Roster, rows: npt.NDArray[np.intp]) -> list[ClientId]:
    """The clients of these rows, sorted by name."""
    return [roster.ids[i] for i in np.sort(rows).tolist()]


def limit(samples: int) -> str:
    """The need that a client finds out what it tells on at most so many samples."""
    return f"config:probe_samples={samples}"


def draw_weighted(weights: Floats, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Positions drawn without replacement in proportion to their weights, at most as many as there are."""
    count = min(count, len(weights))
    if not count:
        return np.zeros(0, np.intp)
    p = np.maximum(weights / max(weights.max(), 1e-300), 1e-12)  # who has no weight is drawn when nobody else is left
    return rng.choice(len(weights), count, replace=False, shuffle=False, p=p / p.sum())


def sizes(roster: Roster) -> Floats:
    """The samples of each client; of one that has not said, the mean of those who have."""
    known = roster.n > 0
    return np.where(known, roster.n, roster.n[known].mean() if known.any() else 1.0).astype(np.float64)


def unknown_as_median(values: Floats) -> Floats:
    """Values with the unknown replaced by the median of the known, or 0 if there is none."""
    known = values[~np.isnan(values)]
    return np.where(np.isnan(values), np.median(known) if len(known) else 0.0, values)


def check_probe(refresh: str, share: float, samples: int) -> None:
    """Refuse a probe that cannot be."""
    check_setting("refresh", refresh in ("selected", "all", "share"), refresh, "one of selected, all, share")
    check_setting("share", 0 < share <= 1, share, "above 0 and at most 1")
    check_setting("samples", samples >= 1, samples, "at least 1")


def check_setting(name: str, right: bool, value: object, wanted: str) -> None:
    """Refuse a setting with a wrong value."""
    if not right:
        raise ValueError(f"{name} is {value!r}, but must be {wanted}")
