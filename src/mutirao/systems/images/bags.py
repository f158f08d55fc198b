"""Whole slides as samples: all tiles of a slide are one bag of features, and the slide's class is its label."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from mutirao.datasets.class_folders import ImageSet, Rows
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.images.features import Extractor
from mutirao.systems.images.image_sources import Sources
from mutirao.training.samples import Samples

log = logging.getLogger("mutirao")

Bag = tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]  # tiles, and which of them are there


@dataclass(frozen=True)
class Slides(ImageSet):
    """Slides as rows: `files` has the first tile of each, `tiles` all of them; a slide's content is all its tiles'."""

    tiles: tuple[ImageSet, ...] = ()

    def take(self, rows: Rows) -> "Slides":
        """Only these slides."""
        return replace(self, **vars(super().take(rows)) | {"tiles": tuple(self.tiles[i] for i in rows)})


def gather_slides(pictures: ImageSet) -> Slides:
    """The slides that these tiles are from; ConfigError if a tile's slide is unknown, or a slide has two classes."""
    if isinstance(pictures, Slides):
        return pictures
    unknown = np.flatnonzero(pictures.slides == "")
    if len(unknown):
        first = pictures.files[unknown[0]]
        raise ConfigError(
            f"{first} and {len(unknown) - 1:,} more have no known slide, and this head judges slides; right would be "
            f"CLASS/SLIDE/*.png, a pattern 'slide' for the files' names, or a table with file, label and group"
        )
    tiles, labels = [], []
    for name in sorted(set(pictures.slides.tolist())):
        rows = np.flatnonzero(pictures.slides == name)
        found = sorted({pictures.classes[label] for label in pictures.labels[rows]})
        if len(found) > 1:
            raise ConfigError(f"slide {name!r} lies in {found[0]!r} and in {found[1]!r}; a slide has one class")
        tiles.append(pictures.take(rows))
        labels.append(int(pictures.labels[rows[0]]))
    whole = [hashlib.sha256("".join(sorted(some.hashes)).encode()).hexdigest() for some in tiles]
    return Slides(
        tuple(some.files[0] for some in tiles),
        np.array(labels, np.int64),
        pictures.classes,
        tuple(whole),
        np.array([str(some.slides[0]) for some in tiles]),
        np.array([str(some.laboratories[0]) for some in tiles]),
        pictures.unreadable,
        tuple(tiles),
    )


def slides_of(found: Sources) -> Sources:
    """The same parties, whose rows are slides."""

    def gathered(read: Callable[[], ImageSet]) -> Callable[[], ImageSet]:
        return cache(lambda: gather_slides(read()))

    held = {name: gathered(read) for name, read in found.hospitals.items()}
    return replace(found, hospitals=held, test=gathered(found.test))


@dataclass(frozen=True)
class BagExtractor:
    """Turns slides into bags of their tiles' features; of a slide with more than `most` tiles so many, by lot."""

    extract: Extractor
    most: int
    seed: int

    def inputs(self, slides: ImageSet) -> Bag:
        """Bags x tiles x views x features, filled up to the largest bag, and which tiles are there."""
        assert isinstance(slides, Slides)
        kept = [self.choose(str(name), some) for name, some in zip(slides.slides, slides.tiles, strict=True)]
        cuts = np.cumsum([len(some) for some in kept])[:-1]
        found = self.extract([file for some in kept for file in some.files])
        return pad_bags(np.split(found.astype(np.float32, copy=False), cuts))

    def choose(self, name: str, tiles: ImageSet) -> ImageSet:
        """The tiles of a slide that are looked at."""
        if len(tiles) <= self.most:
            return tiles
        log.warning(
            "slide %s: %d of its %d tiles are used, by lot (see the setting tiles)", name, self.most, len(tiles)
        )
        drawn = rng(self.seed, 0, "tiles", name).choice(len(tiles), self.most, replace=False)
        return tiles.take(np.sort(drawn))


def pad_bags(bags: Sequence[npt.NDArray[np.float32]]) -> Bag:
    """Bags of unequal length as one array, zeros behind the shorter ones, and which tiles are there."""
    longest = max(len(bag) for bag in bags)
    tiles = np.zeros((len(bags), longest, *bags[0].shape[1:]), np.float32)
    there = np.zeros((len(bags), longest), bool)
    for i, bag in enumerate(bags):
        tiles[i, : len(bag)], there[i, : len(bag)] = bag, True
    return tiles, there


def join_bags(parts: Sequence[Samples]) -> Samples:
    """All bags of these samples, filled up to the longest of all."""
    longest = max(part.x[0].shape[1] for part in parts)
    tiles = [functional.pad(p.x[0], (0, 0, 0, 0, 0, longest - p.x[0].shape[1])) for p in parts]
    there = [functional.pad(p.x[1], (0, longest - p.x[1].shape[1])) for p in parts]
    return Samples((torch.cat(tiles), torch.cat(there)), torch.cat([p.y for p in parts]))
