"""What every pretrained body is, wherever it comes from: pictures of bytes to features, and what it is known by."""

import hashlib
from collections.abc import Mapping

from torch import Tensor, nn

from mutirao.errors import ConfigError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224  # pixels a side, unless the body says another


class Body(nn.Module):
    """Pictures of bytes, 3 x size x size, to features; `tail(trunk(x))` is the whole.

    `about` is what of it no weight tells, such as the digest of the file that it is; it counts for the fingerprint.
    """

    def __init__(
        self, name: str, trunk: nn.Module, tail: nn.Module, width: int, size: int = SIZE, about: str = ""
    ) -> None:
        super().__init__()
        self.name, self.width, self.size, self.about = name, width, size, about
        self.trunk, self.tail = trunk, tail

    def forward(self, x: Tensor) -> Tensor:
        """Features, a row a picture."""
        out: Tensor = self.tail(self.trunk(x))
        return out


class Features(nn.Module):
    """A network's answer as one row a picture: maps are averaged over the picture, anything else is refused."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Rows of features."""
        if not isinstance(x, Tensor) or x.ndim not in (2, 4):
            what = f"gives {' x '.join(map(str, x.shape))}" if isinstance(x, Tensor) else f"gives a {type(x).__name__}"
            right = "right is N x features, or N x features x height x width"
            raise ConfigError(f"body={self.name} {what}; {right}: let it pool its tokens, or export it so")
        return (x.mean((2, 3)) if x.ndim == 4 else x).float()


def weights_fingerprint(module: nn.Module) -> str:
    """A short hash of all weights and statistics: features of two bodies must not be mixed up."""
    return fingerprint_of(module, {**dict(module.named_parameters()), **dict(module.named_buffers())})


def statistics_fingerprint(module: nn.Module) -> str:
    """The same of what stays at home though all weights travel: the statistics of normalisation."""
    return fingerprint_of(module, dict(module.named_buffers()))


def fingerprint_of(module: nn.Module, held: Mapping[str, Tensor]) -> str:
    """A short hash of what a module holds, and of what it says about itself."""
    found = hashlib.sha256(str(getattr(module, "about", "")).encode())
    for key, value in sorted(held.items()):
        found.update(key.encode() + value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
