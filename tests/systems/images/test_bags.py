"""Whole slides as samples: attention against the formula, bags of unequal length, and how slides lie on disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mutirao.datasets.class_folders import read_image_folder
from mutirao.datasets.image_layouts import read_train_test
from mutirao.errors import ConfigError
from mutirao.systems.images.backbones import load_backbone
from mutirao.systems.images.bags import BagExtractor, Slides, concatenate_bags, gather_slides, pad_bags
from mutirao.systems.images.features import Extractor
from mutirao.systems.images.heads import POOLS, AttentionPool, WholeSlide, make_head, probabilities
from mutirao.training.samples import Samples


def drawn_bags(seed: int, width: int = 5) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(n, 1, width)).astype(np.float32) for n in draw.integers(1, 7, 4)]


def attention_written_out(head: AttentionPool, h: np.ndarray) -> np.ndarray:
    """Equation 9 of Ilse, Tomczak and Welling (2018), tile by tile."""
    w = {k: v.detach().numpy().astype(np.float64) for k, v in head.state_dict().items()}
    scores = []
    for tile in h.astype(np.float64):
        content = np.tanh(w["content.weight"] @ tile + w["content.bias"])
        gate = 1 / (1 + np.exp(-(w["gate.weight"] @ tile + w["gate.bias"])))
        scores.append((w["weigh.weight"] @ (content * gate)).item())
    raised = np.exp(np.array(scores) - max(scores))
    return raised / raised.sum()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_attention_is_the_papers_and_what_fills_up_does_not_count(seed: int) -> None:
    torch.manual_seed(seed)
    head = AttentionPool(5, 3, hidden=4).eval()
    torch.nn.init.normal_(head.classify.weight)
    bags = drawn_bags(seed)
    tiles, there = pad_bags(bags)
    found = head(torch.from_numpy(tiles), torch.from_numpy(there)).detach().numpy()
    spoilt = np.where(there[..., None, None], tiles, 7.5).astype(np.float32)
    again = head(torch.from_numpy(spoilt), torch.from_numpy(there)).detach().numpy()
    weight = head.classify.weight.detach().numpy().astype(np.float64)
    for i, bag in enumerate(bags):
        a = attention_written_out(head, bag[:, 0])
        expected = weight @ (a[:, None] * bag[:, 0]).sum(0)
        assert np.allclose(found[i], expected, atol=1e-6, rtol=1e-5)
        assert np.allclose(again[i], found[i], atol=1e-6)


@pytest.mark.parametrize("name", sorted(POOLS))
def test_a_bag_is_judged_alike_alone_and_among_longer_ones(name: str) -> None:
    torch.manual_seed(0)
    head = POOLS[name](5, 2).eval()
    torch.nn.init.normal_(head.classify.weight)
    bags = drawn_bags(3)
    together = probabilities(head, pad_bags(bags))
    alone = np.concatenate([probabilities(head, pad_bags([bag])) for bag in bags])
    assert np.allclose(together, alone, atol=1e-6)
    pooled = {"mean": lambda b: b.mean(0), "max": lambda b: b.max(0)}.get(name)
    if pooled:
        scores = [head.classify.weight.detach().numpy() @ pooled(bag[:, 0]) for bag in bags]
        expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        assert np.allclose(together, expected, atol=1e-5)
    tiles, there = (torch.from_numpy(a) for a in pad_bags(bags))
    attention = head.attention(tiles[:, :, 0], there).detach()
    assert torch.allclose(attention.sum(1), torch.ones(len(bags)))
    assert (attention[~there] == 0).all()


def test_in_training_each_tile_is_seen_in_one_of_its_views() -> None:
    head = POOLS["mean"](1, 2)
    tiles = torch.arange(3.0).reshape(1, 1, 3, 1).expand(200, 4, 3, 1)
    assert set(head.train().view(tiles).unique().tolist()) == {0.0, 1.0, 2.0}
    assert set(head.eval().view(tiles).unique().tolist()) == {0.0}


def test_bags_of_several_hospitals_are_joined() -> None:
    parts = [Samples(pad_bags(drawn_bags(seed)), np.arange(4)) for seed in (0, 1)]
    joined = concatenate_bags(parts)
    head = POOLS["mean"](5, 2).eval()
    torch.nn.init.normal_(head.classify.weight)
    apart = np.concatenate([probabilities(head, part.x) for part in parts])
    assert np.allclose(probabilities(head, joined.x), apart, atol=1e-6)
    assert joined.y.tolist() == [0, 1, 2, 3] * 2


def write_tiles(folder: Path, count: int, seed: int) -> None:
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    for i in range(count):
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{i}.png")


@pytest.fixture
def lying(tmp_path: Path) -> Path:
    """Four slides a class, CLASS/SLIDE/*.png; one of them as `mutirao slides tile` leaves it."""
    for c, name in enumerate(("abnormal", "normal")):
        for k in range(4):
            write_tiles(tmp_path / "set" / name / f"s{c}{k}", 2 + k, 10 * c + k)
    cut = tmp_path / "set" / "normal" / "s14"
    write_tiles(cut / "tiles", 3, 99)
    write_tiles(cut.parent / "preview", 1, 5)
    (cut.parent / "preview" / "0.png").rename(cut / "preview.png")
    (cut.parent / "preview").rmdir()
    (cut / "tiles.csv").write_text("tile,kept\n0.png,1\n1.png,0\n2.png,1\n")
    return tmp_path / "set"


def test_slides_in_folders_of_their_class_are_samples_and_dropped_tiles_are_not_theirs(lying: Path) -> None:
    slides = gather_slides(read_image_folder(lying, r"^(\d+)-"))
    assert dict(zip(slides.slides.tolist(), map(len, slides.tiles), strict=True)) == {
        "s00": 2, "s01": 3, "s02": 4, "s03": 5, "s10": 2, "s11": 3, "s12": 4, "s13": 5, "s14": 2,
    }  # fmt: skip
    assert slides.counts() == {"abnormal": 4, "normal": 5}
    train, test = read_train_test(lying, "", 0.25, seed=1, rows_of=gather_slides)
    assert isinstance(train, Slides)
    assert isinstance(test, Slides)
    assert not set(train.slides) & set(test.slides)
    assert len(train) + len(test) == 9
    assert set(test.labels.tolist()) == {0, 1}


def test_a_slide_of_two_classes_and_tiles_of_no_slide_are_refused_by_name(lying: Path) -> None:
    write_tiles(lying / "normal" / "s02", 1, 7)
    with pytest.raises(ConfigError, match="slide 's02' lies in 'abnormal' and in 'normal'; a slide has one class"):
        gather_slides(read_image_folder(lying))
    write_tiles(lying / "third", 1, 8)
    with pytest.raises(ConfigError, match=r"third/0.png and 0 more have no known slide"):
        gather_slides(read_image_folder(lying))


def test_a_slide_with_too_many_tiles_is_seen_by_some_of_them_drawn_once(
    lying: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slides = gather_slides(read_image_folder(lying))
    look = BagExtractor(Extractor(views=1, depth="pixels", size=8), 3, seed=4)
    tiles, there = look.inputs(slides)
    assert there.sum(1).tolist() == [2, 3, 3, 3, 2, 3, 3, 3, 2]
    assert np.array_equal(tiles, look.inputs(slides)[0])
    assert "slide s03: 3 of its 5 tiles are used, chosen at random" in caplog.text


def test_the_whole_network_judges_a_slide_as_the_head_does() -> None:
    frozen = load_backbone("efficientnet_lite0", "random")
    head = make_head("abmil", frozen, "head", 2)
    torch.nn.init.normal_(head.classify.weight)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 224, 224), np.uint8)
    found, attention = WholeSlide(frozen, head).eval()(torch.from_numpy(pixels))
    h = frozen(torch.from_numpy(pixels)).numpy()
    assert np.allclose(found.detach().numpy(), probabilities(head, pad_bags([h[:, None]])), atol=1e-6)
    assert np.allclose(attention.detach().numpy(), attention_written_out(head, h), atol=1e-6)
    with pytest.raises(ConfigError, match="trainable=all: head=abmil is trained on features of a frozen backbone"):
        make_head("abmil", frozen, "all", 2)
