"""The client side of secure aggregation: a handler wrapper that masks its replies.

Four stages make a session: keys, shares, the masked update, unmasking. What the client must remember between them
lies in its site's state until the session ends or another begins. No stage is answered twice in a session: masks used
for two updates would reveal their difference.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mutirao.core.agreement import AGREE
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import FLEETING, Reply, Request, Site
from mutirao.core.handler_wrapper import Forward, HandlerWrapper
from mutirao.core.parts import AnyHandler
from mutirao.core.sparse_rows import BLOCKS, expand_rows, to_dense
from mutirao.core.validation import fault, fault_of_extras
from mutirao.errors import Refused
from mutirao.privacy.secure_aggregation.fixed_point import FixedPoint
from mutirao.privacy.secure_aggregation.key_agreement import (
    PUBLIC,
    SHARE,
    commit,
    draw_secret,
    mask_part,
    public_of,
    seal,
    shared_key,
    split_secret,
    unseal,
)
from mutirao.privacy.secure_aggregation.settings import (
    KEYS,
    MASKED,
    PREFIX,
    SHARES,
    SUMMED,
    UNMASK,
    Settings,
    without_session,
)

STATE = FLEETING + "secagg"
# Other requests that are allowed, and the extras that leave with their replies: clustering needs signatures, a model is
# handed over, sparse rows are named by blocks, and an agreement is confirmed.
ALLOWED_EXTRAS: Mapping[str, tuple[str, ...]] = {"warm": ("signature",), "take": (), "rows": (BLOCKS,), AGREE: ()}
Memory = dict[str, Any]


class MaskingHandler(HandlerWrapper):
    """A handler that answers the stages of a sum, and refuses requests that concern this client alone."""

    def __init__(self, handler: AnyHandler, secure: Settings) -> None:
        super().__init__(handler)
        self.secure = secure

    def before(self, request: Request, site: Site) -> Forward | Reply:
        """The reply to a stage without training; for the masked stage, the request inside."""
        if request.do != MASKED:
            return self.talk(request, site)
        memory, plain = self.prepare(request, site)
        return Forward(site, note=(memory, plain), request=plain)

    def after(self, request: Request, site: Site, reply: Reply, note: Any) -> Reply:
        """The masked reply."""
        memory, plain = note
        return self.mask(request, plain, reply, site, memory)

    def talk(self, request: Request, site: Site) -> Reply:
        """The reply to a request that needs no training."""
        if request.do == KEYS:
            return self.make_keys(request, site)
        if request.do == SHARES:
            return self.share_secrets(request, site)
        if request.do == UNMASK:
            return self.unmask(request, site)
        if request.do in ALLOWED_EXTRAS:
            reply = self.handler(request, site)
            return Reply({}, {k: v for k, v in reply.extras.items() if k in ALLOWED_EXTRAS[request.do]}, {}, 1)
        raise Refused("secure", f"{str(request.do)[:40]!r} asks about this client alone, and only sums leave this site")

    def make_keys(self, request: Request, site: Site) -> Reply:
        """Begin a session: two key pairs, one for encrypted shares and one for masks."""
        session = setting_of(request, "session")
        settings = setting_of(request, "settings")
        if settings != FixedPoint(self.secure, 1).text():
            raise Refused("secure.settings", f"this site sums with {FixedPoint(self.secure, 1).text()}")
        letters = draw_secret()
        masks = draw_secret()
        save_session(site, {"session": session, "next": SHARES, "letters": letters.hex(), "masks": masks.hex()})
        return Reply({}, {"letters": byte_array(public_of(letters)), "masks": byte_array(public_of(masks))}, {}, 1)

    def share_secrets(self, request: Request, site: Site) -> Reply:
        """Share the two secrets that unmask this client among its neighbours, each share encrypted."""
        memory = load_session(request, site, SHARES)
        names = name_list(request, "peers")
        letters, masks = (byte_rows(request, kind, len(names), PUBLIC) for kind in ("letters", "masks"))
        mine = [public_of(bytes.fromhex(memory[kind])) for kind in ("letters", "masks")]
        keys = [*letters, *masks, *mine]
        # A server could list one party under several names, and so collect enough shares to unmask this client.
        if site.id in names or len(set(keys)) < len(keys):
            raise Refused("secure.peers", "a neighbour is this site itself, or two have one key")
        if len(names) + 1 < self.secure.least:
            raise Refused("secure.peers", f"{len(names)} neighbours; a sum has at least {self.secure.least} clients")
        own = draw_secret()
        needed = self.secure.needed(len(names) + 1)
        parties = [site.id, *names]
        pairs = zip(
            *(split_secret(s, needed, len(parties)) for s in (own, bytes.fromhex(memory["masks"]))), strict=True
        )
        shares = dict(zip(parties, pairs, strict=True))
        sealed = []
        for name, public in zip(names, letters, strict=True):
            key = neighbour_key(memory["letters"], public)
            text = [memory["session"], site.id, name, *(s.hex() for s in shares[name])]
            sealed.append(seal(key, json.dumps(text).encode()))
        memory |= {"next": MASKED, "own": own.hex(), "needed": needed, "mine": shares[site.id][0].hex()}
        memory["peers"] = {n: [a.hex(), b.hex()] for n, a, b in zip(names, letters, masks, strict=True)}
        save_session(site, memory)
        width = max(map(len, sealed))
        rows = np.stack([byte_array(s.ljust(width, b"=")) for s in sealed])
        sizes = np.array([len(s) for s in sealed], np.int32)
        return Reply({}, {"sealed": rows, "sizes": sizes, "commit": byte_array(commit(memory["session"], own))}, {}, 1)

    def prepare(self, request: Request, site: Site) -> tuple[Memory, Request]:
        """Decrypt the remaining neighbours' shares; the inner request without the session's entries."""
        memory = load_session(request, site, MASKED)
        names = name_list(request, "from")
        do = setting_of(request, "do")
        if do not in SUMMED:
            raise Refused("secure", f"{do[:40]!r} is not summed")
        if not memory["peers"].keys() >= set(names):
            raise Refused("secure.peers", "an encrypted share comes from no neighbour")
        if len(names) + 1 < max(memory["needed"], self.secure.least):
            raise Refused("secure.survivors", f"only {len(names)} neighbours are left")
        received = {}
        letters = request.extras.get(PREFIX + "sealed")
        sizes = request.extras.get(PREFIX + "sizes")
        if letters is None or letters.dtype != np.uint8 or letters.ndim != 2 or len(letters) != len(names):
            raise Refused("secure.shares", "the encrypted shares of the neighbours are missing")
        if sizes is None or sizes.shape != (len(names),):
            raise Refused("secure.shares", "the encrypted shares of the neighbours are missing")
        for name, row, size in zip(names, letters, sizes.tolist(), strict=True):
            key = neighbour_key(memory["letters"], bytes.fromhex(memory["peers"][name][0]))
            try:
                session, sender, to, *pair = json.loads(unseal(key, row.tobytes()[:size]))
                sound = [len(bytes.fromhex(s)) for s in pair] == [SHARE, SHARE]
            except (ValueError, TypeError) as error:
                raise Refused("secure.shares", "an encrypted share was not written by its sender") from error
            # Names and session are inside the encrypted text, so the server cannot exchange two shares.
            if [session, sender, to] != [memory["session"], name, site.id] or not sound:
                raise Refused("secure.shares", "an encrypted share is of another session, or for another client")
            received[name] = pair
        memory |= {"received": received}
        plain = without_session(request.config)
        extras = {k: v for k, v in request.extras.items() if not k.startswith(PREFIX)}
        # The inner handler must not see the session's secrets.
        site.state.pop(STATE, None)
        return memory, Request(do, request.arrays, plain, extras)

    def mask(self, request: Request, plain: Request, reply: Reply, site: Site, memory: Memory) -> Reply:
        """The masked reply; the secrets behind the masks are deleted, except for others' shares."""
        trained = plain.do == "train"
        sent = expand_rows(plain.arrays)
        wrong = fault(sent, reply) if trained else fault_of_extras(reply)
        if wrong is not None:
            raise Refused(f"secure.{wrong.kind}", wrong.reason)
        arrays: Arrays = {}
        weight = 1
        if trained:
            arrays = to_dense(sent, reply.arrays)
            weight = min(int(reply.n), self.secure.most_samples)
        reply = Reply(arrays, {}, reply.metrics, reply.n)
        scale = FixedPoint(self.secure, int(setting_of(request, "clients")), tuple(name_list(request, "metrics")))
        peers = {n: bytes.fromhex(memory["peers"][n][1]) for n in memory["received"]}
        own, masks = (bytes.fromhex(memory[kind]) for kind in ("own", "masks"))
        part = scale.write(sent, reply, weight)
        update, wide = mask_part(memory["session"], part, site.id, own, masks, peers)
        kept = ("session", "needed", "mine", "received")
        save_session(site, {"next": UNMASK} | {k: memory[k] for k in kept})
        if self.secure.sizes != "public":
            # The weight is in the masked sum; outside of it, it would reveal the number of samples.
            weight = 1
        return Reply({"update": update, "wide": wide}, {}, {}, weight)

    def unmask(self, request: Request, site: Site) -> Reply:
        """A share per neighbour: of its own mask if its update is in the sum, of its keys if it dropped out."""
        memory = load_session(request, site, UNMASK)
        alive = name_list(request, "alive")
        lost = name_list(request, "lost")
        # A neighbour in both lists would have both its shares given away, which unmask its single update.
        if sorted([*alive, *lost]) != sorted(memory["received"]):
            raise Refused("secure.survivors", "each neighbour either is in the sum or got lost, and no one else")
        if len(alive) + 1 < max(memory["needed"], self.secure.least):
            raise Refused("secure.survivors", f"only {len(alive)} neighbours are in the sum")
        # Removed before the answer: a second request with the lists exchanged would get the other shares.
        site.state.pop(STATE, None)
        shares = [memory["mine"], *(memory["received"][n][0] for n in alive), *(memory["received"][n][1] for n in lost)]
        return Reply({}, {"shares": np.stack([byte_array(bytes.fromhex(s)) for s in shares])}, {}, 1)


def save_session(site: Site, memory: Memory) -> None:
    """Save the session for the next stage in the site's state."""
    site.state[STATE] = byte_array(json.dumps(memory).encode())


def load_session(request: Request, site: Site, stage: str) -> Memory:
    """The session saved for this stage; Refused if another stage or session is expected."""
    kept = site.state.get(STATE)
    memory: Memory = {} if kept is None else json.loads(kept.tobytes())
    if memory.get("session") != setting_of(request, "session") or memory["next"] != stage:
        raise Refused("secure.session", f"{stage} is not what comes next in a session of this site")
    return memory


def setting_of(request: Request, name: str) -> str:
    """An entry of a stage's configuration as text."""
    return str(request.config.get(PREFIX + name, ""))


def name_list(request: Request, name: str) -> list[str]:
    """A list of distinct names in a stage's configuration."""
    try:
        found = json.loads(setting_of(request, name))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(n, str) for n in found) or len(set(found)) < len(found):
        raise Refused("secure", f"{PREFIX + name} is not a list of different names")
    return found


def byte_rows(request: Request, name: str, count: int, width: int) -> list[bytes]:
    """Rows of bytes that came with a stage."""
    found = request.extras.get(PREFIX + name)
    if found is None or found.dtype != np.uint8 or found.shape != (count, width):
        raise Refused("secure.peers", f"{PREFIX + name} is not {count} rows of {width} bytes")
    return [row.tobytes() for row in found]


def neighbour_key(secret: str, public: bytes) -> bytes:
    """The key shared with a neighbour; Refused if its public key is invalid."""
    try:
        return shared_key(bytes.fromhex(secret), public)
    except ValueError as error:
        raise Refused("secure.peers", "a neighbour's public key is invalid") from error


def byte_array(text: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes as an array, as they are sent."""
    return np.frombuffer(text, np.uint8).copy()
