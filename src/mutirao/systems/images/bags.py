"""Whole slides as samples: all tiles of a slide are one bag of features, and the slide's class is its label."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

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

Bag = tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]  # tiles, and a mask that is false for padding


@dataclass(frozen=True)
class Slides(ImageSet):
    """An image set with slides as rows: `files` has the first tile of each, `tiles` all of them."""

    tiles: tuple[ImageSet, ...] = ()

    def take(self, rows: Rows) -> "Slides":
        """Only these slides."""
        return replace(self, **vars(super().take(rows)) | {"tiles": tuple(self.tiles[i] for i in rows)})


def gather_slides(pictures: ImageSet) -> Slides:
    """Group tiles into slides; ConfigError if a tile's slide is unknown, or a slide has two classes."""
    if isinstance(pictures, Slides):
        return pictures
    unknown = np.flatnonzero(pictures.slides == "")
    if len(unknown):
        first = pictures.files[unknown[0]]
        raise ConfigError(
            f"{first} and {len(unknown) - 1:,} more have no known slide, and this head classifies slides; expected "
            f"CLASS/SLIDE/*.png, a pattern 'slide' for the files' names, or a table with file, label and group"
        )
    tiles = []
    labels = []
    for name in sorted(set(pictures.slides.tolist())):
        rows = np.flatnonzero(pictures.slides == name)
        found = sorted({pictures.classes[label] for label in pictures.labels[rows]})
        if len(found) > 1:
            raise ConfigError(f"slide {name!r} lies in {found[0]!r} and in {found[1]!r}; a slide has one class")
        tiles.append(pictures.take(rows))
        labels.append(int(pictures.labels[rows[0]]))
    # Sorted: two slides with the same tiles are the same slide, whatever the names of their files.
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


def as_slides(found: Sources) -> Sources:
    """The same sources, with slides as rows instead of tiles."""

    def gathered(read: Callable[[], ImageSet]) -> Callable[[], ImageSet]:
        return cache(lambda: gather_slides(read()))

    hospitals = {name: gathered(read) for name, read in found.hospitals.items()}
    return replace(found, hospitals=hospitals, test=gathered(found.test))


@dataclass(frozen=True)
class BagExtractor:
    """Reads slides as bags of their tiles' features; at most `max_tiles` of a slide, sampled at random."""

    extract: Extractor
    max_tiles: int
    seed: int

    def inputs(self, slides: ImageSet) -> Bag:
        """An array of bags x tiles x views x features, padded to the largest bag, and its mask."""
        assert isinstance(slides, Slides)
        files: list[Path] = []
        ends = []
        for name, tiles in zip(slides.slides, slides.tiles, strict=True):
            files += self.sample_tiles(str(name), tiles).files
            ends.append(len(files))
        features = self.extract(files)
        return pad_bags(np.split(features.astype(np.float32, copy=False), ends[:-1]))

    def sample_tiles(self, name: str, tiles: ImageSet) -> ImageSet:
        """The tiles of a slide that are used."""
        if len(tiles) <= self.max_tiles:
            return tiles
        log.warning(
            "slide %s: %d of its %d tiles are used, chosen at random (see the setting tiles)",
            name,
            self.max_tiles,
            len(tiles),
        )
        sampled = rng(self.seed, 0, "tiles", name).choice(len(tiles), self.max_tiles, replace=False)
        return tiles.take(np.sort(sampled))


def pad_bags(bags: Sequence[npt.NDArray[np.float32]]) -> Bag:
    """Bags of unequal length as one array, padded with zeros, and its mask."""
    longest = max(len(bag) for bag in bags)
    tiles = np.zeros((len(bags), longest, *bags[0].shape[1:]), np.float32)
    there = np.zeros((len(bags), longest), bool)
    for i, bag in enumerate(bags):
        tiles[i, : len(bag)] = bag
        there[i, : len(bag)] = True
    return tiles, there


def concatenate_bags(parts: Sequence[Samples]) -> Samples:
    """Concatenate samples of bags, padded to the longest bag."""
    longest = max(part.x[0].shape[1] for part in parts)
    tiles = [functional.pad(p.x[0], (0, 0, 0, 0, 0, longest - p.x[0].shape[1])) for p in parts]
    there = [functional.pad(p.x[1], (0, longest - p.x[1].shape[1])) for p in parts]
    return Samples((torch.cat(tiles), torch.cat(there)), torch.cat([p.y for p in parts]))
