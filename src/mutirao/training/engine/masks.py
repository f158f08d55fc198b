"""Dropout's masks of one client, step by step: the numbers that torch's own layers would draw."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class Masks:
    """Masks of the inputs of layers, given their widths and the share that is left out; a step's at a time.

    A layer draws from torch's generator as `nn.Dropout` does, which leaves it alone if nothing or all is left out.
    """

    def __init__(self, layers: Sequence[tuple[int, float]], longest: int, seed: int) -> None:
        self.each: list[tuple[Any, float] | None] = []
        self.drawn = []
        self.generator = torch.Generator()
        for width, dropped in layers:
            mask = torch.zeros(longest, width) if dropped else None
            scale = 1 / np.float32(1 - dropped) if dropped < 1 else 0.0
            self.each.append(None if mask is None else (mask.numpy(), float(scale)))
            if mask is not None and dropped < 1:
                self.drawn.append((mask, 1 - dropped))
        if self.drawn:
            self.generator.manual_seed(seed)

    def __bool__(self) -> bool:
        return any(self.each)

    def draw(self, length: int) -> None:
        """Fill the first rows of all masks for the next step."""
        for mask, kept in self.drawn:
            mask[:length].bernoulli_(kept, generator=self.generator)
