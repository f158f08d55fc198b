"""PACFL (Vahidian et al., "Efficient Distribution Similarity Identification in Clustered Federated Learning via
Principal Angles between Client Data Subspaces", AAAI 2023): groups clients whose samples lie in similar directions.
"""

# ruff: noqa: D102  # `__call__` is documented by the class

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mutirao.clustering.auto import Points
from mutirao.clustering.hierarchical import HierarchicalGrouper
from mutirao.clustering.signatures import Vector

ANGLES = ("smallest", "sum")


class Rows(Protocol):
    """The required interface of a client's samples."""

    def __len__(self) -> int: ...

    def batch(self, rows: Any, /) -> tuple[Any, Any]:
        """Inputs and labels of some rows."""


@dataclass(frozen=True)
class Subspace:
    """The first left singular vectors of a client's data matrix, one column a sample. They resemble its samples."""

    vectors: int = 3
    epsilon = 0.0
    directions = False
    trains = False
    repeatable = False

    def __call__(self, samples: Rows) -> Vector:
        from torch import Tensor

        x, _ = samples.batch(np.arange(len(samples)))
        if not isinstance(x, Tensor):
            raise ValueError("has samples with several inputs, which have no single data matrix")
        return leading(x.reshape(len(samples), -1).numpy().astype(np.float64), self.vectors).ravel()


@dataclass(frozen=True)
class Pacfl(HierarchicalGrouper):
    """Merges clients by the angles between their subspaces, in degrees.

    With U_i the singular vectors of client i, `smallest` is the first principal angle, arccos of the largest singular
    value of U_i' U_j, and `sum` is tr arccos(U_i' U_j): vector by vector, in their order.

    >>> client = Pacfl(vectors=1).signature
    >>> type(client).__name__  # what each client sends: directions in which its samples lie
    'Subspace'
    """

    threshold: float = 5.0
    vectors: int = 3
    angle: str = "smallest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vectors < 1:
            raise ValueError(f"vectors is {self.vectors!r}, but must be at least 1")
        if self.angle not in ANGLES:
            raise ValueError(f"angle is {self.angle!r}, but must be one of {', '.join(ANGLES)}")

    @property
    def signature(self) -> Any:
        """The signature that clients send."""
        return Subspace(self.vectors)

    def measure(self, points: Points) -> Points:
        return angles(points.reshape(len(points), self.vectors, -1), self.angle)


def leading(x: Points, vectors: int) -> Points:
    """The first left singular vectors of x', a row each, with a positive largest number."""
    if min(x.shape) < vectors:
        raise ValueError(f"has {len(x)} samples of {x.shape[1]} numbers, too few for {vectors} singular vectors")
    rows = np.linalg.svd(x, full_matrices=False)[2][:vectors]
    # The sign of a singular vector is arbitrary and differs between libraries.
    largest = np.argmax(np.abs(rows), axis=1)
    return np.asarray(rows * np.sign(rows[np.arange(vectors), largest])[:, None])


def angles(bases: Points, angle: str = "smallest") -> Points:
    """The angle between each two bases (clients x vectors x numbers), in degrees; none between one and itself."""
    products = np.einsum("ipd,jqd->ijpq", bases, bases)
    if angle == "smallest":
        # The spectral norm of U_i' U_j is its largest singular value: the cosine of the first principal angle.
        cosines = np.linalg.norm(products, 2, axis=(2, 3))[..., None]
    else:
        cosines = np.abs(np.einsum("ijpp->ijp", products))
    found = np.degrees(np.arccos(np.clip(cosines, 0.0, 1.0)).sum(-1))
    np.fill_diagonal(found, 0.0)
    return np.asarray((found + found.T) / 2)
