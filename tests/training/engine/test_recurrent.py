"""LSTM layers by the kernel give torch's numbers, forth and back, and torch does what it does not take."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from mutirao.training.engine import recurrent
from mutirao.training.engine.recurrent import accelerate_recurrent


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def layers(features: int, units: int, **settings: Any) -> nn.LSTM:
    torch.manual_seed(features)
    return nn.LSTM(features, units, **settings)


def outcomes(module: nn.LSTM, x: Tensor, hx: Any) -> list[Tensor]:
    """What comes out, and the gradients of all that goes in."""
    x, *hx = (t.detach().clone().requires_grad_() for t in (x, *(hx or ())))
    module.zero_grad()
    y, (h, c) = module(x, tuple(hx) if hx else None)
    sum((normal(*t.shape, seed=i).to(t) * t).sum() for i, t in enumerate((y, h, c))).backward()
    return [t.detach() for t in (y, h, c)] + [t.grad for t in (x, *hx, *module.parameters())]


def assert_near(module: nn.LSTM, x: Tensor, hx: Any = None) -> None:
    """The same layers in double precision are the judge."""
    exact = outcomes(copy.deepcopy(module).double(), x.double(), hx and [t.double() for t in hx])
    for right, ours in zip(exact, outcomes(accelerate_recurrent(copy.deepcopy(module)), x, hx), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernel was asked for."""
    calls: list[Any] = []
    apply = recurrent.LSTMKernel.apply
    monkeypatch.setattr(recurrent.LSTMKernel, "apply", lambda *args: (calls.append(args), apply(*args))[1])
    return calls


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    batch=st.integers(1, 70),
    steps=st.integers(1, 9),
    features=st.integers(1, 40),
    units=st.integers(16, 70),
    count=st.integers(1, 3),
    batch_first=st.booleans(),
    bias=st.booleans(),
    begun=st.booleans(),
)
def test_the_numbers_are_torchs(
    batch: int, steps: int, features: int, units: int, count: int, batch_first: bool, bias: bool, begun: bool
) -> None:
    module = layers(features, units, num_layers=count, batch_first=batch_first, bias=bias)
    x = normal(batch, steps, features) if batch_first else normal(steps, batch, features)
    state = (count, batch, units)
    assert_near(module, x, (normal(*state, seed=1), normal(*state, seed=2)) if begun else None)


def test_a_batch_larger_than_a_block_is_right() -> None:
    assert_near(layers(5, 20), normal(3, 300, 5))


def test_the_kernel_is_at_hand_and_used(used: list[Any]) -> None:
    accelerate_recurrent(nn.Sequential(layers(24, 100, num_layers=2, batch_first=True)))(normal(5, 4, 24))
    assert len(used) == 2


def test_steps_of_descent_end_where_torchs_do() -> None:
    module = layers(6, 24, num_layers=2, batch_first=True)
    ends = []
    for each in (copy.deepcopy(module).double(), accelerate_recurrent(copy.deepcopy(module))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for i in range(5):
            optimizer.zero_grad()
            each(normal(8, 7, 6, seed=i).to(each.weight_hh_l0))[0][:, -1].square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().double().flatten() for p in each.parameters()]))
    assert (ends[0] - ends[1]).abs().max() < 1e-6


@pytest.mark.parametrize(
    "module",
    [
        layers(4, 20, bidirectional=True),
        layers(4, 20, proj_size=8),
        layers(4, 20, num_layers=2, dropout=0.5),
        layers(4, 15),
        nn.GRU(4, 20),
    ],
    ids=str,
)
def test_torch_does_the_other_layers(module: nn.Module) -> None:
    assert "forward" not in vars(accelerate_recurrent(module))


def test_torch_does_the_other_inputs(used: list[Any]) -> None:
    module = layers(4, 20)
    ours = accelerate_recurrent(copy.deepcopy(module))
    for x in (normal(3, 4), pack_sequence([normal(3, 4), normal(2, 4)])):
        right, found = module(x)[0], ours(x)[0]
        if isinstance(x, PackedSequence):
            right, found = right.data, found.data
        torch.testing.assert_close(found, right, rtol=0, atol=0)
    assert ours.double()(normal(3, 2, 4).double())[0].dtype == torch.float64
    assert not used
    with pytest.raises(RuntimeError, match=r"input\.size"):
        accelerate_recurrent(module)(normal(3, 2, 5))


def test_names_and_copies_stay_what_they_are() -> None:
    module = layers(4, 20)
    names = list(module.state_dict())
    twin = copy.deepcopy(accelerate_recurrent(module))
    assert list(module.state_dict()) == list(twin.state_dict()) == names
    x = normal(3, 2, 4)
    before = twin(x)[0]
    with torch.no_grad():
        module.weight_hh_l0.zero_()  # the copy has weights of its own
    torch.testing.assert_close(twin(x)[0], before, rtol=0, atol=0)


def test_a_sample_does_not_depend_on_the_others() -> None:
    module, x = accelerate_recurrent(layers(4, 20)), normal(5, 9, 4)
    alone = torch.cat([module(x[:, i : i + 1])[0] for i in range(9)], 1)
    torch.testing.assert_close(module(x)[0], alone, rtol=0, atol=0)
    x[2, 3, 1] = float("nan")
    assert module(x)[0].isnan().any(dim=2).sum(0).tolist() == [3 if i == 3 else 0 for i in range(9)]


def test_going_back_twice_gives_the_same() -> None:
    module = accelerate_recurrent(layers(4, 20))
    loss = module(normal(5, 9, 4))[0].square().sum()
    first, second = (torch.autograd.grad(loss, list(module.parameters()), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_without_a_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "kernel", None)
    assert "forward" not in vars(accelerate_recurrent(layers(4, 20)))


def test_the_kernel_refuses_what_does_not_fit() -> None:
    x, w_in, w, gates, h = (np.zeros(s, np.float32) for s in ((3, 2, 4), (64, 4), (64, 16), (3, 2, 64), (3, 2, 16)))
    recurrent.kernel.forth(x, w_in, w, None, None, None, gates, h, h.copy())
    for wrong in ((x, w_in[:, :3].copy(), w), (x, w_in[:60], w), (x[0], w_in, w), (x.astype(np.float64), w_in, w)):
        with pytest.raises(ValueError, match="must be of float32 and have the sizes"):
            recurrent.kernel.forth(*wrong, None, None, None, gates, h, h.copy())
    for wrong_w in (w[:60], w[:, :15].copy()):
        with pytest.raises(ValueError, match="there must be"):
            recurrent.kernel.forth(x, w_in, wrong_w, None, None, None, gates, h, h.copy())
