"""Files of weights: read without running anything, and put into a network only if they are that network's."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mutirao.config import one_line
from mutirao.errors import ConfigError

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
