"""FPDGD's noise: each client adds a share of it, and only the sum of all shares is Laplace noise.

As published (Wang, Liu, Zhuang and Zuccon, 2021), a client cuts the weights of its model to length `sensitivity` after
every step and adds to each the difference of two numbers drawn from Gamma(1 / n, sensitivity / epsilon), n being the
clients of the round. The sum over the n clients then carries Laplace noise of scale sensitivity / epsilon.

What that promises is less than its epsilon says, so no account is kept of it and none is told (`docs/online-ranking.md`
says why); for a promise that is kept there are `privacy=local` and `privacy=central`. The shares come from the system's
randomness, as all noise here does; the authors' code draws them from Python's generator.
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
    """Noise by shares; the authors' pairs of `epsilon` and `sensitivity` are (1.2, 3), (2.3, 3), (4.5, 5), (10, 5).

    Users do it while they learn (`Searching.shares`), so nothing is wrapped around them.

    >>> model = {"w": np.array([6.0, 8.0])}
    >>> Shares(epsilon=4.5, sensitivity=5.0).cut(model)["w"]  # from length 10 to length 5
    array([3., 4.])
    """

    epsilon: float = 4.5
    sensitivity: float = 5.0
    repeatable: bool = False

    def __post_init__(self) -> None:
        check_setting("epsilon", 0 < self.epsilon < math.inf, self.epsilon, "above 0")
        check_setting("sensitivity", 0 < self.sensitivity < math.inf, self.sensitivity, "above 0")

    def cut(self, model: Arrays) -> Arrays:
        """The model, shortened to length `sensitivity` if it is longer."""
        length = math.sqrt(math.fsum(float(np.vdot(v, v)) for v in model.values()))
        scale = min(1.0, self.sensitivity / length) if length else 1.0
        return {name: scale * value for name, value in model.items()}

    def add(self, model: Arrays, parties: int, seed: int, round: int, client: ClientId) -> Arrays:
        """The model with this client's share of the noise, one of `parties`."""
        draw: Draw = rng(seed, round, "privacy", client) if self.repeatable else Secret()
        scale = self.sensitivity / self.epsilon
        return {name: model[name] + draw_shares(draw, scale, parties, model[name].shape) for name in sorted(model)}


def draw_shares(draw: Draw, scale: float, parties: int, shape: tuple[int, ...]) -> Floats:
    """Numbers of which so many parties' sum is Laplace noise: G - G', both Gamma(1 / parties, scale).

    Kotz, Kozubowski and Podgorski, 2001: The Laplace Distribution and Generalizations. Drawn by the inverse of the
    distribution function, which takes nothing but uniform numbers.
    """
    from scipy.special import gammaincinv

    u = draw.random((2, *shape))
    first, second = gammaincinv(1 / parties, u)
    return np.asarray(scale * (first - second), np.float64)


NAMES = {**privacy.NAMES, "shares": Shares}
