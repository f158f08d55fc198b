"""LoRA: nothing changes at first, little travels, and what was learnt can be folded back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mutirao.aggregation import FedAvg
from mutirao.core.fleet import Request, Site
from mutirao.core.rounds import Run, train
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.lora import LoRALinear, lora, merge
from mutirao.training.optimizers import seeded
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer


class Attention(nn.Module):
    """Tokens that look at each other, whose block looks into its Linear layers when it judges."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.embed(x.view(len(x), -1, 2))).mean(1))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3, bias=False))


def stirred(module: nn.Module) -> nn.Module:
    """As after some training."""
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    return module


@settings(max_examples=25)
@given(rank=st.integers(1, 6), alpha=st.floats(0.5, 32), seed=st.integers(0, 1000), attention=st.booleans())
def test_at_first_nothing_is_different_and_merged_it_is_the_same(
    rank: int, alpha: float, seed: int, attention: bool
) -> None:
    with seeded(seed):
        module, x = (Attention if attention else mlp)().eval(), torch.randn(5, 8)
        adapted = lora(module, rank, alpha).eval()
        for grad in (torch.no_grad(), torch.enable_grad()):  # without gradients torch takes a shorter way
            with grad:
                torch.testing.assert_close(adapted(x), module(x), rtol=0, atol=1e-6)
        stirred(adapted.double())  # so that rounding is small beside what the adapters add
        with torch.no_grad():
            wanted, found = adapted(x.double()), merge(adapted)(x.double())
        assert not torch.allclose(wanted.float(), module(x))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert {k: v.shape for k, v in merge(adapted).state_dict().items()} == {
        k: v.shape for k, v in module.state_dict().items()
    }


def test_the_formula_by_hand() -> None:
    with seeded(0):
        layer = nn.Linear(4, 3)
        adapted = stirred(lora(layer, rank=2, alpha=6.0))
        x = torch.randn(7, 4)
    assert isinstance(adapted, LoRALinear)
    w, b, a, low = (t.detach().double().numpy() for t in (layer.weight, layer.bias, adapted.a, adapted.b))
    by_hand = x.double().numpy() @ (w + 6.0 / 2 * low @ a).T + b
    np.testing.assert_allclose(adapted(x).detach().numpy(), by_hand, rtol=1e-5, atol=1e-5)


def test_the_module_itself_stays_as_it_was_and_targets_choose() -> None:
    module = mlp()
    adapted = lora(module, targets="3")
    assert all(p.requires_grad for p in module.parameters())
    assert [n for n, p in adapted.named_parameters() if p.requires_grad] == ["3.a", "3.b"]
    with pytest.raises(ValueError, match=r"targets: 'body\.\*' fits none of the Linear layers: 0, 3"):
        lora(module, targets="body.*")
    with pytest.raises(ValueError, match="rank is 0"):
        lora(module, rank=0)


@pytest.mark.parametrize("engine", ["plain", "stacked", "threads"])
def test_it_learns_and_a_fraction_of_the_bytes_travels(engine: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(600, 64)).astype(np.float32)
    y = (x @ draw.normal(size=(64, 4))).argmax(1)
    data = {f"c{i}": Samples(x[i::6], y[i::6]) for i in range(6)}

    def big() -> nn.Module:
        with seeded(1):
            return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))

    up = {}
    for name, model in {"whole": big, "lora": lambda: lora(big(), rank=2)}.items():
        trainer = Trainer(model, optimizer="adam", lr=0.01, batch_size=10, engine=engine)
        run = Run(trainer.initial(0))
        rows = [r.row for r in train(run, LocalFleet(trainer, data), rounds=4, select=everyone, aggregate=FedAvg())]
        assert rows[-1]["train_loss"] < 0.9 * rows[0]["train_loss"]
        up[name] = rows[-1]["bytes_up"]
    numbers = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 4 + 4
    assert up == {"whole": 6 * (4 * numbers + 24), "lora": 6 * (4 * 2 * (64 + 3 * 256 + 256 + 4) + 24)}


@pytest.mark.slow
def test_peft_models_work_as_they_are() -> None:
    import peft  # late: it takes seconds

    def model() -> nn.Module:
        with seeded(1):
            adapted: nn.Module = peft.get_peft_model(mlp(), peft.LoraConfig(r=2, target_modules=["0", "3"]))
            return adapted

    trainer = Trainer(model)
    start = trainer.initial(0)
    assert all("lora_" in name for name in start)
    assert trainer.agreed()
    samples = Samples(np.eye(8, dtype=np.float32), np.arange(8) % 3)
    reply = trainer(Request("train", start, {"seed": 0, "round": 1}), Site("ana", samples))
    assert reply.arrays.keys() == start.keys()
    assert any((reply.arrays[name] != start[name]).any() for name in start)
