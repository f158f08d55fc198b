"""All randomness comes from (seed, round, purpose, client): never from a global state or from call order.

Except for what must stay secret, the noise and the sampling of differential privacy: that is `Secret`.
"""

import hashlib
import math
import os

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Shape = int | tuple[int, ...]


def derive_seed(seed: int, round: int, purpose: str, client: str = "") -> int:
    """A 63-bit seed derived from the four.

    >>> mine = derive_seed(0, 1, "batches", "ana")
    >>> mine == derive_seed(0, 1, "batches", "ana"), mine == derive_seed(0, 1, "batches", "bia")
    (True, False)
    """
    # The separator keeps (1, 11) and (11, 1) apart. 63 bits fit into a signed integer, as torch and TOML have it.
    text = f"{seed}\x1f{round}\x1f{purpose}\x1f{client}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def rng(seed: int, round: int, purpose: str, client: str = "") -> np.random.Generator:
    """A separate generator for one purpose of one client in one round.

    >>> rng(0, 1, "batches", "ana").random() == rng(0, 1, "batches", "ana").random()
    True
    >>> rng(0, 1, "batches", "ana").random() == rng(0, 2, "batches", "ana").random()  # another round
    False
    """
    return np.random.Generator(np.random.PCG64(derive_seed(seed, round, purpose, client)))


class Secret:
    """Random numbers of the operating system's own generator, a cipher with a secret key of 256 bits.

    The part of `numpy.random.Generator` that privacy needs. NumPy's and torch's generators are no ciphers: where an
    update is known to be 0, a reader of the noised model sees their output, and could work out the rest.

    >>> bool(Secret().random(1)[0] == Secret().random(1)[0])  # no seed repeats it
    False
    """

    def random(self, size: Shape) -> Floats:
        """Uniform in [0, 1), in steps of 2^-53."""
        count = math.prod(size) if isinstance(size, tuple) else size
        # A double has 53 bits, so the lowest 11 of 64 are dropped.
        bits = np.frombuffer(os.urandom(8 * count), np.uint64)
        return np.ldexp((bits >> np.uint64(11)).astype(np.float64), -53).reshape(size)

    def normal(self, loc: float, scale: float, size: Shape) -> Floats:
        """Gaussian: sqrt(-2 ln u) cos 2 pi v, and the same with sin, of uniform u and v (Box and Muller, 1958)."""
        count = math.prod(size) if isinstance(size, tuple) else size
        u, v = self.random((2, (count + 1) // 2))
        # u can be 0, but never 1: the logarithm of 1 - u is finite.
        length = np.sqrt(-2 * np.log(1 - u))
        angle = 2 * math.pi * v
        both = np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count]
        return (loc + scale * both).reshape(size)


Draw = np.random.Generator | Secret
