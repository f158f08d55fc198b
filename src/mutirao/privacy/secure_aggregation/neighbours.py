"""Who is whose neighbour: a ring in random order, each next to the `count` nearest on it (Bell et al., 2020)."""

import secrets
from collections.abc import Sequence

from mutirao.core.fleet import ClientId


def draw_neighbours(clients: Sequence[ClientId], count: int) -> dict[ClientId, list[ClientId]]:
    """An even number of neighbours for each, at least `count`; everybody is everybody's if there are no more.

    The order is the system's secret until it is told; no result depends on it.
    """
    ring = list(clients)
    secrets.SystemRandom().shuffle(ring)
    half = min((count + 1) // 2, len(ring) // 2)
    around = [d for d in range(-half, half + 1) if d]
    return {c: sorted({ring[(i + d) % len(ring)] for d in around} - {c}) for i, c in enumerate(ring)}
