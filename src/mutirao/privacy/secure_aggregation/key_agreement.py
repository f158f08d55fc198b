"""Cryptographic primitives: Flower's key agreement, encryption and secret sharing, and masks from keys.

From Flower come key agreement (elliptic curves, HKDF), encryption (Fernet) and secret sharing (Shamir). Flower's
masks are not used: their generator has a seed of 32 bits, which can be found by trying all. Ours are the key stream
of AES-256 in counter mode.

A client has a mask of its own, and one with each neighbour that cancels against the neighbour's.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key

from mutirao.core.fleet import ClientId
from mutirao.privacy.secure_aggregation.fixed_point import Words

CURVE = ec.SECP256R1()
SECRET = 31  # bytes of a secret: two blocks with Shamir's padding, and as a number below the order of the curve
SHARE = 36  # bytes of a share of it: a number, and two blocks
PUBLIC = 33  # bytes of a public key: a point, compressed
Bytes = npt.NDArray[np.uint8]


def draw_secret() -> bytes:
    """A secret from the system's randomness; never 0, which would be no key."""
    return secrets.token_bytes(SECRET - 1) + bytes([secrets.randbelow(255) + 1])


def public_of(secret: bytes) -> bytes:
    """The public key of a secret."""
    return elliptic_curve_key(secret).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def elliptic_curve_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """A secret as a private key."""
    return ec.derive_private_key(int.from_bytes(secret, "little"), CURVE)


def shared_key(secret: bytes, public: bytes) -> bytes:
    """The key shared by two parties that know each other's public key; ValueError for an invalid key."""
    return generate_shared_key(elliptic_curve_key(secret), ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public))


def is_public(key: bytes) -> bool:
    """Whether it is a valid public key: a point on the curve."""
    try:
        return bool(ec.EllipticCurvePublicKey.from_encoded_point(CURVE, key))
    except ValueError:
        return False


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt and authenticate a message with a key."""
    return encrypt(key, text)


def unseal(key: bytes, letter: bytes) -> bytes:
    """Decrypt a message; ValueError if it was not encrypted with this key."""
    try:
        return decrypt(key, letter)
    except InvalidToken:
        raise ValueError("the message was not encrypted with this key") from None


def split_secret(secret: bytes, needed: int, among: int) -> list[bytes]:
    """Shares of a secret: any `needed` of them restore it, and fewer reveal nothing."""
    return create_shares(secret, needed, among)


def recover_secret(shares: Sequence[bytes]) -> bytes:
    """The secret; ValueError if the shares do not belong together."""
    return combine_shares(list(shares))


def commit(session: str, secret: bytes) -> bytes:
    """A commitment to a secret, which reveals nothing about it."""
    return hashlib.sha256(f"mutirao commit\x1f{session}\x1f".encode() + secret).digest()


def mask_of(session: str, key: bytes, size: int) -> Bytes:
    """`size` pseudorandom bytes that depend on key and session."""
    wide = hashlib.sha256(f"mutirao mask\x1f{session}\x1f".encode() + key).digest()
    # A nonce of 0 is safe: a key is of one session and one secret, so it makes a single stream.
    stream = Cipher(algorithms.AES256(wide), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(size)) + stream.finalize(), np.uint8)


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
