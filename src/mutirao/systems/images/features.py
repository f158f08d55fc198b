"""Feature extraction: the features of a frozen backbone, computed once for each image and cached by its hash.

Each image has k views: unchanged, then flipped and rotated, so that training on features still sees augmentation. The
image's hash seeds its views, so two runs, or two sites, compute the same numbers.
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

from mutirao.core.arrays import fingerprint
from mutirao.core.cpu_threads import core_count
from mutirao.datasets.class_folders import ImageSet, UnreadableError, cache_home, picture
from mutirao.io import write_whole
from mutirao.randomness import rng
from mutirao.systems.images.backbones import SIZE, Backbone, load_backbone, weights_fingerprint
from mutirao.systems.images.choices import NETWORK_NAMES, Depth
from mutirao.systems.images.stain import NORMALIZERS, Pixels, jitter
from mutirao.training.optimizers import one_thread


def views_of(image: Image.Image, name: str, count: int, size: int = SIZE) -> Pixels:
    """The image at `size` x `size`, then `count` - 1 random flips and rotations of it, seeded by its name."""
    plain = image.resize((size, size), Image.Resampling.BILINEAR)
    draw = rng(0, 0, "views", name)
    views = [plain, *(flip_and_rotate(plain, draw) for _ in range(count - 1))]
    return np.stack([np.asarray(v) for v in views]).transpose(0, 3, 1, 2)


def normalize_stain(image: Image.Image, stain: str, size: int = SIZE) -> Image.Image:
    """The image at `size` x `size`, the backbone's input size, with its stain normalized."""
    small = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
    return Image.fromarray(NORMALIZERS[stain](small))


def flip_and_rotate(plain: Image.Image, draw: np.random.Generator) -> Image.Image:
    """The image, flipped with probability one half and rotated by up to 10 degrees."""
    edge = np.asarray(plain)[[0, -1]].reshape(-1, 3).mean(0)
    flipped = plain
    if draw.random() < 0.5:
        flipped = plain.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # Corners are filled by the edge's colour: black ones would look like nuclei.
    fill = tuple(int(v) for v in edge)
    return flipped.rotate(draw.uniform(-10, 10), Image.Resampling.BILINEAR, fillcolor=fill)


def random_views(x: Tensor, draw: np.random.Generator) -> Tensor:
    """Augment a batch of images (bytes, samples x 1 x 3 x side x side) anew each time it is used."""
    pixels = x[:, 0].permute(0, 2, 3, 1).cpu().numpy()
    changed = [flip_and_rotate(Image.fromarray(np.ascontiguousarray(image)), draw) for image in pixels]
    return (
        torch.from_numpy(np.stack([np.asarray(image) for image in changed])).permute(0, 3, 1, 2)[:, None].to(x.device)
    )


def cache_folder() -> Path:
    """The folder of cached features."""
    return cache_home() / "features"


@dataclass(frozen=True)
class Extractor:
    """Computes the inputs of a model's trained part: k views of each image, from the cache if they are there.

    `depth` is how far the frozen part goes: `features` is the whole backbone, `maps` all but its last block, `pixels`
    nothing (then nothing is cached).
    """

    backbone: str = "efficientnet_lite0"
    weights: str = ""
    views: int = 4
    depth: Depth = "features"
    cached: bool = True
    size: int = SIZE  # pixels a side, for a network from scratch; a backbone has its own
    stain: str = "none"  # stain normalization
    augment: str = "none"  # "stain": all views but the first look like another laboratory's

    @cached_property
    def network(self) -> Backbone:
        """The backbone, loaded when it is first needed."""
        return load_backbone(self.backbone, self.weights)

    def preprocessing(self) -> str:
        """Digest of what is done with an image before anything is trained, the backbone's normalization included."""
        stain = {name: how for name, how in (("stain", self.stain), ("augment", self.augment)) if how != "none"}
        return fingerprint({"size": self.side, "views": self.views, "depth": self.depth, **stain})

    @property
    def side(self) -> int:
        """Pixels a side to which images are resized."""
        if self.backbone in NETWORK_NAMES:
            return self.size
        return self.network.size

    @cached_property
    def folder(self) -> Path:
        """The cache folder for this backbone and these views."""
        name = re.sub(r"[^\w.-]+", "_", self.backbone)[-60:]  # the name of an exported backbone is a path
        prepared = "".join(f"-{how}" for how in (self.stain, self.augment) if how != "none")
        return cache_folder() / f"{name}-{weights_fingerprint(self.network)}-{self.depth}-{self.views}{prepared}"

    def inputs(self, images: ImageSet) -> Any:
        """The model's input, one row for each image."""
        return self(images.files)

    def __call__(
        self, files: Sequence[Path], progress: Callable[[int, int], None] | None = None
    ) -> npt.NDArray[np.float32] | Pixels:
        """An array of files x views x what `depth` gives, in the order of the files."""
        if not files:
            raise ValueError("there are no pictures to look at")
        # These properties load the backbone. Here that is done once, and not in every thread.
        _ = self.side if self.depth == "pixels" else self.folder
        rows = []
        with one_thread(), ThreadPoolExecutor(core_count(), "mutirao-features") as pool:
            for i, row in enumerate(pool.map(self.of_file, files), 1):
                rows.append(row)
                if progress is not None:
                    progress(i, len(files))
        return np.stack(rows)

    def of_file(self, file: Path) -> npt.NDArray[Any]:
        """The views of one file; UnreadableError names it if it cannot be read."""
        try:
            return self.of_content(file.read_bytes())
        except UnreadableError as error:
            raise UnreadableError(f"{file}: {error}") from error
        except OSError as error:
            raise UnreadableError(f"{file}: {error.strerror or error}") from error

    def of_content(self, content: bytes) -> npt.NDArray[Any]:
        """The views of one image; a batch of its own, so that other images cannot change a bit of the result."""
        name = hashlib.sha256(content).hexdigest()
        if self.depth == "pixels":
            return self.views_of_content(content, name)
        kept = self.folder / name[:2] / f"{name}.npy"
        if self.cached and (found := self._load(kept)) is not None:
            return found
        features = self.of_pixels(self.views_of_content(content, name))
        if self.cached:
            stream = io.BytesIO()
            np.save(stream, features)
            # Without a cache the next run is only slower.
            with contextlib.suppress(OSError):
                write_whole(kept, stream.getvalue(), durable=False)
        return features

    def views_of_content(self, content: bytes, name: str) -> Pixels:
        """The image's views: stain normalization comes first, stain augmentation last, if they are set."""
        plain = picture(content)
        if self.stain != "none":
            plain = normalize_stain(plain, self.stain, self.side)
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
        # Absent or damaged, or Python 3.11 parsed two headers at once (SystemError): the features are computed again.
        except (OSError, ValueError, EOFError, SystemError):
            return None
        sound = found.dtype == np.float32 and found.ndim >= 2 and len(found) == self.views and np.isfinite(found).all()
        if sound:
            return found
        return None
