import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mutirao import Trainer
from mutirao.errors import ConfigError
from mutirao.systems.quickstart import Config
from mutirao.training import torch_device
from mutirao.training.torch_device import DeviceCache, autocast, find_device, is_heavy

HERE = Path(__file__).parent


@pytest.mark.slow
def test_every_kind_of_layer_trains_on_a_device_that_refuses_to_meet_the_cpu() -> None:
    """No GPU is at hand: see `elsewhere`. Its process is another one, as torch counts its devices but once."""
    words = ["-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-rN", str(HERE / "on_elsewhere.py")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "100%" in done.stdout


def small() -> nn.Linear:
    return nn.Linear(4, 2)


def large() -> nn.Module:
    return nn.Linear(4000, 1000)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cpu:0", "CUDA", "", "cuda:1 "])
def test_a_device_nobody_has_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"device is .* but must be auto, cpu, cuda, cuda:N"):
        Trainer(small, device=name)
    with pytest.raises(ConfigError, match="device is"):
        Trainer.of(Config(device=name), small)


def test_a_gpu_that_is_not_there_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "count_devices", lambda kind: 0)
    with pytest.raises(ConfigError, match="device is 'cuda', but there is none that this torch can use; use cpu"):
        Trainer.of(Config(device="cuda"), small)
    monkeypatch.setattr(torch_device, "count_devices", lambda kind: 2)
    with pytest.raises(ValueError, match="device is 'cuda:2', but there are 2; use cpu"):
        find_device("cuda:2", lambda: True)


@pytest.mark.parametrize(
    ("there", "model", "found"),
    [("", large, "cpu"), ("cuda", small, "cpu"), ("cuda", large, "cuda"), ("mps", large, "mps")],
)
def test_auto_takes_a_gpu_where_there_is_one_and_a_step_is_work_enough(
    there: str, model: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "count_devices", lambda kind: int(kind == there))
    assert Trainer(model, device="auto").torch_device().type == found


def test_what_is_heavy_is_as_the_page_says() -> None:
    assert is_heavy(nn.Conv2d(1, 1, 3), 1)
    assert is_heavy(nn.LSTM(2, 2), 1)
    assert not is_heavy(nn.Linear(1000, 100, bias=False), 2**29 // (6 * 100_000))
    assert is_heavy(nn.Linear(1000, 100, bias=False), 2**29 // (6 * 100_000) + 1)


def test_bf16_is_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="precision=bf16 is for a GPU; on the CPU it is slower: use float32"):
        Trainer.of(Config(precision="bf16"), small)


def test_a_copy_on_a_device_is_made_once_and_goes_with_its_tensor() -> None:
    copies, device, tensor = DeviceCache(), torch.device("meta"), torch.zeros(3)
    first = copies.bring(tensor, device)
    assert first is not None
    assert first.device == device
    assert copies.bring(tensor, device) is first
    assert copies.bring(tensor, tensor.device) is tensor
    del tensor
    gc.collect()
    assert not copies._held


def test_what_does_not_fit_is_not_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "free_bytes", lambda device: 100.0)
    copies, device = DeviceCache(), torch.device("meta")
    assert copies.bring(torch.zeros(13), device) is None  # 52 bytes: half of the memory is for the model
    assert copies.bring(torch.zeros(12), device) is not None


def test_autocast_computes_in_bfloat16_and_keeps_weights_and_loss_as_they_are() -> None:
    with FakeTensorMode(), autocast(torch.device("cpu"), "bf16"):  # shapes and types alone: nothing is computed
        model = small()
        outputs = model(torch.zeros(3, 4))
        loss = nn.functional.cross_entropy(outputs, torch.zeros(3, dtype=torch.int64))
        loss.backward()
    assert outputs.dtype == torch.bfloat16
    assert loss.dtype == model.weight.grad.dtype == torch.float32
    with autocast(torch.device("cpu"), "float32"):
        assert small()(torch.zeros(3, 4)).dtype == torch.float32
