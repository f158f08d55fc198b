"""Backbones of others: timm's by name, with its own module and with a stand-in, and files in TorchScript and ONNX."""

import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.registry import dotted_in
from mutirao.report import execute
from mutirao.systems.cytology.slides.models import ScreeningModel, join_parts, load_model, save_model
from mutirao.systems.images.backbones import load_backbone, weights_fingerprint
from mutirao.systems.images.base import statistics_fingerprint
from mutirao.systems.images.features import Extractor
from mutirao.systems.images.heads import trained_part

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


class Tiny(nn.Module):
    """A network with batch normalisation and a classifier, as timm's are."""

    def __init__(self, num_classes: int = 10, width: int = 6) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width)
        self.fc: nn.Module = nn.Linear(width, num_classes) if num_classes else nn.Identity()
        self.default_cfg = {"classifier": "fc", "input_size": (3, 40, 40), "mean": MEAN, "std": STD}

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.bn(self.conv(x)).relu().mean((2, 3)))
        return found


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in that makes one small network, as timm would."""

    def create_model(name: str, pretrained: bool = False, num_classes: int = 1000, **settings: Any) -> nn.Module:
        if name != "tiny":
            raise RuntimeError(f"Unknown model ({name})")
        made = Tiny(num_classes, **settings)
        if pretrained:
            nn.init.constant_(made.conv.weight, 0.01)
            made.bn.running_mean.fill_(0.2)  # type: ignore[union-attr]
        return made

    module: Any = types.ModuleType("timm")
    module.create_model = create_model
    module.data = types.SimpleNamespace(resolve_model_data_config=lambda made: made.default_cfg)
    monkeypatch.setitem(sys.modules, "timm", module)
    return module  # type: ignore[no-any-return]


def pictures(n: int = 2, size: int = 40) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, size, size), dtype=np.uint8))


def normalize_stain(x: Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    return (x / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)


@pytest.mark.usefixtures("timm")
def test_a_network_of_timms_is_normalised_as_its_makers_did_and_keeps_its_statistics() -> None:
    made, theirs = load_backbone("timm:tiny"), sys.modules["timm"].create_model("tiny", pretrained=True, num_classes=0)
    theirs.load_state_dict(made.trunk[1].network.state_dict(), strict=False)  # type: ignore[index, union-attr]
    with torch.inference_mode():
        assert torch.allclose(made(pictures()), theirs.eval()(normalize_stain(pictures())), atol=1e-6)
    assert (made.width, made.size) == (6, 40)
    assert load_backbone("timm:tiny?width=4").width == 4
    part = trained_part(made, "all", 3).train()
    before = statistics_fingerprint(part)
    part[-1].weight.data.normal_()  # type: ignore[index]
    part(pictures()[:, None]).square().sum().backward()
    assert all(p.grad is not None for p in part.parameters())
    assert statistics_fingerprint(part) == before
    assert not [name for name in part.state_dict() if "running" in name]


def test_weights_of_timms_network_from_a_file_must_be_that_networks(tmp_path: Path, timm: types.ModuleType) -> None:
    torch.manual_seed(0)
    whole_one, wider = Tiny(10), Tiny(10, width=8)
    torch.save({"state_dict": whole_one.state_dict()}, tmp_path / "tiny.pth")
    torch.save(wider.state_dict(), tmp_path / "wider.pth")
    torch.save(whole_one.state_dict() | {"extra.weight": torch.zeros(2)}, tmp_path / "more.pth")
    made = load_backbone("timm:tiny", str(tmp_path / "tiny.pth"))
    assert torch.equal(made.trunk[1].network.conv.weight, whole_one.conv.weight)  # type: ignore[index, union-attr]
    assert weights_fingerprint(made) != weights_fingerprint(load_backbone("timm:tiny"))
    for file, why in [("wider.pth", r"of shape \(8, 3, 3, 3\), not \(6"), ("more.pth", "'extra.weight' besides")]:
        with pytest.raises(ConfigError, match=why):
            load_backbone("timm:tiny", str(tmp_path / file))
    with pytest.raises(ConfigError, match="timm cannot make 'huge': Unknown model"):
        load_backbone("timm:huge")
    own = load_backbone("timm:tiny?mean=0.1,0.2,0.3&std=1,1,2", str(tmp_path / "tiny.pth"))
    with torch.inference_mode():
        whole_one.fc = nn.Identity()
        wanted = whole_one.eval()(normalize_stain(pictures(), (0.1, 0.2, 0.3), (1, 1, 2)))
        assert torch.allclose(own(pictures()), wanted, atol=1e-6)
    with pytest.raises(ConfigError, match="std must be three numbers"):
        load_backbone("timm:tiny?std=1,0,2")
    with pytest.raises(ConfigError, match="'checkpoint_path' is not a setting"):
        load_backbone("timm:tiny?checkpoint_path=/tmp/x.pth")
    timm.create_model = lambda *_, **__: Tokens()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="gives 1 x 5 x 6; right is N x features"):
        load_backbone("timm:tokens")


class Tokens(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 5, 6)


def test_without_timm_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"needs timm, with torchvision: install mutirao\[timm\]"):
        load_backbone("timm:tiny")


class Torchvision:
    """Modules called torchvision that hold whatever is asked for: timm looks at them when it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        loader: Any = self
        mine = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, loader, is_package=True) if mine else None

    def create_module(self, spec: Any) -> types.ModuleType:
        class Anything(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                modes = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
                return type(name, (), {mode: mode.lower() for mode in modes})

        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@pytest.fixture
def real_timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "meta_path", [Torchvision(), *sys.meta_path])
    before = set(sys.modules)
    import timm

    yield timm
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("timm", "torchvision"):
            del sys.modules[name]


@pytest.mark.slow
def test_timm_itself_makes_the_bodies_that_it_names(real_timm: Any, tmp_path: Path) -> None:
    theirs = real_timm.create_model("resnet10t", num_classes=7)
    torch.save(theirs.state_dict(), tmp_path / "ten.pth")
    made = load_backbone("timm:resnet10t", str(tmp_path / "ten.pth"))
    facts = real_timm.data.resolve_model_data_config(theirs)
    with torch.inference_mode():
        x = pictures(2, facts["input_size"][-1])
        theirs.reset_classifier(0)
        wanted = theirs.eval()(normalize_stain(x, facts["mean"], facts["std"]))
        assert torch.allclose(made(x), wanted, atol=1e-5, rtol=1e-4)
    assert (made.width, made.size) == (512, 176)
    seen = load_backbone("timm:test_vit?init_values=1e-5", "random")
    assert "blocks.0.ls1.gamma" in seen.trunk[1].network.state_dict()  # type: ignore[index, union-attr]
    with pytest.raises(ConfigError, match="does not fit timm:resnet14t"):
        load_backbone("timm:resnet14t", str(tmp_path / "ten.pth"))
    page = (Path(__file__).parents[3] / "docs" / "backbones.md").read_text()
    shown: dict[str, Any] = {}
    exec(compile(page.split("```python\n")[1].split("```")[0], "backbones.md", "exec"), shown)  # the page's own code
    vit = real_timm.create_model("test_vit", num_classes=0)
    side = real_timm.data.resolve_model_data_config(vit)["input_size"][-1]
    shown["save_backbone"](vit, tmp_path / "vit.pt", mean=MEAN, std=STD, size=side)
    with torch.inference_mode():
        three = pictures(3, side)  # it was traced with one picture
        assert torch.allclose(
            load_backbone(f"file:{tmp_path / 'vit.pt'}")(three), vit(normalize_stain(three)), atol=1e-5
        )
    part = trained_part(made, "head", 2)
    model = ScreeningModel(
        join_parts(made, part, "head"), {"kind": "mutirao cytology model", "body": made.name, "side": made.size}
    )
    model.facts.update(trainable="head", classes=["a", "b"], abnormal=["a"])  # type: ignore[attr-defined]
    save_model(model, tmp_path / "model.pt")
    tile = np.ascontiguousarray(x[0].permute(1, 2, 0).numpy())
    assert np.array_equal(load_model(tmp_path / "model.pt")(tile), model(tile))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One network as TorchScript and as ONNX, each saying how pictures must look."""
    import onnx

    torch.manual_seed(3)
    home, network = tmp_path_factory.mktemp("backbones"), Tiny(0).eval()
    note = json.dumps({"mean": MEAN, "std": STD, "size": 40})
    example = torch.zeros(1, 3, 40, 40)
    traced = torch.jit.trace(network, example)  # type: ignore[no-untyped-call]
    torch.jit.save(traced, home / "net.pt", _extra_files={"preprocessing.json": note})  # type: ignore[no-untyped-call]
    torch.jit.save(traced, home / "plain.pt")  # type: ignore[no-untyped-call]
    torch.onnx.export(
        network, (example,), home / "net.onnx", dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "N"}}
    )
    written = onnx.load(home / "net.onnx")
    onnx.helper.set_model_props(written, {"preprocessing": note})
    onnx.save(written, home / "net.onnx")
    torch.save(network.state_dict(), home / "weights.pt")
    np.save(home / "wanted.npy", network(normalize_stain(pictures())).detach().numpy())
    return home


@pytest.mark.parametrize("name", ["net.pt", "net.onnx"])
def test_a_body_in_a_file_gives_what_the_network_gave(exported: Path, name: str) -> None:
    made = load_backbone(f"file:{exported / name}")
    with torch.inference_mode():
        first = made(pictures())
        assert np.allclose(first.numpy(), np.load(exported / "wanted.npy"), atol=1e-5)
        assert torch.equal(made(pictures()), first)  # no run is better optimised than another
        assert torch.equal(made(pictures()[:1])[0], first[0]) or torch.allclose(made(pictures()[:1])[0], first[0])
    assert (made.width, made.size) == (6, 40)
    assert list(trained_part(made, "head", 2).state_dict()) == ["1.weight", "1.bias"]


def test_a_file_is_known_by_its_content_and_by_what_is_done_to_pictures(exported: Path, tmp_path: Path) -> None:
    one = load_backbone(f"file:{exported / 'net.pt'}")
    (tmp_path / "copy.pt").write_bytes((exported / "net.pt").read_bytes())
    assert weights_fingerprint(load_backbone(f"file:{tmp_path / 'copy.pt'}")) == weights_fingerprint(one)
    plain = load_backbone(f"file:{exported / 'plain.pt'}")  # the same weights, other mean and size
    assert plain.size == 224
    assert weights_fingerprint(plain) != weights_fingerprint(one)


def test_files_that_cannot_be_bodies_are_named(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.onnx").write_text("no network")
    script = torch.jit.load(exported / "net.pt")  # type: ignore[no-untyped-call]
    torch.jit.save(script, tmp_path / "odd.pt", _extra_files={"preprocessing.json": '{"mean": [1, 2]}'})  # type: ignore[no-untyped-call]
    for path, why in [
        (exported / "weights.pt", "a file of weights is no network"),
        (tmp_path / "text.onnx", "cannot be used as a backbone in ONNX"),
        (tmp_path / "none.pt", "cannot read the backbone"),
        (tmp_path / "odd.pt", "for each of three colours"),
    ]:
        with pytest.raises(ConfigError, match=why):
            load_backbone(f"file:{path}")
    with pytest.raises(ConfigError, match="has its own; leave them out"):
        load_backbone(f"file:{exported / 'net.pt'}", "random")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"install mutirao\[onnx\]"):
        load_backbone(f"file:{exported / 'net.onnx'}")


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for label, name in enumerate(("abnormal", "normal")):
        (tmp_path / "cells" / name).mkdir(parents=True)
        for i in range(24):
            pixels = draw.normal(70 + 110 * label, 20, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "cells" / name / f"{i % 6}-{i}.png")
    return tmp_path / "cells"


def test_hospitals_train_a_head_on_a_body_from_a_file_and_the_run_screens(
    exported: Path, cells: Path, tmp_path: Path
) -> None:
    from mutirao.systems.cytology.trained import network_of_run

    name = f"file:{exported / 'net.pt'}"
    chosen = resolve(find("cytology").config, {"data": str(cells), "body": name, "rounds": 2, "views": 2})
    execute("cytology", chosen, tmp_path / "run")
    model = network_of_run(tmp_path / "run")
    assert model(np.zeros((64, 64, 3), np.uint8)).sum() == pytest.approx(1)
    for ending in (".pt", ".safetensors", ".onnx"):
        with pytest.raises(ConfigError, match="the backbone is an exported file"):
            save_model(model, tmp_path / f"m{ending}")


def test_a_file_that_is_run_needs_trust_where_a_configuration_from_elsewhere_names_it(
    exported: Path, cells: Path, tmp_path: Path
) -> None:
    assert dotted_in({"body": f"file:{exported}/net.onnx"}) == []
    assert dotted_in({"body": ["timm:resnet18", "timm:vit"]}) == []
    assert dotted_in({"select": "timm:resnet18"}) == ["timm:resnet18"]
    text = f'recipe = "cytology"\ndata = "{cells}"\nbody = "file:{exported}/net.pt"\nrounds = 1\n'
    (tmp_path / "theirs.toml").write_text(text)
    words = ["run", str(tmp_path / "theirs.toml"), "--out", str(tmp_path / "run")]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert f"names code to run: file:{exported}/net.pt" in refused.output
    assert CliRunner().invoke(main, [*words, "--trust"]).exit_code == 0


@pytest.mark.usefixtures("timm")
def test_what_cannot_be_trained_of_a_body_is_refused_before_the_first_round(exported: Path, cells: Path) -> None:
    recipe = find("cytology")
    for told, why in [
        ({"body": "resnet81"}, "'resnet81' is not a choice; did you mean 'resnet18'"),
        ({"body": "small"}, "'small' is not a choice"),
        ({"body": "timm:"}, "is not a choice"),
        ({"body": "timm:tiny", "trainable": "last_block"}, "use head or all"),
        ({"body": f"file:{exported}/net.pt", "trainable": "all"}, "stays as it is; use head"),
    ]:
        with pytest.raises(ConfigError, match=why):
            recipe.task(resolve(recipe.config, {"data": str(cells), **told}))


@pytest.mark.usefixtures("timm")
def test_a_body_that_is_trained_sees_pictures_drawn_anew_and_all_else_stays_as_it_is(cells: Path) -> None:
    from mutirao.randomness import rng
    from mutirao.systems.images.features import random_views
    from mutirao.systems.images.models import TrainingPlan

    def plan(**told: Any) -> TrainingPlan:
        return TrainingPlan.of(resolve(find("cytology").config, {"data": str(cells), "body": "timm:tiny", **told}))

    drawn = plan(trainable="all")
    assert (drawn.extract.views, drawn.transform) == (1, random_views)
    assert plan(trainable="all", views=1).transform is None
    assert plan().transform is None
    private = plan(trainable="all", privacy="dpsgd")
    assert (private.extract.views, private.transform) == (4, None)
    files = sorted(cells.glob("*/*.png"))[:3]
    x = torch.from_numpy(Extractor("timm:tiny", views=1, depth="pixels")(files))
    assert x.shape == (3, 1, 3, 40, 40)
    one, again, other = (random_views(x, rng(0, r, "transform", "client_1")) for r in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.shape == x.shape
    assert one.dtype == x.dtype
    assert (one.float().mean((1, 2, 3, 4)) - x.float().mean((1, 2, 3, 4))).abs().max() < 10
