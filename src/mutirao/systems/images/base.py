"""The module of a pretrained backbone, its fingerprint, and reading weights from files.

Weight files are read without running code, and loaded only if they fit the network.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mutirao.config import one_line
from mutirao.errors import ConfigError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SIZE = 224  # default pixels a side


class Backbone(nn.Module):
    """A network from images (bytes, 3 x size x size) to features: `tail(trunk(x))`, where `tail` is the last block.

    `about` is what its weights do not show, such as the digest of an exported file; it is part of the fingerprint.
    """

    def __init__(
        self, name: str, trunk: nn.Module, tail: nn.Module, width: int, size: int = SIZE, about: str = ""
    ) -> None:
        super().__init__()
        self.name = name
        self.width = width
        self.size = size
        self.about = about
        self.trunk = trunk
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        """One row of features for each image."""
        out: Tensor = self.tail(self.trunk(x))
        return out


class Features(nn.Module):
    """Reduces a network's output to one row for each image: feature maps are averaged, anything else is refused."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """One row of features for each image."""
        if not isinstance(x, Tensor) or x.ndim not in (2, 4):
            found = " x ".join(map(str, x.shape)) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ConfigError(
                f"body={self.name} gives {found}; right is N x features, or N x features x height x width: "
                f"let it pool its tokens, or export it so"
            )
        if x.ndim == 4:
            x = x.mean((2, 3))
        return x.float()


def weights_fingerprint(module: nn.Module) -> str:
    """A short hash of all weights and statistics, so that features of two backbones are not mixed up."""
    return fingerprint_of(module, {**dict(module.named_parameters()), **dict(module.named_buffers())})


def statistics_fingerprint(module: nn.Module) -> str:
    """A short hash of the normalization statistics, which are not sent even when all weights are."""
    return fingerprint_of(module, dict(module.named_buffers()))


def fingerprint_of(module: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """A short hash of these tensors of a module, and of its `about`."""
    digest = hashlib.sha256(str(getattr(module, "about", "")).encode())
    for key, value in sorted(tensors.items()):
        digest.update(key.encode() + value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


NESTED_KEYS = ("state_dict", "model_state_dict", "model", "net")  # where checkpoints of other programs keep weights
PREFIXES = re.compile(r"^(module\.|model\.|backbone\.|encoder\.(?!stages)|net\.|_orig_mod\.)+")  # added by wrappers
COUNTER = "num_batches_tracked"  # of batch normalization; in evaluation nothing depends on it


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a weight file (safetensors, or torch's); a pickle with anything but tensors is refused."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        # weights_only: a pickle can run code while it is read; this refuses all but tensors and plain containers.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"cannot read the weights {path}: {error.strerror or error}") from error
    except Exception as error:  # a broken file can raise almost any exception
        raise ConfigError(f"{path} holds no weights that can be read safely: {one_line(error)[:150]}") from error
    while (
        isinstance(state, Mapping) and (inner := next((state[k] for k in NESTED_KEYS if k in state), None)) is not None
    ):
        state = inner
    if not isinstance(state, Mapping):
        raise ConfigError(f"{path} holds a {type(state).__name__}, not a table of named weights")
    return {str(k): v for k, v in state.items() if isinstance(v, Tensor)}


def copy_weights(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], our_key: Callable[[str], str | None], source: str, name: str
) -> None:
    """Copy `state` into a network's `own` tensors; each must be present, of the right shape, and none left over.

    `our_key` maps a key of the file to a key of the network, or to None if it is not needed, as a classifier is not.
    """
    named: dict[str, tuple[str, Tensor]] = {}
    for key, value in state.items():
        ours = our_key(key if key in own else PREFIXES.sub("", key))
        if ours is not None and not key.endswith(COUNTER):
            named[ours] = (key, value)
    # Everything is compared before anything is copied: a wrong file must not leave a mixture of two networks.
    expected = {k: v for k, v in own.items() if not k.endswith(COUNTER)}
    faults = []
    for k, (key, value) in named.items():
        if k in own and value.shape != own[k].shape:
            faults.append(f"has {key!r} of shape {tuple(value.shape)}, not {tuple(own[k].shape)}")
    faults += [f"has no {k!r}" for k in expected if k not in named]
    faults += [f"has {key!r} besides" for k, (key, _) in named.items() if k not in own]
    if faults:
        more = f", and {len(faults) - 1} more that do not fit" if len(faults) > 1 else ""
        raise ConfigError(f"weights: {source} does not fit {name}: it {faults[0]}{more}; is it another network?")
    with torch.no_grad():
        for key, (_, value) in named.items():
            own[key].copy_(value)
