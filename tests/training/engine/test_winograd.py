"""Winograd's convolutions give torch's numbers, forth and back, and torch does what they do not take."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mutirao.training.engine import winograd
from mutirao.training.engine.winograd import accelerate_convolutions


def outcomes(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    module.zero_grad()
    out = module(x)
    out.backward(torch.from_numpy(np.random.default_rng(1).standard_normal(tuple(out.shape))).to(out))
    return [out.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)]


def assert_near(module: nn.Module, x: Tensor) -> None:
    """The same layer in double precision is the judge."""
    exact = outcomes(copy.deepcopy(module).double(), x.double())
    for right, ours in zip(exact, outcomes(accelerate_convolutions(copy.deepcopy(module)), x), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - right).abs().max() <= 1e-4 * right.abs().max()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernel was asked for."""
    calls: list[Any] = []
    apply = winograd.Winograd.apply
    monkeypatch.setattr(winograd.Winograd, "apply", lambda *args: (calls.append(args), apply(*args))[1])
    return calls


def pictures(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32)).to(
        memory_format=torch.channels_last
    )


def layer(ins: int, outs: int, side: int, **settings: Any) -> nn.Conv2d:
    torch.manual_seed(side)
    return nn.Conv2d(ins, outs, side, **settings).to(memory_format=torch.channels_last)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    channels=st.sampled_from([(16, 16), (16, 48), (32, 16), (64, 32), (16, 80), (96, 16)]),
    side=st.sampled_from([3, 5]),
    sizes=st.tuples(st.integers(5, 17), st.integers(5, 17)),
    padding=st.integers(0, 4),
    bias=st.booleans(),
    count=st.integers(1, 5),
)
def test_the_numbers_are_torchs(
    channels: tuple[int, int], side: int, sizes: tuple[int, int], padding: int, bias: bool, count: int
) -> None:
    conv = layer(*channels, side, padding=min(padding, side - 1), bias=bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "is_worthwhile", lambda *_: True)  # sizes that do not pay must be right too
        assert_near(conv, pictures(count, channels[0], *sizes))


@pytest.mark.parametrize(("side", "padding"), [(3, 1), (3, 0), (5, 2), (5, 0)])
def test_the_kernel_is_at_hand_and_used(used: list[Any], side: int, padding: int) -> None:
    accelerate_convolutions(layer(32, 64, side, padding=padding))(pictures(8, 32, 14, 14))
    assert len(used) == 1


@pytest.mark.parametrize(
    "conv",
    [
        layer(32, 32, 3, stride=2),
        layer(32, 32, 3, dilation=2),
        layer(32, 32, 3, groups=2),
        layer(32, 32, 3, padding=3),
        layer(32, 32, 3, padding="same"),
        layer(32, 32, 3, padding=1, padding_mode="circular"),
        layer(32, 24, 3),
        layer(3, 32, 3),
        layer(32, 32, 7),
        layer(32, 32, 1),
        nn.Conv2d(32, 32, (3, 5)).to(memory_format=torch.channels_last),
    ],
    ids=str,
)
def test_torch_does_the_other_layers(used: list[Any], conv: nn.Conv2d) -> None:
    assert_near(conv, pictures(8, conv.in_channels, 14, 14))
    assert not used


@pytest.mark.parametrize(
    "x",
    [
        pictures(8, 16, 12, 12).contiguous(),
        pictures(1, 16, 5, 5),
        pictures(30, 16, 3, 3),
        pictures(8, 16, 12, 12).double(),
        pictures(1, 16, 12, 12)[0],
    ],
    ids=["channel by channel", "too few tiles", "tiles half empty", "doubles", "one picture"],
)
def test_torch_does_the_other_pictures(used: list[Any], x: Tensor) -> None:
    conv = layer(16, 16, 3).to(x.dtype)
    torch.testing.assert_close(accelerate_convolutions(copy.deepcopy(conv))(x), conv(x), rtol=0, atol=0)
    assert not used


def test_the_gradient_of_pictures_is_made_only_if_asked_for() -> None:
    conv, x = accelerate_convolutions(layer(16, 32, 3)), pictures(8, 16, 12, 12)
    conv(x).square().sum().backward()
    weight = next(conv.parameters())
    assert x.grad is None
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()


def test_names_and_copies_stay_what_they_are() -> None:
    module = nn.Sequential(layer(16, 16, 3), nn.ReLU(), layer(16, 16, 3))
    names = list(module.state_dict())
    twin = copy.deepcopy(accelerate_convolutions(module))
    assert list(module.state_dict()) == list(twin.state_dict()) == names
    x = pictures(8, 16, 12, 12)
    before = twin(x)
    with torch.no_grad():
        module[0].weight.zero_()  # the copy has weights of its own
    torch.testing.assert_close(twin(x), before, rtol=0, atol=0)


def test_hooks_see_the_layer() -> None:
    seen: list[Tensor] = []
    conv = accelerate_convolutions(layer(16, 16, 3))
    conv.register_forward_hook(lambda module, args, out: seen.append(out))
    assert conv(pictures(8, 16, 12, 12)) is seen[0]


def test_without_a_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "kernel", None)
    assert "forward" not in vars(accelerate_convolutions(layer(16, 16, 3)))


def test_what_is_no_number_stays_with_its_picture() -> None:
    x = pictures(8, 16, 12, 12)
    x[3, 2, 5, 5] = float("nan")
    wrong = accelerate_convolutions(layer(16, 16, 3))(x).isnan().any(dim=(1, 2, 3))
    assert wrong.tolist() == [i == 3 for i in range(8)]


def test_the_kernel_refuses_what_does_not_fit() -> None:
    x, y, bias = (np.zeros(shape, np.float32) for shape in ((2, 6, 6, 16), (2, 4, 4, 32), 32))
    weight, flipped = np.zeros((3, 3, 16, 32), np.float32), np.zeros((3, 3, 32, 16), np.float32)
    winograd.kernel.forth(x, weight, bias, y, 0)
    winograd.kernel.back(x, flipped, y, x, weight, bias, 0)
    for wrong in ((x[0], weight, bias, y, 0), (x, weight, bias, y, 1), (x, weight, bias[:16], y, 0)):
        with pytest.raises(ValueError, match="must be of float32 and have the sizes"):
            winograd.kernel.forth(*wrong)
    with pytest.raises(ValueError, match="slopes of the pictures"):
        winograd.kernel.back(x, flipped, y, x[:1], weight, bias, 0)
    with pytest.raises(ValueError, match="slopes of the weights"):
        winograd.kernel.back(x, flipped, y, x, flipped, bias, 0)
    with pytest.raises(ValueError, match="a kernel must be"):
        winograd.kernel.forth(x, np.zeros((4, 4, 16, 32), np.float32), bias, y, 0)
    with pytest.raises(ValueError, match="a kernel must be"):
        winograd.kernel.forth(x, flipped, bias, y, 0)
    with pytest.raises(ValueError, match="a kernel must be"):
        winograd.kernel.forth(x, weight, bias, y, 3)
    with pytest.raises(ValueError, match="smaller than the kernel"):
        winograd.kernel.forth(x[:, :2].copy(), weight, bias, y, 0)
    with pytest.raises(ValueError, match="of float32"):
        winograd.kernel.forth(x.astype(np.float64), weight, bias, y, 0)
    with pytest.raises((BufferError, ValueError), match=r"read-only|contiguous"):
        winograd.kernel.forth(x, weight, bias, np.broadcast_to(np.float32(0), y.shape), 0)
