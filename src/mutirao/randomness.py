"""All randomness comes from (seed, round, purpose, client): never from a global state or from call order."""

import hashlib

import numpy as np


def number(seed: int, round: int, purpose: str, client: str = "") -> int:
    """A 63-bit number drawn from the four; it seeds whatever needs seeding."""
    text = f"{seed}\x1f{round}\x1f{purpose}\x1f{client}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def rng(seed: int, round: int, purpose: str, client: str = "") -> np.random.Generator:
    """A generator of its own for one purpose of one client in one round.

    >>> rng(0, 1, "batches", "ana").random() == rng(0, 1, "batches", "ana").random()
    True
    """
    return np.random.Generator(np.random.PCG64(number(seed, round, purpose, client)))
