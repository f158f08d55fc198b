"""Ratings with a planted structure: what an embedded default and tests need, and no real person ever gave."""

import numpy as np

from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.ratings import Ratings, gather

START = 1_000_000_000  # seconds: when the first rating is given
SPAN = 100_000_000


def plant(users: int, items: int, draw: np.random.Generator, rank: int = 4, noise: float = 0.6) -> Ratings:
    """Ratings 1 to 5 of users and items with biases and `rank` hidden traits each.

    r = 3.6 + b_u + b_i + t_u t_i + N(0, noise), rounded and cut. Popularity falls as a power of an item's rank, users
    rate 20 to 200 items, and rather those they will like, as people do.

    >>> ratings = plant(users=20, items=50, draw=np.random.default_rng(0))
    >>> len(ratings.users), sorted(set(ratings.values.tolist()))
    (20, [1.0, 2.0, 3.0, 4.0, 5.0])
    """
    user_bias, item_bias = draw.normal(0, 0.4, users), draw.normal(0, 0.5, items)
    user_trait, item_trait = draw.normal(0, 1, (users, rank)), draw.normal(0, 0.45, (items, rank))
    popularity = np.log1p(np.arange(items)) * -0.8  # log of the chance to be seen, before tastes
    draw.shuffle(popularity)
    counts = np.minimum(20 + draw.lognormal(3.2, 0.9, users).astype(int), min(200, items // 2))
    owner, row, value, time = [], [], [], []
    for u, count in enumerate(counts.tolist()):
        liking = user_bias[u] + item_bias + item_trait @ user_trait[u]
        chance = popularity + 0.5 * liking + draw.gumbel(size=items)
        mine = np.argpartition(-chance, count)[:count]
        owner.append(np.full(count, u))
        row.append(mine)
        value.append(np.clip(np.rint(3.6 + liking[mine] + draw.normal(0, noise, count)), 1, 5))
        time.append(START + np.sort(draw.integers(0, SPAN, count)))
    columns = [np.concatenate(part) for part in (owner, row, value, time)]
    ids, titles = (tuple(f"{before}{i}" for i in range(items)) for before in ("", "Item "))
    known = Catalogue(ids, titles, np.zeros(items, np.int32), np.zeros(items, np.int64))
    return gather(columns[0].astype(np.int64), columns[1].astype(np.int64), columns[2], columns[3], known)
