"""Attention gives torch's numbers, forth and back, and torch does what is not done here."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from mutirao.training.engine import attention
from mutirao.training.engine.attention import accelerate_attention
from mutirao.training.engine.tracer import trace_step
from mutirao.training.optimizers import one_thread
from mutirao.training.plain import PlainTrainer
from mutirao.training.trainer import Trainer


def sequences(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def layer(width: int, heads: int, **settings: Any) -> nn.MultiheadAttention:
    torch.manual_seed(width)
    made = nn.MultiheadAttention(width, heads, **{"batch_first": True, **settings})
    if made.in_proj_bias is not None:
        nn.init.normal_(made.in_proj_bias)
    return made


def encoder(**settings: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    settings = {"dropout": 0.0, "batch_first": True, **settings}
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, **settings), 2, enable_nested_tensor=False)


def outcomes(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    itself = isinstance(module, nn.MultiheadAttention)
    out = module(x, x, x, need_weights=False)[0] if itself else module(x)
    out.backward(sequences(*out.shape, seed=1).to(out))
    return [out.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)]


def assert_near(module: nn.Module, x: Tensor, share: float = 1e-5) -> None:
    """The same layer in double precision is the judge."""
    exact = outcomes(copy.deepcopy(module).double(), x.double())
    for right, ours in zip(exact, outcomes(accelerate_attention(copy.deepcopy(module)), x), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - right).abs().max() <= share * max(1, right.abs().max())


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `mix` was asked for."""
    calls: list[Any] = []
    mix = attention.scaled_attention
    monkeypatch.setattr(attention, "scaled_attention", lambda *args: (calls.append(args), mix(*args))[1])
    return calls


@settings(max_examples=30, deadline=None)
@given(
    heads=st.integers(1, 4),
    size=st.integers(1, 40) | st.sampled_from([8, 16, 32, 64]),
    length=st.integers(1, 70),
    count=st.integers(1, 4),
    bias=st.booleans(),
    compiled=st.sampled_from([True, True, True, False]),
)
def test_the_numbers_are_torchs(heads: int, size: int, length: int, count: int, bias: bool, compiled: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(attention, "kernel", None)
        assert_near(layer(heads * size, heads, bias=bias), sequences(count, length, heads * size))


@pytest.mark.parametrize(("length", "kernel"), [(1, True), (32, True), (attention.MAX_TOKENS + 1, False)])
def test_the_kernel_is_at_hand_and_used(monkeypatch: pytest.MonkeyPatch, length: int, kernel: bool) -> None:
    calls: list[Any] = []
    apply = attention.AttentionKernel.apply
    monkeypatch.setattr(attention.AttentionKernel, "apply", lambda *args: (calls.append(args), apply(*args))[1])
    module, x = layer(8, 2), sequences(1, length, 8)
    with torch.no_grad():
        ours = accelerate_attention(copy.deepcopy(module))(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(ours, module(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-6)
    assert bool(calls) == kernel


def test_large_scores_neither_overflow_nor_vanish() -> None:
    module = layer(16, 2)
    assert_near(module, 30 * sequences(2, 20, 16), 1e-3)  # scores of hundreds, which float32 knows to 1e-5
    x = 1e4 * sequences(2, 20, 16)
    torch.testing.assert_close(
        accelerate_attention(copy.deepcopy(module))(x, x, x, need_weights=False)[0],
        module(x, x, x, need_weights=False)[0],
        rtol=1e-4,
        atol=1e-2,
    )


@pytest.mark.parametrize("settings", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_an_encoder_takes_torchs_steps(used: list[Any], settings: dict[str, Any]) -> None:
    ours, x = accelerate_attention(encoder(**settings)), sequences(6, 11, 32)
    exact = encoder(**settings).double()
    for module in (exact, ours):
        descent = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(5):
            descent.zero_grad()
            module(x.to(next(module.parameters()))).square().mean(dim=(0, 1)).sub(1).square().sum().backward()
            descent.step()
    assert len(used) == 10
    assert list(ours.state_dict()) == list(exact.state_dict())
    for a, b in zip(ours.parameters(), exact.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_first": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"dropout": 0.1},
    ],
    ids=str,
)
def test_torch_does_the_other_layers(used: list[Any], settings: dict[str, Any]) -> None:
    module, x = layer(16, 2, **settings), sequences(3, 5, 16)
    for each in (accelerate_attention(copy.deepcopy(module)), module):
        torch.manual_seed(0)
        settings[each] = each(x, x, x, need_weights=False)[0]
    ours, theirs = (settings[key] for key in settings if isinstance(key, nn.Module))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not used


def test_torch_does_the_other_calls(used: list[Any]) -> None:
    module, x = layer(16, 2), sequences(3, 5, 16)
    ours = accelerate_attention(copy.deepcopy(module))
    mask, late = torch.zeros(3, 5, dtype=torch.bool), torch.ones(5, 5).triu(1).bool()
    mask[:, 4] = True
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((x, x, x), {}),
        ((x, x, x.clone()), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "key_padding_mask": mask}),
        ((x, x, x), {"need_weights": False, "attn_mask": late}),
        ((x, x, x), {"need_weights": False, "attn_mask": late, "is_causal": True}),
        ((x[0],) * 3, {"need_weights": False}),
    ]
    for args, more in calls:
        torch.testing.assert_close(ours(*args, **more), module(*args, **more), rtol=0, atol=0)
    double, xs = accelerate_attention(copy.deepcopy(module).double()), x.double()
    double(xs, xs, xs, need_weights=False)
    with torch.autocast("cpu"):
        ours(x, x, x, need_weights=False)
    assert not used


def test_a_stack_or_a_recording_sees_torchs_operations(used: list[Any]) -> None:
    module, x = accelerate_attention(encoder()), sequences(2, 3, 5, 32)
    state = {n: torch.stack([p.detach()] * 2) for n, p in module.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        stacked = vmap(lambda held, x: functional_call(module, held, (x,)))(state, x)
        trace = trace_step(lambda x: [module(x)], [x[0]])
    assert not used
    torch.testing.assert_close(stacked[1], module(x[1]), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(trace(x[1])[0], module(x[1]), rtol=1e-5, atol=1e-6)


def test_names_and_copies_stay_what_they_are(used: list[Any]) -> None:
    module, x = encoder(), sequences(2, 5, 32)
    names = list(module.state_dict())
    twin = copy.deepcopy(accelerate_attention(module))
    assert list(module.state_dict()) == list(twin.state_dict()) == names
    before = twin(x)
    with torch.no_grad():
        for weight in module.parameters():  # the copy has weights of its own
            weight.zero_()
    torch.testing.assert_close(twin(x), before, rtol=0, atol=0)
    assert len(used) == 4


def test_samples_keep_to_themselves_and_repeat() -> None:
    x = sequences(6, 9, 32)
    module = accelerate_attention(encoder())
    torch.testing.assert_close(module(x)[2:3], module(x[2:3]), rtol=1e-5, atol=1e-6)
    for one, other in zip(outcomes(module, x), outcomes(module, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    x[3, 2, 5] = float("nan")
    assert module(x).isnan().any(dim=(1, 2)).tolist() == [i == 3 for i in range(6)]


@pytest.mark.parametrize(("engine", "ours"), [("auto", True), ("threads", True), ("stacked", False), ("plain", False)])
def test_a_trainer_keeps_torchs_own_if_asked(engine: str, ours: bool) -> None:
    made = Trainer(encoder, engine=engine).make()
    assert any("forward" in vars(m) for m in made.modules()) == ours
    assert not any("forward" in vars(m) for m in PlainTrainer(encoder).make().modules())


def test_the_kernel_refuses_what_does_not_fit() -> None:
    packed, mixed, scales = (np.zeros(shape, np.float32) for shape in ((2, 5, 24), (2, 5, 8), (2, 2, 2, 5)))
    kernel = attention.kernel
    kernel.forth(0.5, packed, mixed, scales)
    kernel.back(0.5, packed, mixed, scales, packed.copy())
    for wrong in ((packed[0], mixed, scales), (packed, packed, scales), (packed, mixed, scales[:1])):
        with pytest.raises(ValueError, match="must be of float32 and have the sizes"):
            kernel.forth(0.5, *wrong)
    with pytest.raises(ValueError, match="of float32"):
        kernel.forth(0.5, packed.astype(np.float64), mixed, scales)
    with pytest.raises(ValueError, match="the slopes"):
        kernel.back(0.5, packed, mixed, scales, mixed)
    for heads in (0, 3):
        with pytest.raises(ValueError, match="the same for each head"):
            kernel.forth(0.5, packed, mixed, np.zeros((2, heads, 2, 5), np.float32))
    with pytest.raises((BufferError, ValueError), match=r"read-only|contiguous"):
        kernel.forth(0.5, packed, np.broadcast_to(np.float32(0), mixed.shape), scales)
