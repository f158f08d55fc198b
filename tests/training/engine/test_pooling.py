"""MaxPool and ReLU in one give the bits of torch's own two layers, forth and back."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mutirao.training.engine import pooling
from mutirao.training.engine.pooling import PooledReLU, fuse_pools


def outcomes(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    module.zero_grad()
    out = module(x)
    gradient = torch.from_numpy(np.random.default_rng(1).standard_normal(tuple(out.shape), np.float32))
    out.backward(gradient)
    assert x.grad is not None
    return [out, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_same(module: nn.Module, x: Tensor) -> None:
    for theirs, ours in zip(outcomes(module, x), outcomes(fuse_pools(copy.deepcopy(module)), x), strict=True):
        np.testing.assert_array_equal(ours.detach().numpy(), theirs.detach().numpy())


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 37), st.integers(4, 11), st.integers(4, 11)),
    side=st.integers(1, 4),
    stride=st.integers(1, 5),
    steps=st.integers(1, 8),
    seed=st.integers(0, 9),
)
def test_same_bits_as_torch(shape: tuple[int, ...], side: int, stride: int, steps: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    x = torch.from_numpy((numbers * steps).round().astype(np.float32) / steps)  # coarse, so that there are ties
    assert_same(nn.Sequential(nn.ReLU(), nn.MaxPool2d(side, stride)), x.contiguous(memory_format=torch.channels_last))


def test_what_is_no_number_stays_none() -> None:
    x = torch.zeros(1, 17, 6, 6).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = x[0, 16, 3, 3] = float("nan")
    x[0, 1] = float("-inf")
    x[0, 2, 1, 1] = float("inf")
    assert_same(nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2)), x)


def test_the_kernel_is_at_hand_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(pooling.Pooling, "apply", lambda x, side, stride: calls.append(side) or x)
    fuse_pools(nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2)))(
        torch.zeros(1, 4, 6, 6).to(memory_format=torch.channels_last)
    )
    assert calls == [3]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(3, 2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d((2, 3)),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ],
)
def test_every_pool_inside_a_network(pool: nn.MaxPool2d, inplace: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(inplace), pool, nn.Conv2d(5, 4, 2), nn.ReLU(inplace))
    x = torch.randn(6, 2, 12, 12)
    x[0] = 0.0
    assert_same(module, x)
    assert_same(module.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last))
    assert [type(m) for m in fuse_pools(module)] == [nn.Conv2d, PooledReLU, nn.Identity, nn.Conv2d, nn.ReLU]


def test_without_a_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "kernel", None)
    module = fuse_pools(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
    assert isinstance(module[0], PooledReLU)
    assert not module[0].fits
    assert_same(
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    )


def test_a_layer_with_a_hook_stays_as_it_is() -> None:
    module = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    module[0].register_forward_hook(lambda *_: None)
    assert isinstance(fuse_pools(module)[0], nn.ReLU)


def test_the_kernel_refuses_what_does_not_fit() -> None:
    x, out = np.zeros((1, 4, 4, 2), np.float32), np.zeros((1, 2, 2, 2), np.float32)
    where = np.zeros(out.shape, np.uint8)
    with pytest.raises(ValueError, match="window must fit"):
        pooling.kernel.forth(x, out, where, 5, 2)
    with pytest.raises(ValueError, match="what comes out must be 1 x 3 x 3 x 2"):
        pooling.kernel.forth(x, out, where, 2, 1)
    with pytest.raises(ValueError, match="the places must have four dimensions and type B"):
        pooling.kernel.forth(x, out, out, 2, 2)
    with pytest.raises(IndexError, match="outside its window"):
        pooling.kernel.back(x, out, where + 4, out, 2, 2)
    with pytest.raises((BufferError, ValueError), match=r"read-only|contiguous"):
        pooling.kernel.forth(x, np.broadcast_to(np.float32(0), out.shape), where, 2, 2)
