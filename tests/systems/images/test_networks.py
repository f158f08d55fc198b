"""Networks by the shape of a sample: pictures of any size from 7 x 7, one channel or more, and rows of numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mutirao.errors import ConfigError
from mutirao.systems.images.networks import NETWORKS, InvertedResidual, Normalize, make_network, mobilenet, replace_head


@pytest.mark.slow
@settings(max_examples=25)
@given(st.sampled_from(sorted(NETWORKS)), st.integers(1, 4), st.integers(7, 90), st.integers(7, 90), st.integers(2, 12))
def test_any_picture_goes_through_and_every_weight_learns(
    name: str, deep: int, high: int, wide: int, classes: int
) -> None:
    network = make_network(name, (deep, high, wide), 64, classes)
    x = torch.randint(0, 256, (2, deep, high, wide), dtype=torch.uint8)
    outputs = network(x)
    assert outputs.shape == (2, classes)
    outputs.logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in network.parameters())
    dense = [m for m in network if isinstance(m, nn.Linear)]  # type: ignore[attr-defined]
    assert dense[0].in_features <= 64 * 8 * max(8, max(high, wide) // 4)  # a long picture may keep its length


WEIGHTS = [("cnn", 576_778), ("small", 62_006), ("deep", 312_010), ("mobilenet", 408_938)]


@pytest.mark.parametrize(("name", "weights"), WEIGHTS)
def test_of_cifar10s_shape_they_are_the_papers(name: str, weights: int) -> None:
    assert sum(p.numel() for p in NETWORKS[name]().parameters()) == weights
    larger = [sum(p.numel() for p in NETWORKS[name]((3, side, side)).parameters()) for side in (64, 128, 224)]
    assert max(larger) < 5 * weights  # more convolutions, not a dense layer without end


def test_a_picture_that_is_too_small_is_for_a_dense_network() -> None:
    with pytest.raises(ConfigError, match="6 x 30 are too small for convolutions; use mlp"):
        make_network("small", (1, 6, 30), 64, 2)
    assert make_network("mlp", (1, 6, 30), 64, 2)(torch.zeros(1, 1, 6, 30, dtype=torch.uint8)).shape == (1, 2)
    assert make_network("small", (13,), 8, 3)(torch.zeros(1, 13)).shape == (1, 3)


def test_grey_and_coloured_pixels_are_brought_to_one_scale() -> None:
    for deep in (1, 3, 4):
        first = next(iter(make_network("small", (deep, 32, 32), 64, 2).children()))
        assert isinstance(first, Normalize)
        ends = [float(first(torch.full((1, deep, 1, 1), v, dtype=torch.uint8)).mean()) for v in (0, 255)]
        assert ends == pytest.approx([-2, 2], abs=0.2)


def test_mobilenet_at_full_width_has_the_weights_and_places_of_the_papers() -> None:
    whole = mobilenet(3, 1000, nn.Identity(), 1.0)
    assert sum(p.numel() for p in whole.parameters()) == 3_504_872  # as torchvision's has
    sides: list[tuple[int, ...]] = []
    for layer in whole:
        if isinstance(layer, InvertedResidual):
            layer.register_forward_hook(lambda _, __, out: sides.append(tuple(out.shape[1:])))
    whole.eval()(torch.zeros(1, 3, 224, 224))
    ends = [(16, 112), (24, 56), (32, 28), (64, 14), (96, 14), (160, 7), (320, 7)]  # table 2: channels, and a side
    assert list(dict.fromkeys(sides)) == [(c, s, s) for c, s in ends]
    assert len(sides) == 17


def test_a_new_head_leaves_the_rest_as_it_is() -> None:
    network = make_network("small", (3, 32, 32), 64, 10)
    other = replace_head(network, 4)
    pairs = list(zip(network.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs[:-2])
    assert pairs[-1][1].shape == (4,)
