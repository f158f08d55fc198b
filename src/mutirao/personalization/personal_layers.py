"""Which of a module's arrays are personal: its last layer, layers by name, or batch normalisation."""

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from mutirao.errors import ConfigError
from mutirao.training.trainable_state import list_some


def last_layer_names(module: nn.Module, names: Sequence[str]) -> list[str]:
    """The arrays of the last layer that has weights of its own, of those that are in `names`."""
    found: list[str] = []
    for path, part in module.named_modules():
        if own := [name for k in part._parameters if (name := array_name(path, k)) in names]:
            found = own + [name for k in part._buffers if (name := array_name(path, k)) in names]
    return found


def matching_names(names: Sequence[str], patterns: str) -> list[str]:
    """The arrays that fit patterns separated by commas, each of an array's name or of a layer's.

    >>> named_layers(["0.weight", "2.weight", "2.bias"], "2")
    ['2.weight', '2.bias']
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted:
        if not any(matches_layer(name, pattern) for name in names):
            raise ConfigError(
                f"personal.layers: {pattern!r} fits none of the arrays that travel: {list_some(list(names))}"
            )
    return [name for name in names if any(matches_layer(name, pattern) for pattern in wanted)]


def matches_layer(name: str, pattern: str) -> bool:
    """Whether a pattern means this array, or a layer that holds it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def batch_norms(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Weights, biases and statistics of all batch normalisation, of those that are in `names`.

    A layer of one's own counts if it says so: `is_batch_norm = True`.
    """
    kind = nn.modules.batchnorm._BatchNorm
    parts = module.named_modules()
    norms = {path for path, part in parts if isinstance(part, kind) or getattr(part, "is_batch_norm", False) is True}
    return [name for name in names if name.rpartition(".")[0] in norms]


def array_name(path: str, name: str) -> str:
    """The name of an array in a part of a module."""
    return f"{path}.{name}" if path else name


def freeze_others(make: Callable[[], nn.Module], names: Collection[str]) -> nn.Module:
    """The module with all frozen but the parameters of these names."""
    module = make()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in names:
            parameter.requires_grad_(False)
    return module
