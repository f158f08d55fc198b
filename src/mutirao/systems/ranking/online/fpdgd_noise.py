"""FPDGD's noise: each client adds a share, and the sum of all shares is Laplace noise.

As published (Wang, Liu, Zhuang and Zuccon, 2021), a client clips the weights of its model to norm `sensitivity` after
every step and adds to each the difference of two samples of Gamma(1 / n, sensitivity / epsilon), n being the number of
clients in the round. The sum over the n clients then contains Laplace noise of scale sensitivity / epsilon.

This guarantees less than its epsilon suggests, so no privacy budget is accounted for or reported
(`docs/online-ranking.md` says why); `privacy=local` and `privacy=central` do give a guarantee. The shares come from the
system's randomness, as all noise here does; the authors' code takes them from Python's generator.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao import privacy
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId
from mutirao.privacy import Privacy
from mutirao.randomness import Draw, Secret, rng
from mutirao.selection import check_setting

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shares(Privacy):
    """Noise in shares; the authors' pairs of `epsilon` and `sensitivity` are (1.2, 3), (2.3, 3), (4.5, 5), (10, 5).

    Users apply it while they learn (`SearchHandler.shares`), so the handler is not wrapped.

    >>> model = {"w": np.array([6.0, 8.0])}
    >>> Shares(epsilon=4.5, sensitivity=5.0).clip(model)["w"]  # from norm 10 to norm 5
    array([3., 4.])
    """

    epsilon: float = 4.5
    sensitivity: float = 5.0
    repeatable: bool = False

    def __post_init__(self) -> None:
        check_setting("epsilon", 0 < self.epsilon < math.inf, self.epsilon, "above 0")
        check_setting("sensitivity", 0 < self.sensitivity < math.inf, self.sensitivity, "above 0")

    def clip(self, model: Arrays) -> Arrays:
        """The model, scaled to norm `sensitivity` if its norm is larger."""
        norm = math.sqrt(math.fsum(float(np.vdot(v, v)) for v in model.values()))
        scale = min(1.0, self.sensitivity / norm) if norm else 1.0
        return {name: scale * value for name, value in model.items()}

    def add(self, model: Arrays, parties: int, seed: int, round: int, client: ClientId) -> Arrays:
        """The model with this client's share of the noise, one of `parties`."""
        draw: Draw = rng(seed, round, "privacy", client) if self.repeatable else Secret()
        scale = self.sensitivity / self.epsilon
        return {name: model[name] + laplace_shares(draw, scale, parties, model[name].shape) for name in sorted(model)}


def laplace_shares(draw: Draw, scale: float, parties: int, shape: tuple[int, ...]) -> Floats:
    """A party's share of Laplace noise: G - G', both Gamma(1 / parties, scale); the sum of all shares is Laplace.

    Kotz, Kozubowski and Podgorski, 2001: The Laplace Distribution and Generalizations. Sampled by inversion, which
    needs uniform numbers only.
    """
    from scipy.special import gammaincinv

    u = draw.random((2, *shape))
    first, second = gammaincinv(1 / parties, u)
    return np.asarray(scale * (first - second), np.float64)


NAMES = {**privacy.NAMES, "shares": Shares}
