"""Which arrays of a module are shared: the trained ones. Frozen arrays stay, and must be the same at all parties."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from mutirao.errors import ConfigError


@dataclass(frozen=True)
class StateNames:
    """The names of a module's shared and frozen arrays, and the modules that must not be in training mode."""

    shared: tuple[str, ...]
    frozen: tuple[str, ...]
    frozen_modules: frozenset[str]  # modules with buffers that stay, such as running means: in training they would move

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module in training mode, except for modules such as normalisation whose statistics are frozen."""
        module.train()
        for path in self.frozen_modules:
            # This module alone: a dropout layer inside it stays in training mode.
            module.get_submodule(path).training = False
        return module


def find_state_names(module: nn.Module, share: str = "") -> StateNames:
    """The shared and frozen arrays of a module; `share` holds patterns of shared names, separated by commas.

    By default all, or of a module with frozen parameters what has `requires_grad`, and buffers, but for those of its
    wholly frozen parts. ConfigError names a pattern without a match, and what would be trained and then lost.
    """
    state = module.state_dict(keep_vars=True)
    trained = {name for name, value in state.items() if value.requires_grad}
    patterns = [pattern.strip() for pattern in share.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in state):
            raise ConfigError(f"share: {pattern!r} matches none of the model's arrays: {list_some(list(state))}")
    if patterns:
        chosen: set[str] = set()
        for pattern in patterns:
            chosen.update(name for name in state if fnmatchcase(name, pattern))
        if lost := [name for name in state if name in trained - chosen]:
            raise ConfigError(
                f"share: {lost[0]!r} is trained but not shared, so that its training is lost after each round; "
                "add it, or freeze it by requires_grad_(False)"
            )
    elif not trained:
        raise ConfigError("the model has no parameter with requires_grad, so nothing can be trained")
    elif all(p.requires_grad for p in module.parameters()):
        chosen = set(state)
    else:
        chosen = {name for name in state if name in trained or not is_frozen(module, name)}
    frozen = tuple(name for name in state if name not in chosen)
    # Tied weights are in `state_dict` under each of their names, so they must be here, too.
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    frozen_modules = frozenset(name.rpartition(".")[0] for name in frozen if name not in parameters)
    return StateNames(tuple(name for name in state if name in chosen), frozen, frozen_modules)


def is_frozen(module: nn.Module, name: str) -> bool:
    """Whether an array without gradient is frozen: a frozen parameter, or a buffer of a wholly frozen part."""
    path, _, last = name.rpartition(".")
    if last in module.get_submodule(path)._parameters:
        return True
    while not (own := list(module.get_submodule(path).parameters())) and path:
        # A layer without parameters counts as part of the module around it.
        path = path.rpartition(".")[0]
    return bool(own) and not any(p.requires_grad for p in own)


def list_some(names: list[str]) -> str:
    """The first names of a list, for messages."""
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
