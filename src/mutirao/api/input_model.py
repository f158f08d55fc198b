"""The `model` argument of `mutirao.run`: a torch module with its initial weights, or a factory of one."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from mutirao.config import one_line
from mutirao.core.arrays import digest
from mutirao.core.digests import fingerprint
from mutirao.errors import ConfigError
from mutirao.training.optimizers import arrays_of, seeded

RIGHT = "give an nn.Module, or a class or function without arguments that makes one"


@dataclass(frozen=True)
class Model:
    """A factory of modules: copies of the one that was passed, or the class or function itself, seeded by the run."""

    make: Callable[[], nn.Module]
    summary: str  # its class, and a digest of its initial arrays and of its repr

    @classmethod
    def of(cls, given: Any) -> "Model":
        """Read the `model` argument; raises ConfigError if it is no module and makes none."""
        if isinstance(given, nn.Module):
            kept = copied(given)
            return cls(lambda: copy.deepcopy(kept), f"{summarise(kept)}, its own weights")
        if isinstance(given, str) or not callable(given):
            raise ConfigError(f"model: expected nn.Module, got {type(given).__name__}; {RIGHT}")
        try:
            with seeded(0):
                made = given()
        except Exception as error:  # a user's code may raise anything
            name = getattr(given, "__name__", type(given).__name__)
            raise ConfigError(f"model: {name}() failed: {one_line(error)}; {RIGHT}") from error
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model: expected a factory of nn.Module, but it returned {type(made).__name__}; {RIGHT}")
        return cls(given, f"{summarise(made)}, from the seed")


def copied(module: nn.Module) -> nn.Module:
    """A deep copy on the CPU, so that training never changes the user's module."""
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:  # modules hold whatever their users put there
        raise ConfigError(
            f"model: the module cannot be copied ({one_line(error)}); pass a function that makes it"
        ) from error


def summarise(module: nn.Module) -> str:
    """The class and digest of a module; raises ConfigError if its parameters have no shape yet."""
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError("model: lazy layers have no shape yet; call the module on one batch first")
    return f"{type(module).__name__} {fingerprint([digest(arrays_of(module)), str(module)])[:32]}"
