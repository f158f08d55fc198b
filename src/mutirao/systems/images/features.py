"""Features of a frozen backbone are computed once for each picture and kept by the picture's own hash.

A picture is kept in k views: as it is, then flipped and turned, so that training on features still sees augmented
pictures. What a view looks like is drawn from the picture's hash: two runs, or two sites, get the same numbers.
"""

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from mutirao.core.digests import fingerprint
from mutirao.datasets.class_folders import ImageSet
from mutirao.datasets.image_files import UnreadableError, cache_home, picture
from mutirao.io import write_whole
from mutirao.randomness import rng
from mutirao.systems.images.backbones import SIZE, Backbone, load_backbone, weights_fingerprint
from mutirao.systems.images.choices import NETWORK_NAMES, Depth
from mutirao.systems.images.stain import NORMALIZERS, jitter
from mutirao.training.cpu_cores import core_count
from mutirao.training.optimizers import one_thread

Pixels = npt.NDArray[np.uint8]


def views_of(image: Image.Image, name: str, count: int, size: int = SIZE) -> Pixels:
    """The picture at `size` x `size`, then `count` - 1 times flipped or not and turned by up to 10 degrees."""
    plain = image.resize((size, size), Image.Resampling.BILINEAR)
    draw = rng(0, 0, "views", name)
    views = [plain, *(turn(plain, draw) for _ in range(count - 1))]
    return np.stack([np.asarray(v) for v in views]).transpose(0, 3, 1, 2)


def normalised(image: Image.Image, stain: str, size: int = SIZE) -> Image.Image:
    """The picture at `size` x `size`, as the backbone is given it, with its stain normalised."""
    small = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
    return Image.fromarray(NORMALIZERS[stain](small))


def turn(plain: Image.Image, draw: np.random.Generator) -> Image.Image:
    """A picture flipped or not, and turned by up to 10 degrees."""
    edge = np.asarray(plain)[[0, -1]].reshape(-1, 3).mean(0)
    flipped = plain.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else plain
    fill = tuple(int(v) for v in edge)  # not black: a corner must not look like a nucleus
    return flipped.rotate(draw.uniform(-10, 10), Image.Resampling.BILINEAR, fillcolor=fill)


def draw_views(x: Tensor, draw: np.random.Generator) -> Tensor:
    """A batch of pictures (bytes, samples x 1 x 3 x side x side), each flipped and turned anew whenever it is used."""
    pixels = x[:, 0].permute(0, 2, 3, 1).cpu().numpy()
    turned = np.stack([np.asarray(turn(Image.fromarray(np.ascontiguousarray(one)), draw)) for one in pixels])
    return torch.from_numpy(turned).permute(0, 3, 1, 2)[:, None].to(x.device)


def cache_folder() -> Path:
    """Where features are kept."""
    return cache_home() / "features"


@dataclass(frozen=True)
class Extractor:
    """Turns pictures into what the trained part of a model takes: k views each, from the cache where they are there.

    `depth` says how far the frozen part goes: `features` through the whole backbone, `maps` up to its last block,
    `pixels` not at all (nothing is cached then).
    """

    body: str = "efficientnet_lite0"
    weights: str = ""
    views: int = 4
    depth: Depth = "features"
    cached: bool = True
    size: int = SIZE  # pixels a side, for a network from scratch; a backbone knows its own
    stain: str = "none"  # how stains are normalised
    augment: str = "none"  # "stain": all views but the first are as another laboratory's

    @cached_property
    def network(self) -> Backbone:
        """The backbone, made when it is first needed."""
        return load_backbone(self.body, self.weights)

    def preprocessing(self) -> str:
        """Digest of what is done with an image before anything is trained, the backbone's normalization included."""
        stain = {name: how for name, how in (("stain", self.stain), ("augment", self.augment)) if how != "none"}
        return fingerprint({"size": self.side, "views": self.views, "depth": self.depth, **stain})

    @property
    def side(self) -> int:
        """Pixels a side that pictures are brought to."""
        return self.size if self.body in NETWORK_NAMES else self.network.size

    @cached_property
    def folder(self) -> Path:
        """Where the features of this backbone and these views lie."""
        name = re.sub(r"[^\w.-]+", "_", self.body)[-60:]  # of a file, a path
        prepared = "".join(f"-{how}" for how in (self.stain, self.augment) if how != "none")
        return cache_folder() / f"{name}-{weights_fingerprint(self.network)}-{self.depth}-{self.views}{prepared}"

    def inputs(self, pictures: ImageSet) -> Any:
        """What a model takes of these pictures, a row each."""
        return self(pictures.files)

    def __call__(
        self, files: Sequence[Path], progress: Callable[[int, int], None] | None = None
    ) -> npt.NDArray[np.float32] | Pixels:
        """One row a file, in their order: an array files x views x what the depth gives."""
        if not files:
            raise ValueError("there are no pictures to look at")
        _ = self.side if self.depth == "pixels" else self.folder  # made here, once, not in every thread
        rows = []
        with one_thread(), ThreadPoolExecutor(core_count(), "mutirao-features") as pool:
            for i, row in enumerate(pool.map(self.of_file, files), 1):
                rows.append(row)
                if progress is not None:
                    progress(i, len(files))
        return np.stack(rows)

    def of_file(self, file: Path) -> npt.NDArray[Any]:
        """The views of one file; an unreadable one is named."""
        try:
            return self.of_content(file.read_bytes())
        except UnreadableError as error:
            raise UnreadableError(f"{file}: {error}") from error
        except OSError as error:
            raise UnreadableError(f"{file}: {error.strerror or error}") from error

    def of_content(self, content: bytes) -> npt.NDArray[Any]:
        """The views of one picture; alone in its batch, so that its company cannot change a bit of them."""
        name = hashlib.sha256(content).hexdigest()
        if self.depth == "pixels":
            return self.look(content, name)
        kept = self.folder / name[:2] / f"{name}.npy"
        if self.cached and (found := self._load(kept)) is not None:
            return found
        made = self.of_pixels(self.look(content, name))
        if self.cached:
            stream = io.BytesIO()
            np.save(stream, made)
            with contextlib.suppress(OSError):  # a cache that cannot be written is only slow
                write_whole(kept, stream.getvalue(), durable=False)
        return made

    def look(self, content: bytes, name: str) -> Pixels:
        """The picture's views, its stain normalised first and augmented last, if that is asked for."""
        plain = picture(content)
        if self.stain != "none":
            plain = normalised(plain, self.stain, self.side)
        views = views_of(plain, name, self.views, self.side)
        if self.augment == "stain":
            for k in range(1, len(views)):
                views[k] = jitter(views[k].transpose(1, 2, 0), f"{name} {k}").transpose(2, 0, 1)
        return views

    def of_pixels(self, pixels: Pixels) -> npt.NDArray[np.float32]:
        """Run the frozen part on a batch of views."""
        part = self.network.trunk if self.depth == "maps" else self.network
        with torch.inference_mode():
            batch = torch.from_numpy(np.ascontiguousarray(pixels)).contiguous(memory_format=torch.channels_last)
            out: npt.NDArray[np.float32] = part(batch).contiguous().numpy()
        return out

    def _load(self, kept: Path) -> npt.NDArray[np.float32] | None:
        try:
            found: npt.NDArray[np.float32] = np.load(kept, allow_pickle=False)
        except (OSError, ValueError, EOFError, SystemError):
            return None  # not there, or damaged, or Python 3.11 has parsed two headers at once: it is made anew
        sound = found.dtype == np.float32 and found.ndim >= 2 and len(found) == self.views and np.isfinite(found).all()
        return found if sound else None
