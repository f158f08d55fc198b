"""The model as it is handed over: a torch module, whose weights are the start, or what makes one."""

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
    """What makes a module: a copy of the one that was given, or the class or function, which the seed starts."""

    make: Callable[[], nn.Module]
    told: str  # what it is known by: its class, and a digest of its first arrays and of how it prints

    @classmethod
    def of(cls, given: Any) -> "Model":
        """The model behind what a user hands over; ConfigError if there is none."""
        if isinstance(given, nn.Module):
            kept = copied(given)
            return cls(lambda: copy.deepcopy(kept), f"{tell(kept)}, its own weights")
        if isinstance(given, str) or not callable(given):
            raise ConfigError(f"model: a {type(given).__name__} is no torch module; {RIGHT}")
        try:
            with seeded(0):
                made = given()
        except Exception as error:  # a user's code may raise anything
            name = getattr(given, "__name__", type(given).__name__)
            raise ConfigError(f"model: {name}() failed: {one_line(error)}; {RIGHT}") from error
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model: what it makes is a {type(made).__name__}, no torch module; {RIGHT}")
        return cls(given, f"{tell(made)}, from the seed")


def copied(module: nn.Module) -> nn.Module:
    """A copy of our own: neither does training change the user's module, nor the user ours."""
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:  # modules hold whatever their users put there
        raise ConfigError(f"model: it cannot be copied ({one_line(error)}); give what makes it") from error


def tell(module: nn.Module) -> str:
    """What a module is known by; ConfigError if its arrays have no shape yet."""
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError("model: it has lazy layers, whose shapes are not known yet; call it on one batch first")
    return f"{type(module).__name__} {fingerprint([digest(arrays_of(module)), str(module)])[:32]}"
