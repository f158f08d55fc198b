"""What every pretrained backbone is, wherever it comes from: pictures of bytes to features, and what it is known by."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mutirao.config import one_line
from mutirao.errors import ConfigError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224  # pixels a side, unless the backbone says another


class Backbone(nn.Module):
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
    """A short hash of all weights and statistics: features of two backbones must not be mixed up."""
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


NESTS = ("state_dict", "model_state_dict", "model", "net")  # where others' checkpoints keep the weights
PREFIXES = re.compile(r"^(module\.|model\.|backbone\.|encoder\.(?!stages)|net\.|_orig_mod\.)+")  # what wraps names
COUNTER = "num_batches_tracked"  # of batch normalisation: it counts, and nothing depends on it


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of weights, safetensors or torch's; a pickle with anything but tensors is refused."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"cannot read the weights {path}: {error.strerror or error}") from error
    except Exception as error:  # a broken file may end in almost any kind
        raise ConfigError(f"{path} holds no weights that can be read safely: {one_line(error)[:150]}") from error
    while isinstance(state, Mapping) and (inner := next((state[k] for k in NESTS if k in state), None)) is not None:
        state = inner
    if not isinstance(state, Mapping):
        raise ConfigError(f"{path} holds a {type(state).__name__}, not a table of named weights")
    return {str(k): v for k, v in state.items() if isinstance(v, Tensor)}


def copy_weights(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], our_key: Callable[[str], str | None], source: str, name: str
) -> None:
    """Copy weights into a network's `own`; each must be there and of the right shape, and none may be left over.

    `our_key` says where a weight lies in ours, or None of what a network may have besides, such as its classes.
    """
    named: dict[str, tuple[str, Tensor]] = {}
    for key, value in state.items():
        ours = our_key(key if key in own else PREFIXES.sub("", key))
        if ours is not None and not key.endswith(COUNTER):
            named[ours] = key, value
    wanted = {k: v for k, v in own.items() if not k.endswith(COUNTER)}
    faults = [
        f"has {key!r} of shape {tuple(value.shape)}, not {tuple(own[k].shape)}"
        for k, (key, value) in named.items()
        if k in own and value.shape != own[k].shape
    ]
    faults += [f"has no {k!r}" for k in wanted if k not in named]
    faults += [f"has {key!r} besides" for k, (key, _) in named.items() if k not in own]
    if faults:
        more = f", and {len(faults) - 1} more that do not fit" if len(faults) > 1 else ""
        raise ConfigError(f"weights: {source} does not fit {name}: it {faults[0]}{more}; is it another network?")
    with torch.no_grad():
        for key, (_, value) in named.items():
            own[key].copy_(value)
