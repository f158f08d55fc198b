"""Masks that are drawn before a step are those that the layers would draw in it."""

import numpy as np
import torch
from torch import Tensor, nn

from mutirao.training.engine.dropout import Mask, draw_masks, find_masks, give_masks
from mutirao.training.optimizers import seeded


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(0.2), nn.Linear(6, 5), nn.Dropout(0.7, inplace=True), nn.Linear(5, 3), nn.Dropout(0)
    )


def test_layers_that_draw_are_found_in_their_order() -> None:
    ours, state = model(), torch.get_rng_state()
    expected = [Mask("0", 0.2, (6,), torch.float32), Mask("2", 0.7, (5,), torch.float32)]
    assert find_masks(ours, torch.ones(4, 6)) == expected
    assert torch.equal(state, torch.get_rng_state())
    assert not any(layer._forward_hooks for layer in ours)
    assert find_masks(ours.eval(), torch.ones(4, 6)) == []


def test_a_layer_is_given_its_mask_under_whatever_name_it_is_called() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.layers = [self.drop]

        def forward(self, x: Tensor) -> Tensor:
            dropped: Tensor = self.layers[0](x)
            return dropped

    ours, mask = Listed(), torch.tensor([[0.0, 2.0]])
    give_masks(ours, find_masks(ours, torch.ones(1, 2)))
    assert torch.equal(torch.func.functional_call(ours, {"drop.mask": mask}, (torch.ones(1, 2),)), mask)


def test_what_is_not_drawn_sample_by_sample_is_left_as_it_is() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            dropped: Tensor = self.drop(x.t().contiguous())
            return dropped.t()

    for width in (4, 6):  # as many as there are samples, or not
        assert find_masks(Turned(), torch.ones(4, width)) == []


def test_each_client_draws_the_numbers_of_the_module_itself() -> None:
    ours, lengths = model(), np.array([[4, 4, 4], [4, 1, 3]])
    masks = find_masks(ours, torch.ones(4, 6))
    made = draw_masks(masks, [torch.Generator().manual_seed(seed) for seed in range(3)], lengths, 4)
    x = torch.randn(4, 6)
    expected: dict[tuple[int, int], Tensor] = {}
    for client in range(3):
        with seeded(client):
            for step, length in enumerate(lengths[:, client]):
                expected[step, client] = ours(x[:length])
    give_masks(ours, masks)
    for (step, client), outputs in expected.items():
        length = lengths[step, client]
        given = {f"{mask.layer}.mask": m[step, client, :length] for mask, m in zip(masks, made, strict=True)}
        assert torch.equal(torch.func.functional_call(ours, given, (x[:length],)), outputs)
