"""The server side of secure aggregation: a fleet in which every reply is the mean of all that answered.

Requests to train or evaluate take four stages (Bonawitz et al., 2017; Bell et al., 2020):

    keys      each client makes two key pairs for this sum; the server forwards the public keys
    shares    each client shares with its neighbours, encrypted, what would unmask it
    masked    each client trains, and sends its masked update
    unmask    shares of the masks of clients in the sum, and of the keys of clients that dropped out

Clients may drop out at any stage. As long as enough neighbours of each stay, the sum contains all masked updates that
arrived.
"""

import itertools
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Scalar, Wrapper, traffic
from mutirao.privacy.secure_aggregation.fixed_point import FixedPoint
from mutirao.privacy.secure_aggregation.key_agreement import (
    PUBLIC,
    SHARE,
    SumPart,
    add_parts,
    commit,
    is_public,
    negate,
    own_mask,
    public_of,
    recover_secret,
    shared_mask,
)
from mutirao.privacy.secure_aggregation.settings import KEYS, MASKED, SHARES, STAGES, SUMMED, UNMASK, Settings


def draw_neighbours(clients: Sequence[ClientId], count: int) -> dict[ClientId, list[ClientId]]:
    """An even number of neighbours for each client, at least `count`, or all others if there are no more.

    The order comes from the system's randomness; no result depends on it.
    """
    ring = list(clients)
    secrets.SystemRandom().shuffle(ring)
    half = min((count + 1) // 2, len(ring) // 2)
    around = [d for d in range(-half, half + 1) if d]
    neighbours: dict[ClientId, list[ClientId]] = {}
    for i, client in enumerate(ring):
        nearest = {ring[(i + d) % len(ring)] for d in around}
        neighbours[client] = sorted(nearest - {client})
    return neighbours


MAX_SEALED_BYTES = 4096  # of an encrypted share; ours have some 450


class SecureFleet(Wrapper):
    """A fleet that sums replies without seeing them; requests of one model and kind form one sum.

    `metrics` are the names of those that are summed with an update.
    """

    def __init__(self, fleet: Fleet, secure: Settings, metrics: Sequence[str]) -> None:
        super().__init__(fleet)
        self.secure = secure
        self.metrics = tuple(metrics)

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """The mean of each sum as the reply of everyone in it; clients that dropped out have failures of their own."""
        apart: dict[Any, dict[ClientId, Request]] = {}
        for client, request in sorted(requests.items()):
            extras = sorted((k, id(v)) for k, v in request.extras.items())
            about = request.do, id(request.arrays), extras, sorted((k, repr(v)) for k, v in request.config.items())
            apart.setdefault(repr(about) if request.do in SUMMED else None, {})[client] = request
        unsummed = apart.pop(None, {})
        sums = [
            MaskedSum(list(asked), next(iter(asked.values())), self.secure, self.metrics) for asked in apart.values()
        ]
        carried = [(0, 0)]
        results: list[Answers] = []
        if unsummed:
            results.append(self.fleet.ask(unsummed))
            carried.append(traffic(unsummed, results[0]))
        for stage in STAGES:
            asked: dict[ClientId, Request] = {}
            for one in sums:
                asked |= one.requests(stage)
            if asked:
                answers = self.fleet.ask(asked)
                carried.append(traffic(asked, answers))
                for one in sums:
                    one.receive(stage, answers)
        results += [one.answers() for one in sums]
        replies: dict[ClientId, Reply] = {}
        failures: dict[ClientId, Failure] = {}
        for result in results:
            replies |= result.replies
            failures |= result.failures
        total = sum(down for down, _ in carried), sum(up for _, up in carried)
        return Answers(dict(sorted(replies.items())), dict(sorted(failures.items())), total)


class MaskedSum:
    """One sum from keys to mean: its members, what they sent, and which dropped out."""

    def __init__(self, members: list[ClientId], request: Request, secure: Settings, metrics: tuple[str, ...]) -> None:
        self.members = members
        self.request = request
        self.secure = secure
        self.metrics = metrics
        self.session = secrets.token_hex(16)
        self.scale = FixedPoint(secure, len(members), metrics)
        self.lost: dict[ClientId, Failure] = {}
        self.aborted: Failure | None = None  # why there will be no sum
        self.remaining = list(members) if len(members) >= secure.least else []
        # Public keys for encrypted shares and for masks.
        self.keys: dict[ClientId, tuple[bytes, bytes]] = {}
        self.neighbours: dict[ClientId, list[ClientId]] = {}
        self.letters: dict[tuple[ClientId, ClientId], bytes] = {}  # from, to
        self.commits: dict[ClientId, bytes] = {}
        self.shared: dict[ClientId, None] = {}  # who has shared its secrets
        self.parts: dict[ClientId, tuple[SumPart, int]] = {}
        self.shares: dict[ClientId, list[bytes]] = {}
        self.mean: Reply | None = None
        if not self.remaining:
            self.abort(f"{len(members)} clients; a sum has at least {secure.least}")

    @property
    def trained(self) -> bool:
        """Whether updates are summed, not metrics only."""
        return self.request.do == "train"

    def abort(self, why: str) -> None:
        """End this sum without a result."""
        self.aborted = Failure("too_few", why)
        self.remaining = []

    def requests(self, stage: str) -> dict[ClientId, Request]:
        """The requests of a stage to the remaining clients."""
        make = {KEYS: self.ask_keys, SHARES: self.ask_shares, MASKED: self.ask_masked, UNMASK: self.ask_unmask}[stage]
        about = {k: v for k, v in self.request.config.items() if k in ("seed", "round")}
        session: dict[str, Scalar] = {**about, "secagg.session": self.session}
        made = make()
        return {c: replace(r, do=stage, config={**r.config, **session}) for c, r in made.items()}

    def receive(self, stage: str, answers: Answers) -> None:
        """Process the answers of a stage; clients with missing or invalid answers are lost."""
        take: Callable[[ClientId, Reply], str]
        take = {KEYS: self.take_keys, SHARES: self.take_shares, MASKED: self.take_part, UNMASK: self.take_unmask}[stage]
        asked = self.remaining
        self.remaining = []
        for client in asked:
            failure = answers.failures.get(client)
            if failure is None and (fault := take(client, answers.replies[client])):
                failure = Failure("malformed", f"{stage}: {fault}")
            if failure is None:
                self.remaining.append(client)
            elif stage != UNMASK:  # a client that gets lost after its update came is in the sum all the same
                self.lost[client] = unmasked_failure(failure)
        if not self.aborted and asked:
            self.advance(stage)

    def advance(self, stage: str) -> None:
        """Prepare the next stage once all answers of a stage are processed."""
        least = self.secure.least
        # A client that loses too many neighbours is dropped, which may leave others short in turn.
        while stage == SHARES and (short := [c for c in self.remaining if self.left(c) < self.needed(c)]):
            self.lost |= {c: Failure("too_few", f"{self.left(c)} of it and its neighbours are left") for c in short}
            self.remaining = [c for c in self.remaining if c not in short]  # as if they had shared nothing
        if len(self.remaining) < least and stage != UNMASK:
            self.abort(f"{len(self.remaining)} clients are left after {stage}, {least} are needed")
        elif stage == KEYS:
            self.neighbours = draw_neighbours(self.remaining, self.secure.neighbours)
        elif stage == SHARES:
            self.shared = dict.fromkeys(self.remaining)
        elif stage == MASKED and (short := [c for c in self.shared if self.left(c) < self.needed(c)]):
            self.abort(
                f"{self.left(short[0])} of {short[0]} and its neighbours are left, {self.needed(short[0])} needed"
            )
        elif stage == UNMASK:
            self.finish()

    def needed(self, client: ClientId) -> int:
        """How many of a client and its neighbours must stay."""
        return self.secure.needed(len(self.neighbours[client]) + 1)

    def left(self, client: ClientId) -> int:
        """How many of a client and its neighbours remain."""
        return len({client, *self.neighbours[client]} & set(self.remaining))

    def ask_keys(self) -> dict[ClientId, Request]:
        """Requests for keys."""
        return dict.fromkeys(self.remaining, Request("", {}, {"secagg.settings": self.scale.text()}))

    def take_keys(self, client: ClientId, reply: Reply) -> str:
        """Store a client's public keys; the fault, if any."""
        found = [reply.extras.get(kind) for kind in ("letters", "masks")]
        if any(f is None or f.dtype != np.uint8 or f.shape != (PUBLIC,) for f in found):
            return "sent no two valid public keys"
        letters, masks = (f.tobytes() for f in found if f is not None)
        if letters == masks or not (is_public(letters) and is_public(masks)):
            return "sent no two valid public keys"
        if {letters, masks} & set(itertools.chain.from_iterable(self.keys.values())):
            return "sent another client's key"
        self.keys[client] = (letters, masks)
        return ""

    def ask_shares(self) -> dict[ClientId, Request]:
        """Requests for shares, with the neighbours' public keys."""
        out = {}
        for client in self.remaining:
            neighbours = self.neighbours[client]
            keys = [self.keys[n] for n in neighbours]
            rows = {
                "secagg.letters": np.stack([np.frombuffer(letters, np.uint8) for letters, _ in keys]),
                "secagg.masks": np.stack([np.frombuffer(masks, np.uint8) for _, masks in keys]),
            }
            out[client] = Request("", {}, {"secagg.peers": json.dumps(neighbours)}, rows)
        return out

    def take_shares(self, client: ClientId, reply: Reply) -> str:
        """Store a client's encrypted shares for its neighbours; the fault, if any."""
        rows, sizes, commitment = (reply.extras.get(kind) for kind in ("sealed", "sizes", "commit"))
        neighbours = self.neighbours[client]
        if rows is None or rows.dtype != np.uint8 or rows.ndim != 2 or len(rows) != len(neighbours):
            return "sent no encrypted shares"
        if (
            sizes is None
            or sizes.shape != (len(neighbours),)
            or sizes.dtype.kind != "i"
            or rows.shape[1] > MAX_SEALED_BYTES
        ):
            return "sent encrypted shares of invalid sizes"
        if commitment is None or commitment.dtype != np.uint8 or commitment.shape != (32,):
            return "sent no commitment to its mask"
        for name, row, size in zip(neighbours, rows, sizes.tolist(), strict=True):
            self.letters[client, name] = row.tobytes()[: max(0, size)]
        self.commits[client] = commitment.tobytes()
        return ""

    def ask_masked(self) -> dict[ClientId, Request]:
        """Requests for masked answers, with the shares from the remaining neighbours."""
        common: dict[str, Scalar] = {
            **self.request.config,
            "secagg.do": self.request.do,
            "secagg.clients": str(self.scale.clients),
            "secagg.metrics": json.dumps(self.metrics),
        }
        out = {}
        for client in self.remaining:
            neighbours = [n for n in self.neighbours[client] if n in self.shared]
            sealed = [self.letters[n, client] for n in neighbours]
            width = max(map(len, sealed), default=0)
            extras: Arrays = {
                "secagg.sealed": np.array([list(s.ljust(width, b"=")) for s in sealed], np.uint8).reshape(-1, width),
                "secagg.sizes": np.array([len(s) for s in sealed], np.int32),
            }
            config = {**common, "secagg.from": json.dumps(neighbours)}
            out[client] = Request("", self.request.arrays, config, {**self.request.extras, **extras})
        return out

    def take_part(self, client: ClientId, reply: Reply) -> str:
        """Store a client's masked update; the fault, if any."""
        update = reply.arrays.get("update")
        wide = reply.arrays.get("wide")
        sizes = self.scale.sizes(self.request.arrays, self.trained)
        if update is None or update.dtype != self.scale.word or update.shape != sizes[:1]:
            return f"sent no {sizes[0]} masked numbers of {self.scale.word}"
        if wide is None or wide.dtype != np.uint64 or wide.shape != sizes[1:]:
            return f"sent no {sizes[1]} masked figures"
        public = reply.n if self.secure.sizes == "public" else 1
        if not isinstance(public, int | np.integer) or not 0 < public <= self.secure.most_samples:
            return "declared a number of samples that cannot be"
        self.parts[client] = ((update, wide), int(public))
        return ""

    def ask_unmask(self) -> dict[ClientId, Request]:
        """Requests for the shares that remove the masks from the sum."""
        requests: dict[ClientId, Request] = {}
        for client in self.remaining:
            outcomes = self.neighbour_outcomes(client)
            config = {f"secagg.{kind}": json.dumps(names) for kind, names in outcomes.items()}
            requests[client] = Request("", {}, config)
        return requests

    def neighbour_outcomes(self, client: ClientId) -> dict[str, list[ClientId]]:
        """Which of a client's neighbours are in the sum, and which were lost after sharing their secrets."""
        neighbours = [n for n in self.neighbours[client] if n in self.shared]
        return {
            "alive": [n for n in neighbours if n in self.parts],
            "lost": [n for n in neighbours if n not in self.parts],
        }

    def take_unmask(self, client: ClientId, reply: Reply) -> str:
        """Store the shares that a client holds, its own first; the fault, if any."""
        neighbour_outcomes = self.neighbour_outcomes(client)
        found = reply.extras.get("shares")
        owners = [client, *neighbour_outcomes["alive"], *neighbour_outcomes["lost"]]
        if found is None or found.dtype != np.uint8 or found.shape != (len(owners), SHARE):
            return "sent no shares"
        for name, row in zip(owners, found, strict=True):
            self.shares.setdefault(name, []).append(row.tobytes())
        return ""

    def finish(self) -> None:
        """Remove the masks from the sum of all parts, and decode the mean."""
        mask_owners = self.mask_owners
        short = [c for c in self.shared if c in mask_owners and len(self.shares.get(c, ())) < self.needed(c)]
        if short:
            held = len(self.shares.get(short[0], ()))
            self.abort(f"{held} shares that unmask {short[0]} came, {self.needed(short[0])} are needed")
            return
        try:
            parts = (part for part, _ in self.parts.values())
            total = next(parts)
            for part in itertools.chain(parts, self.masks(total)):  # one at a time: models may be large
                total = add_parts(total, part)
            arrays, metrics, weight = self.scale.read(self.request.arrays, *total, self.trained)
        except ValueError as error:
            self.abort(f"the sum cannot be unmasked: {error}")
            return
        self.mean = Reply(arrays, {}, metrics, max(1, round(weight / len(self.parts))))

    @property
    def mask_owners(self) -> set[ClientId]:
        """The clients with masks in the sum: its members, and the lost neighbours of any of them."""
        owners = set(self.parts)
        for client in self.parts:
            owners.update(self.neighbour_outcomes(client)["lost"])
        return owners

    def masks(self, like: SumPart) -> Iterator[SumPart]:
        """What removes the masks: members' own masks, and the masks that lost clients share with members."""
        for client in sorted(self.mask_owners):
            secret = recover_secret(self.shares[client][: self.needed(client)])
            # Wrong shares combine to some number, too: without these checks a wrong mask would spoil the sum unseen.
            if client in self.parts:
                if commit(self.session, secret) != self.commits[client]:
                    raise ValueError(f"shares of {client} do not fit")
                update, wide = own_mask(self.session, secret, like)
                yield negate(update), negate(wide)
                continue
            if public_of(secret) != self.keys[client][1]:
                raise ValueError(f"shares of {client} do not fit")
            for peer in self.neighbours[client]:
                if peer in self.parts:
                    yield shared_mask(self.session, secret, self.keys[peer][1], client, peer, like)

    def answers(self) -> Answers:
        """The mean as everyone's reply, and the failures of the others."""
        if self.mean is None:
            aborted = self.aborted or Failure("too_few", "no client is left")
            return Answers({}, {c: self.lost.get(c, aborted) for c in self.members})
        public = self.secure.sizes == "public" and self.trained
        replies = {c: replace(self.mean, n=n) if public else self.mean for c, (_, n) in sorted(self.parts.items())}
        return Answers(replies, dict(sorted(self.lost.items())))


def unmasked_failure(failure: Failure) -> Failure:
    """The failure as it would be without masks: faults that a site found in its own reply keep their kind."""
    rule, colon, reason = failure.reason.partition(": ")
    kind = rule.removeprefix("secure.")
    if failure.kind == "refused" and colon and kind in ("not_finite", "count", "shape", "dtype", "empty"):
        return Failure(kind, reason)
    return failure
