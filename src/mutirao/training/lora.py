"""LoRA: the layers of a large model stay frozen, and only two low-rank matrices a layer are trained and shared."""

import copy
import math
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional


class LoRALinear(nn.Module):
    """A frozen Linear layer with a trainable low-rank change: W x + b + alpha / rank B A x."""

    def __init__(self, inner: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        like = inner.weight
        self.a = nn.Parameter(torch.empty(rank, inner.in_features, dtype=like.dtype, device=like.device))
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank, dtype=like.dtype, device=like.device))
        # As torch initialises a Linear layer.
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with the low-rank change."""
        low: Tensor = functional.linear(functional.linear(x, self.a), self.b)
        return self.inner(x) + self.scale * low  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:
        """The effective weights; a layer around this one may read them."""
        return self.inner.weight + self.scale * self.b @ self.a

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer."""
        return self.inner.bias


def lora(module: nn.Module, rank: int = 4, alpha: float = 8.0, targets: str = "*") -> nn.Module:
    """A frozen copy of a module; its Linear layers named by `targets` get a trainable low-rank change (LoRA).

    W x becomes W x + alpha / rank B A x, with A (rank x in) random and B (out x rank) 0, so that at first nothing is
    different. `targets` are patterns of the layers' names, separated by commas. Hu, Shen, Wallis, Allen-Zhu, Li, Wang,
    Wang and Chen, 2021: LoRA.

    >>> sorted(name for name, p in lora(nn.Linear(3, 2), rank=1).named_parameters() if p.requires_grad)
    ['a', 'b']
    """
    if rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"rank is {rank!r} and alpha {alpha!r}, but rank must be at least 1 and alpha above 0")
    module = copy.deepcopy(module).requires_grad_(False)
    layers = [path for path, m in module.named_modules() if type(m) is nn.Linear]
    patterns = [pattern.strip() for pattern in targets.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise ValueError(f"targets: {pattern!r} fits none of the Linear layers: {', '.join(layers) or 'none'}")
    for path in layers:
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            module = replace_module(module, path, LoRALinear(module.get_submodule(path), rank, alpha))  # type: ignore[arg-type]
    return module


def merge(module: nn.Module) -> nn.Module:
    """A copy of a module with each low-rank change merged into the weights: the same function without LoRA.

    >>> import torch
    >>> layer = nn.Linear(3, 2)
    >>> x = torch.ones(1, 3)
    >>> type(merge(lora(layer, rank=1))).__name__, bool(torch.allclose(merge(lora(layer, rank=1))(x), layer(x)))
    ('Linear', True)
    """
    module = copy.deepcopy(module)
    for path, part in list(module.named_modules()):
        if isinstance(part, LoRALinear):
            with torch.no_grad():
                part.inner.weight.copy_(part.weight)
            module = replace_module(module, path, part.inner)
    return module


def replace_module(module: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """The module with the submodule at `path` replaced; the new part itself if the path is empty."""
    if not path:
        return part
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, part)
    return module
