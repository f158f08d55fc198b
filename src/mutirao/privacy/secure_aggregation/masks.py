"""The masks of a client: one of its own, and one with each neighbour that cancels against the neighbour's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.fleet import ClientId
from mutirao.privacy.secure_aggregation.fixed_point import Words
from mutirao.privacy.secure_aggregation.key_agreement import mask_of, shared_key

SumPart = tuple[Words, Words]  # of an update, and of what goes with it


def own_mask(session: str, secret: bytes, like: SumPart) -> SumPart:
    """The mask that only this client adds."""
    return as_words(mask_of(session, secret, sum(words.nbytes for words in like)), like)


def shared_mask(session: str, secret: bytes, public: bytes, me: ClientId, peer: ClientId, like: SumPart) -> SumPart:
    """The mask between two clients as one of them adds it; the other adds its negative."""
    update, wide = own_mask(session, shared_key(secret, public), like)
    if me < peer:
        return (update, wide)
    return (negate(update), negate(wide))


def as_words(stream: npt.NDArray[np.uint8], like: SumPart) -> SumPart:
    """A stream of bytes as words, the same numbers on every platform."""
    update, wide = like
    words = stream[: update.nbytes]
    doubles = stream[update.nbytes :]
    return (
        words.view(update.dtype.newbyteorder("<")).astype(update.dtype),
        doubles.view(wide.dtype.newbyteorder("<")).astype(wide.dtype),
    )


def negate(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """-words, modulo their size."""
    return np.asarray(np.negative(words))


def add_parts(one: SumPart, other: SumPart) -> SumPart:
    """The sum of two parts, modulo the size of their words."""
    return one[0] + other[0], one[1] + other[1]


def mask_part(
    session: str, part: SumPart, me: ClientId, own: bytes, pairwise: bytes, peers: Mapping[ClientId, bytes]
) -> SumPart:
    """A part under all its masks; `peers` are the neighbours' public keys."""
    part = add_parts(part, own_mask(session, own, part))
    for peer, public in sorted(peers.items()):
        part = add_parts(part, shared_mask(session, pairwise, public, me, peer, part))
    return part
