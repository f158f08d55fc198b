"""Item vectors with their catalogue: save, load, and transfer to another catalogue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.errors import ConfigError, Damaged
from mutirao.io import load_arrays, save_arrays
from mutirao.systems.recsys.catalogues import Catalogue

KIND = "embeddings"
SPREAD = 0.1  # standard deviation of untrained vectors


@dataclass(frozen=True)
class Embeddings:
    """A vector for each item of a catalogue, and a card that records how they were trained.

    >>> films = Catalogue(("1", "2"), ("Alien", "Brazil"), np.array([1979, 1985], np.int32), np.array([120, 40]))
    >>> Embeddings(films, np.zeros((2, 8), np.float32), {"dimension": 8}).vectors.shape
    (2, 8)
    """

    catalogue: Catalogue
    vectors: npt.NDArray[np.float32]  # items x dimension
    card: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.catalogue):
            raise ValueError(f"{len(self.catalogue)} items cannot have vectors of shape {self.vectors.shape}")


def save_embeddings(embeddings: Embeddings, path: Path) -> None:
    """Write vectors, catalogue and card as one safetensors file, atomically.

    >>> films = Catalogue(("1", "2"), ("Alien", "Brazil"), np.array([1979, 1985], np.int32), np.array([120, 40]))
    >>> save_embeddings(Embeddings(films, np.ones((2, 8), np.float32)), Path("films.safetensors"))
    >>> load_embeddings(Path("films.safetensors")).catalogue.titles
    ('Alien', 'Brazil')
    """
    catalogue = embeddings.catalogue
    arrays: Arrays = {
        "vectors": np.asarray(embeddings.vectors, np.float32),
        "years": catalogue.years,
        "counts": catalogue.counts,
    }
    facts = {"kind": KIND, "ids": catalogue.ids, "titles": catalogue.titles, "card": embeddings.card}
    save_arrays(path, arrays, facts)


def load_embeddings(path: Path) -> Embeddings:
    """Load a file written by `save_embeddings`.

    >>> _ = Path("broken.safetensors").write_bytes(b"no such thing")
    >>> load_embeddings(Path("broken.safetensors"))
    Traceback (most recent call last):
        ...
    mutirao.errors.Damaged: broken.safetensors is corrupt or truncated ...
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected a file of item vectors")
    arrays, facts = load_arrays(path)
    if facts.get("kind") != KIND or not {"vectors", "years", "counts"} <= arrays.keys():
        raise Damaged(f"{path} holds no item embeddings")
    ids, titles = (tuple(map(str, facts.get(key, ()))) for key in ("ids", "titles"))
    try:
        catalogue = Catalogue(ids, titles, arrays["years"].astype(np.int32), arrays["counts"].astype(np.int64))
        found = Embeddings(catalogue, arrays["vectors"].astype(np.float32), dict(facts.get("card", {})))
    except (ValueError, ConfigError) as error:
        raise Damaged(f"{path} does not fit together: {error}") from error
    if not np.isfinite(found.vectors).all():
        raise Damaged(f"{path} holds NaN or infinity")
    return found


def transfer(
    target: Catalogue,
    source: Embeddings,
    pairs: Sequence[tuple[str, str]],
    *,
    dimension: int,
    rng: np.random.Generator,
    share: float = 1.0,
    by: Literal["popularity", "random"] = "popularity",
) -> npt.NDArray[np.float32]:
    """The initial item matrix of `target`: matched items get the vector of their pair, others N(0, 0.1).

    `pairs` are (id in target, id in source). Only a `share` of them is transferred: a random sample, or the most
    popular ones, by ratings in the source (in the target if the source has no counts).

    >>> ours = Catalogue(("a", "b"), ("Alien", "Cube"), np.zeros(2, np.int32), np.array([5, 5]))
    >>> theirs = Catalogue(("1", "2"), ("Alien", "Brazil"), np.zeros(2, np.int32), np.array([120, 40]))
    >>> source = Embeddings(theirs, np.ones((2, 3), np.float32))
    >>> transfer(ours, source, [("a", "1")], dimension=3, rng=np.random.default_rng(0)).round(1)
    array([[ 1. ,  1. ,  1. ],
           [ 0. , -0.1,  0. ]], dtype=float32)
    """
    if source.vectors.shape[1] != dimension:
        raise ConfigError(f"the vectors to transfer have dimension {source.vectors.shape[1]}, the model {dimension}")
    if not 0 <= share <= 1:
        raise ConfigError(f"share is {share!r}, but must be from 0 to 1")
    # Sampled for all items, also matched ones: the vectors of the others then do not depend on the pairs.
    items = rng.normal(0.0, SPREAD, (len(target), dimension)).astype(np.float32)
    target_rows = target.rows()
    source_rows = source.catalogue.rows()
    for a, b in pairs:
        if a not in target_rows:
            raise ConfigError(f"a pair names item {a!r}, which the target catalogue does not have")
        if b not in source_rows:
            raise ConfigError(f"a pair names item {b!r}, which the source catalogue does not have")
    to = np.array([target_rows[a] for a, _ in pairs], np.intp)
    of = np.array([source_rows[b] for _, b in pairs], np.intp)
    if by == "random":
        order = rng.permutation(len(pairs))
    elif source.catalogue.counts.any():
        order = np.argsort(-source.catalogue.counts[of], kind="stable")
    else:
        order = np.argsort(-target.counts[to], kind="stable")
    chosen = order[: round(share * len(pairs))]
    if has_biases(source.card):
        # The best guess for the bias of an unmatched item is the average.
        items[:, 0] = 0.0
        if len(chosen):
            items[:, 0] = source.vectors[of[chosen], 0].mean()
    items[to[chosen]] = source.vectors[of[chosen]]
    return items


def has_biases(card: Mapping[str, Any]) -> bool:
    """Whether column 0 of the vectors holds the items' biases. Transferred vectors are as those of their source."""
    source = card.get("source")
    if "biases" in card:
        return bool(card["biases"])
    return isinstance(source, Mapping) and has_biases(source)
