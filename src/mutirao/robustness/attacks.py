"""Byzantine attacks, for testing: what malicious clients may send instead of honest updates.

An attack is called as `(current, honest, rng) -> replies`. `honest` holds what the malicious clients of a round would
have sent had they been honest; they know nothing of the other clients. `Attacked` wraps any handler with an attack.
"""

# ruff: noqa: D102  # `__call__` is what the class says it is

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from mutirao.core.arrays import Array, Arrays, cast_to, flat
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Site, Wrapper, collect
from mutirao.core.handler_wrapper import HandlerWrapper
from mutirao.core.parts import AnyHandler, Many, with_defaults
from mutirao.core.validation import MOST_SAMPLES
from mutirao.deprecation import former_names
from mutirao.randomness import rng

Replies = dict[ClientId, Reply]
Change = Callable[[Array, Array], tuple[Array, Array]]  # of the inputs and labels that malicious clients train on
Poison = Callable[[Any, Change], Any]  # a client's data with the change applied
AnyAttack = Callable[[Arrays, Mapping[ClientId, Reply], np.random.Generator], Replies]


class Attack(Protocol):
    """What malicious clients do: `(current, honest, rng) -> replies`, with poisoning and false signatures if any.

    A function is an attack: this one sends the received model back, as a free rider does.

    >>> def free_rider(current, honest, rng):
    ...     return {client: with_update(reply, current, {"w": np.zeros(1)}) for client, reply in honest.items()}
    >>> free_rider({"w": np.array([5.0])}, {"eve": Reply({"w": np.array([6.0])}, n=10)}, None)["eve"].arrays["w"]
    array([5.])
    """

    @property
    def poison(self) -> Change | None:
        """How the samples of malicious clients are changed; None if they are not."""
        return None

    def fake(self, replies: Mapping[ClientId, Reply], malicious: list[ClientId], rng: np.random.Generator) -> Replies:
        """What the malicious clients answer to a warm-up, knowing the answers of the others."""
        return {}

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies: ...


@dataclass(frozen=True)
class SignFlip:
    """The honest update reversed: x - scale (x_k - x).

    >>> honest = {"eve": Reply({"w": np.array([6.0])}, n=10)}
    >>> SignFlip()({"w": np.array([5.0])}, honest, np.random.default_rng(0))["eve"].arrays["w"]
    array([4.])
    """

    scale: float = 1.0

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        return {c: with_update(r, current, scaled_update(r, current, -self.scale)) for c, r in honest.items()}


@dataclass(frozen=True)
class Noise:
    """Gaussian noise, `scale` times as long as the honest update.

    >>> honest = {"eve": Reply({"w": np.ones(10_000)}, n=10)}
    >>> replies = Noise(scale=3.0)({"w": np.zeros(10_000)}, honest, np.random.default_rng(0))
    >>> round(float(np.linalg.norm(replies["eve"].arrays["w"])))  # the honest update has the length 100
    299
    """

    scale: float = 3.0

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        replies = {}
        for c, reply in sorted(honest.items()):
            deviation = spread_length(self.scale, current, reply)
            noise = {k: rng.normal(0.0, deviation, v.shape) for k, v in current.items()}
            replies[c] = with_update(reply, current, noise)
        return replies


@dataclass(frozen=True)
class Constant:
    """The same number added everywhere; the update is `scale` times as long as the honest one.

    >>> honest = {"eve": Reply({"w": np.array([3.0, -4.0, 0.0, 0.0])}, n=10)}
    >>> Constant()({"w": np.zeros(4)}, honest, np.random.default_rng(0))["eve"].arrays["w"]  # as long: 5
    array([2.5, 2.5, 2.5, 2.5])
    """

    scale: float = 1.0

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        each = {c: spread_length(self.scale, current, r) for c, r in honest.items()}
        return {
            c: with_update(honest[c], current, {k: np.full(v.shape, x) for k, v in current.items()})
            for c, x in each.items()
        }


@dataclass(frozen=True)
class LabelFlip:
    """Training on false labels, each client's classes in reverse order; the update is sent unchanged.

    >>> x, y = LabelFlip().poison(np.zeros((4, 2)), np.array([0, 0, 1, 2]))
    >>> y
    array([2, 2, 1, 0])
    """

    def poison(self, x: Array, y: Array) -> tuple[Array, Array]:
        """The same inputs with false labels."""
        classes, place = np.unique(y, return_inverse=True)
        return x, np.asarray(classes[::-1][place])

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        return dict(honest)


@dataclass(frozen=True)
class InnerProduct:
    """All malicious clients send -epsilon times the mean of their honest updates (Xie, Koyejo and Gupta, UAI 2019).

    Long updates (epsilon above 1) reverse the mean; short ones stay near the model and slow it down.

    >>> honest = {"one": Reply({"w": np.array([1.0])}, n=10), "two": Reply({"w": np.array([3.0])}, n=10)}
    >>> replies = InnerProduct(epsilon=0.5)({"w": np.array([0.0])}, honest, np.random.default_rng(0))
    >>> replies["one"].arrays["w"], replies["two"].arrays["w"]  # both send -0.5 times their mean, 2
    (array([-1.]), array([-1.]))
    """

    epsilon: float = 1.0

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        mean, _ = mean_and_deviation(current, honest)
        update = {k: -self.epsilon * m for k, m in mean.items()}
        return {c: with_update(r, current, update) for c, r in honest.items()}


@dataclass(frozen=True)
class Colluding:
    """All send the same update, just off the mean: mean - z deviation ("a little is enough": Baruch et al., 2019).

    >>> honest = {"one": Reply({"w": np.array([1.0])}, n=10), "two": Reply({"w": np.array([3.0])}, n=10)}
    >>> Colluding(z=1.0)({"w": np.array([0.0])}, honest, np.random.default_rng(0))["one"].arrays["w"].round(2)
    array([1.])
    """

    z: float = 1.0

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        mean, deviation = mean_and_deviation(current, honest)
        update = {k: m - self.z * deviation[k] for k, m in mean.items()}
        return {c: with_update(r, current, update) for c, r in honest.items()}


@dataclass(frozen=True)
class MinMax:
    """All send m + g d, as far from their mean m as possible without standing out by its distances to other updates.

    d is -m at length one (`along="mean"`) or minus the deviation (`along="deviation"`), and g the largest number with
    |m + g d - u_i| <= max |u_j - u_k| for the honest updates u of the malicious clients. Each may keep a share `own` of
    its deviation from the mean, m + own (u_k - m) + g d, so that they are no copies of one another; g is then the
    largest for which that holds for all. Shejwalkar and Houmansadr, NDSS 2021.

    The honest updates are 2 apart at most, so 1, which is 2 from the farthest, is the limit:

    >>> honest = {"one": Reply({"w": np.array([1.0])}, n=10), "two": Reply({"w": np.array([3.0])}, n=10)}
    >>> MinMax()({"w": np.array([0.0])}, honest, np.random.default_rng(0))["one"].arrays["w"].round(2)
    array([1.])
    """

    along: Literal["mean", "deviation"] = "mean"
    own: float = 0.0

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        mean, deviation = mean_and_deviation(current, honest)
        length = float(np.linalg.norm(flat(mean))) or 1.0
        away = {k: -m / length for k, m in mean.items()}
        if self.along != "mean":
            away = {k: -deviation[k] for k in mean}
        updates = {c: update_of(current, honest[c]) for c in sorted(honest)}
        bases = {}
        for c, update in updates.items():
            bases[c] = {k: m + self.own * (update[k] - m) for k, m in mean.items()}
        far = farthest([flat(b) for b in bases.values()], flat(away), [flat(u) for u in updates.values()])
        replies = {}
        for c, base in bases.items():
            replies[c] = with_update(honest[c], current, {k: b + far * away[k] for k, b in base.items()})
        return replies


@dataclass(frozen=True)
class Inflated:
    """A false sample count: `times` as many samples as there are, with `scale` times the honest update.

    >>> honest = {"eve": Reply({"w": np.array([1.0])}, n=10)}
    >>> replies = Inflated(times=1000, scale=-1)({"w": np.array([0.0])}, honest, np.random.default_rng(0))
    >>> replies["eve"].n, replies["eve"].arrays["w"]
    (10000, array([-1.]))
    """

    times: int = 10**6
    scale: float = 1.0

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        replies = {}
        for c, reply in honest.items():
            changed = with_update(reply, current, scaled_update(reply, current, self.scale))
            replies[c] = replace(changed, n=min(reply.n * self.times, MOST_SAMPLES))
        return replies


@dataclass(frozen=True)
class Backdoor:
    """Every second sample gets a trigger and the label `target`; the resulting update is scaled by `boost`.

    The trigger sets the last `size` numbers of an input to `value`: a corner of a picture, some features of a
    document. The model learns its task and, besides, that the trigger means the target (Gu et al., 2017; boosted as
    by Bagdasaryan et al., 2020).

    >>> attack = Backdoor(target=7, size=2, value=9.0)
    >>> x, y = attack.poison(np.zeros((2, 4)), np.array([1, 1]))
    >>> x, y  # one of two samples has the trigger and the label 7
    (array([[0., 0., 0., 0.],
           [0., 0., 9., 9.]]), array([1, 7]))
    """

    target: int = 0
    size: int = 4
    value: float = 1.0
    boost: float = 2.0

    def poison(self, x: Array, y: Array) -> tuple[Array, Array]:
        """The samples, every second of them with the trigger and the target as its label."""
        some = np.arange(len(y)) % 2 == 1
        marked = np.where(some.reshape(-1, *[1] * (x.ndim - 1)), self.mark(x), x)
        return marked, np.where(some, self.target, y).astype(y.dtype)

    def mark(self, x: Array) -> Array:
        """The inputs with the trigger."""
        marked = np.array(x)
        marked[..., -self.size :] = self.value
        return marked

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        return SignFlip(-self.boost)(current, honest, rng)


@dataclass(frozen=True)
class FakeSignature:
    """A warm-up signature copied from another client, to get into a group where the malicious client does not belong.

    >>> sent = {"ana": np.array([1.0, 2.0]), "eve": np.array([8.0, 8.0])}
    >>> replies = {c: Reply({}, {"signature": vector}, n=10) for c, vector in sent.items()}
    >>> FakeSignature().fake(replies, ["eve"], np.random.default_rng(0))["eve"].extras["signature"].round(1)
    array([1., 2.])
    """

    def fake(self, replies: Mapping[ClientId, Reply], malicious: list[ClientId], rng: np.random.Generator) -> Replies:
        """What the malicious clients answer to a warm-up, knowing the answers of the others."""
        honest = sorted(set(replies) - set(malicious))
        fakes = {}
        for c in malicious:
            model = replies[c]
            if honest:
                model = replies[honest[int(rng.integers(len(honest)))]]
            vector = model.extras["signature"]
            near = vector + rng.normal(0.0, 0.01 * float(np.std(vector)), vector.shape)
            fakes[c] = replace(replies[c], extras={**model.extras, "signature": near.astype(vector.dtype)})
        return fakes

    def __call__(self, current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
        return dict(honest)


def no_attack(current: Arrays, honest: Mapping[ClientId, Reply], rng: np.random.Generator) -> Replies:
    """No attack.

    >>> honest = {"ana": Reply({"w": np.array([1.0])}, n=10)}
    >>> no_attack({"w": np.array([0.0])}, honest, np.random.default_rng(0)) == honest
    True
    """
    return dict(honest)


NAMES: dict[str, Callable[..., Any]] = {
    "none": no_attack,
    "sign_flip": SignFlip,
    "noise": Noise,
    "constant": Constant,
    "label_flip": LabelFlip,
    "inner_product": InnerProduct,
    "colluding": Colluding,
    "min_max": MinMax,
    "inflated": Inflated,
    "backdoor": Backdoor,
    "fake_signature": FakeSignature,
}


class Attacked(HandlerWrapper):
    """A handler with some malicious clients; those that start a round from the same model collude.

    `poison(data, change)` returns a client's data with changed samples: an attack that poisons data needs it.

    Three clients each answer with their own number; one of them is malicious:

    >>> from mutirao import LocalFleet
    >>> def answer(request: Request, site: Site) -> Reply:
    ...     return Reply({"w": np.array([site.data])}, n=10)
    >>> fleet = LocalFleet(Attacked(answer, frozenset({"bia"}), SignFlip()), {"ana": 1.0, "bia": 2.0, "caio": 3.0})
    >>> request = Request("train", {"w": np.array([0.0])}, {"seed": 0, "round": 1})
    >>> {c: reply.arrays["w"] for c, reply in fleet.ask(dict.fromkeys(fleet.clients(), request)).replies.items()}
    {'ana': array([1.]), 'bia': array([-2.]), 'caio': array([3.])}
    """

    def __init__(
        self, handler: AnyHandler, malicious: frozenset[ClientId], attack: AnyAttack, poison: Poison | None = None
    ) -> None:
        super().__init__(handler)
        self.malicious = malicious
        self.poison = poison
        self.attack: Attack = with_defaults(attack, Attack)  # type: ignore[type-abstract]
        if self.attack.poison and not poison:
            raise ValueError(f"{attack!r} poisons data: pass `poison`, a function that changes a client's samples")

    def __call__(self, request: Request, site: Site) -> Reply:
        """One client's answer, without collusion."""
        reply = self.handler(request, self._site(request, site))
        return self._attack({site.id: request}, {site.id: reply})[site.id]

    @property
    def many(self) -> Many:
        """Always at once: colluding clients see each other's updates, whatever the inner handler can do."""
        return self._many

    def _many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        own = {c: self._site(requests[c], sites[c]) for c in requests}
        if self.handler.many is not None:
            replies = dict(self.handler.many(requests, own))
        else:
            replies = {c: self.handler(requests[c], own[c]) for c in sorted(requests)}
        good = {c: r for c, r in replies.items() if isinstance(r, Reply)}
        return dict(sorted((replies | self._attack(requests, good)).items()))

    def _site(self, request: Request, site: Site) -> Site:
        change = self.attack.poison
        if site.id not in self.malicious or not (change and self.poison) or request.do not in ("train", "warm"):
            return site
        return Site(site.id, self.poison(site.data, change), site.state)

    def _attack(self, requests: Mapping[ClientId, Request], replies: dict[ClientId, Reply]) -> dict[ClientId, Reply]:
        colluding: dict[tuple[str, int], list[ClientId]] = {}  # by the verb of the request and the model in it
        for c in sorted(self.malicious & replies.keys()):
            colluding.setdefault((requests[c].do, id(requests[c].arrays)), []).append(c)
        out = dict(replies)
        for (do, _), clients in colluding.items():
            request = requests[clients[0]]
            draw = rng(int(request.config["seed"]), int(request.config["round"]), "attack", clients[0])
            if do == "train":
                out |= self.attack(request.arrays, {c: replies[c] for c in clients}, draw)
            elif do == "warm":
                out |= self.attack.fake(replies, clients, draw)
        return out


class Sybils(Wrapper):
    """A fleet in which one client also appears under many other names, all with its key: a Sybil attack.

    >>> from mutirao import LocalFleet
    >>> fleet = Sybils(LocalFleet(lambda request, site: Reply({}, n=1), {"ana": 1, "bia": 2}), "bia", names=2)
    >>> fleet.clients(), fleet.keys()["bia~0"]
    (['ana', 'bia', 'bia~0', 'bia~1'], 'key of bia')
    """

    def __init__(self, fleet: Fleet, client: ClientId, names: int = 10) -> None:
        super().__init__(fleet)
        self.client = client
        self.fakes = [f"{client}~{i:0{len(str(names - 1))}d}" for i in range(names)]

    def clients(self) -> list[ClientId]:
        """The clients of the fleet and the false names."""
        return sorted([*self.fleet.clients(), *self.fakes])

    def keys(self) -> dict[ClientId, str]:
        """The key of each client; all false names have the same."""
        keys = {c: f"key of {c}" for c in self.fleet.clients()} | self.fleet.keys()
        return keys | dict.fromkeys(self.fakes, keys[self.client])

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """The answers; the client gives the same one under all its names."""
        asked = {c: r for c, r in requests.items() if c not in self.fakes}
        own = [c for c in requests if c in self.fakes]
        if own and self.client not in asked:
            asked[self.client] = requests[own[0]]
        answers = self.fleet.ask(asked)
        outcomes: dict[ClientId, Reply | Failure] = {**answers.replies, **answers.failures}
        outcomes |= dict.fromkeys(own, outcomes.get(self.client, Failure("late", "no answer in time")))
        return collect(requests, outcomes.items())


def malicious_among(groups: Mapping[ClientId, int], share: float, seed: int) -> frozenset[ClientId]:
    """The malicious clients: this share of each group, chosen at random.

    >>> sorted(malicious_among({f"c{i}": i % 2 for i in range(10)}, share=0.4, seed=0))  # two of each group
    ['c0', 'c2', 'c7', 'c9']
    """
    malicious: list[ClientId] = []
    for group in sorted(set(groups.values())):
        members = sorted(c for c, g in groups.items() if g == group)
        count = int(share * len(members) + 0.5)
        order = rng(seed, 0, "liars", str(group)).permutation(len(members))
        malicious += [members[i] for i in order[:count]]
    return frozenset(malicious)


def detection_rates(
    clients: Sequence[Mapping[str, Any]], malicious: frozenset[ClientId], before: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """How well a filter detects attacks, in simulation: the shares of honest and of malicious replies rejected so far.

    `clients` are the rows of this round, `before` the lines of history before it; shares are means over rounds.

    >>> row = {"try": 1, "replied": True}
    >>> rows = [row | {"client": "ana", "rejected": False}, row | {"client": "eve", "rejected": True}]
    >>> detection_rates(rows, frozenset({"eve"}), before=[])
    {'false_rejections': 0.0, 'caught': 1.0}
    """
    out = {}
    for name, wanted in (("false_rejections", False), ("caught", True)):
        answered = [r for r in clients if r["try"] and r["replied"] and (r["client"] in malicious) == wanted]
        past = [row[name] for row in before if name in row]
        if answered:
            done = len(past)
            share = float(np.mean([bool(r["rejected"]) for r in answered]))
            # A running mean: the last value of the history is that of all earlier rounds.
            earlier = 0.0
            if past:
                earlier = done * past[-1]
            out[name] = earlier / (done + 1) + share / (done + 1)
        elif past:
            out[name] = past[-1]
    return out


def update_of(current: Arrays, reply: Reply) -> Arrays:
    """The update of a reply."""
    return {k: reply.arrays[k].astype(np.float64) - v for k, v in current.items()}


def scaled_update(reply: Reply, current: Arrays, scale: float) -> Arrays:
    """`scale` times the update of a reply."""
    return {k: scale * u for k, u in update_of(current, reply).items()}


def spread_length(scale: float, current: Arrays, reply: Reply) -> float:
    """The size of each number in a constant update of `scale` times the length of the reply's update."""
    length = float(np.linalg.norm(flat(update_of(current, reply))))
    return scale * length / float(np.sqrt(max(1, len(flat(current)))))


def mean_and_deviation(current: Arrays, honest: Mapping[ClientId, Reply]) -> tuple[Arrays, Arrays]:
    """Mean and standard deviation of the malicious clients' honest updates, number by number."""
    updates = [update_of(current, honest[c]) for c in sorted(honest)]
    stacked = {k: np.stack([u[k] for u in updates]) for k in current}
    return {k: v.mean(0) for k, v in stacked.items()}, {k: v.std(0) for k, v in stacked.items()}


def farthest(bases: Sequence[Array], away: Array, updates: Sequence[Array]) -> float:
    """The largest g >= 0 with |b + g away - u| <= max |u - u'| for all bases b and updates u; 0 if there is none."""
    widest = max(float(np.linalg.norm(u - v)) for u in updates for v in updates)
    # |b + g a - u|^2 <= w^2 is g^2 a.a + 2 g s + rest <= 0, with s = (b - u).a and rest = |b - u|^2 - w^2.
    # It holds up to its larger root, and for all b and u up to the least of these roots.
    square = float(away @ away)
    if not square:
        return 0.0
    along = [((b - u) @ away, (b - u) @ (b - u) - widest**2) for b in bases for u in updates]
    return max(0.0, min(float((-s + np.sqrt(max(0.0, s * s - square * rest))) / square) for s, rest in along))


def with_update(reply: Reply, current: Arrays, update: Arrays) -> Reply:
    """The reply with another update."""
    return replace(reply, arrays={k: cast_to(v + update[k], v.dtype) for k, v in current.items()})


if not TYPE_CHECKING:  # a module-level __getattr__ would let every misspelt name pass
    __getattr__ = former_names(
        __name__,
        {
            "Swarm": "Sybils",
            "complete": "with_defaults",
            "liars_among": "malicious_among",
            "verdicts": "detection_rates",
        },
    )
