"""Encoder layers in one call give torch's numbers, forth and back, and torch does what the kernel does not take."""

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
from mutirao.training.engine.attention import accelerate_encoders
from mutirao.training.engine.tracer import trace_step
from mutirao.training.optimizers import one_thread
from mutirao.training.trainer import Trainer


def sequences(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def layer(width: int = 32, heads: int = 4, hidden: int = 48, **more: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(width)
    made = nn.TransformerEncoderLayer(width, heads, hidden, **{"dropout": 0.0, "batch_first": True, **more})
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.3)
    return made


def stack(**more: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(32, 4, 48, **{"dropout": 0.0, "batch_first": True, **more})
    return nn.TransformerEncoder(one, 2, enable_nested_tensor=False)


def outcomes(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.backward(sequences(*out.shape, seed=1).to(out))
    return [out.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernel was asked for."""
    calls: list[Any] = []
    apply = attention.EncoderKernel.apply
    monkeypatch.setattr(attention.EncoderKernel, "apply", lambda *args: (calls.append(args), apply(*args))[1])
    return calls


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from([(16, 1), (16, 2), (32, 4), (48, 3), (48, 2), (64, 4)]),
    hidden=st.sampled_from([16, 48, 64, 128]),
    length=st.integers(1, 70),
    count=st.integers(1, 9),
)
def test_the_numbers_are_torchs(shape: tuple[int, int], hidden: int, length: int, count: int) -> None:
    module, x = layer(*shape, hidden), sequences(count, length, shape[0])
    exact = outcomes(copy.deepcopy(module).double(), x.double())
    for right, ours in zip(exact, outcomes(accelerate_encoders(module), x), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - right).abs().max() <= 2e-5 * max(1, right.abs().max())


def test_an_encoder_takes_torchs_steps(used: list[Any]) -> None:
    ours, exact, x = accelerate_encoders(stack()), stack().double(), sequences(6, 11, 32)
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
    "more",
    [
        {"norm_first": True},
        {"activation": "gelu"},
        {"bias": False},
        {"batch_first": False},
        {"dropout": 0.1},
        {"hidden": 40},
    ],
    ids=str,
)
def test_torch_does_the_other_layers(used: list[Any], more: dict[str, Any]) -> None:
    module, x, made = layer(**more), sequences(3, 5, 32), []
    for each in (module, accelerate_encoders(copy.deepcopy(module))):
        torch.manual_seed(0)
        made.append(each(x))
    torch.testing.assert_close(made[1], made[0], rtol=1e-5, atol=1e-6)
    assert not used


def test_torch_does_the_other_calls(used: list[Any]) -> None:
    module, x = layer(), sequences(3, 5, 32)
    ours = accelerate_encoders(copy.deepcopy(module))
    padding, late = torch.zeros(3, 5, dtype=torch.bool), torch.ones(5, 5).triu(1).bool()
    padding[:, 4] = True
    for more in ({"src_key_padding_mask": padding}, {"src_mask": late}, {"src_mask": late, "is_causal": True}):
        torch.testing.assert_close(ours(x, **more), module(x, **more), rtol=0, atol=0)
    torch.testing.assert_close(ours(x[0]), module(x[0]), rtol=0, atol=0)
    copy.deepcopy(ours).double()(x.double())
    seen: list[Tensor] = []
    ours.norm1.register_forward_hook(lambda module, args, out: seen.append(out))
    ours(x)
    assert len(seen) == 1
    assert not used


def test_a_stack_or_a_recording_sees_torchs_operations(used: list[Any]) -> None:
    module, x = accelerate_encoders(stack()), sequences(2, 3, 5, 32)
    state = {n: torch.stack([p.detach()] * 2) for n, p in module.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        stacked = vmap(lambda held, x: functional_call(module, held, (x,)))(state, x)
        trace = trace_step(lambda x: [module(x)], [x[0]])
    assert not used
    with torch.no_grad():
        for theirs in (stacked[1], trace(x[1])[0]):
            torch.testing.assert_close(theirs, module(x[1]), rtol=1e-5, atol=1e-5)


def test_names_and_copies_stay_what_they_are(used: list[Any]) -> None:
    module, x = stack(), sequences(2, 5, 32)
    names = list(module.state_dict())
    twin = copy.deepcopy(accelerate_encoders(module))
    assert list(module.state_dict()) == list(twin.state_dict()) == names
    before = twin(x)
    with torch.no_grad():
        for weight in module.parameters():  # the copy has weights of its own
            weight.zero_()
    torch.testing.assert_close(twin(x), before, rtol=0, atol=0)
    assert len(used) == 4


def test_samples_keep_to_themselves_and_repeat() -> None:
    x, module = sequences(6, 9, 32), accelerate_encoders(stack())
    torch.testing.assert_close(module(x)[2:3], module(x[2:3]), rtol=1e-5, atol=1e-5)
    for one, other in zip(outcomes(module, x), outcomes(module, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    x[3, 2, 5] = float("nan")
    assert module(x).isnan().any(dim=(1, 2)).tolist() == [i == 3 for i in range(6)]


def test_without_a_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "kernel", None)
    assert "forward" not in vars(accelerate_encoders(layer()))


@pytest.mark.parametrize(("engine", "ours"), [("auto", True), ("threads", True), ("stacked", False), ("plain", False)])
def test_a_trainer_keeps_torchs_own_if_asked(engine: str, ours: bool) -> None:
    made = Trainer(stack, engine=engine).make()
    assert any("forward" in vars(m) for m in made.modules()) == ours


def test_the_kernel_refuses_what_does_not_fit() -> None:
    def arrays(width: int, heads: int, hidden: int) -> list[Any]:
        x, *held = sequences(2, 5, width), *attention.encoder_weights(layer(width, 1, hidden))
        kept = [(2, 5, 3 * width), (2, heads, 2, 5), *[(2, 5, width)] * 3, (2, 5, hidden), (2, 2, 5)]
        return [*attention.numpy_views(x, x.clone(), *held), *(np.zeros(shape, np.float32) for shape in kept)]

    right = arrays(16, 2, 32)
    attention.kernel.encode(0.5, 1e-5, 1e-5, tuple(right))
    for wrong in (arrays(16, 3, 32), arrays(24, 2, 32), arrays(16, 2, 40)):
        with pytest.raises(ValueError, match=r"must be 16, 32, \.\.\. wide"):
            attention.kernel.encode(0.5, 1e-5, 1e-5, tuple(wrong))
    with pytest.raises(ValueError, match="a layer has 21 arrays"):
        attention.kernel.encode(0.5, 1e-5, 1e-5, tuple(right[:-1]))
    for i in range(len(right)):
        other = [*right[:i], np.zeros((*right[i].shape[:-1], right[i].shape[-1] + 1), np.float32), *right[i + 1 :]]
        with pytest.raises(ValueError, match="an array of the layer must be of float32"):
            attention.kernel.encode(0.5, 1e-5, 1e-5, tuple(other))
    with pytest.raises(ValueError, match="a layer has 34 arrays"):
        attention.kernel.encode_back(0.5, 1e-5, 1e-5, tuple(right))
