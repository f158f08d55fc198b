"""Pictures in folders: what is found, split by slide, dealt to hospitals; features; figures against scikit-learn."""

import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn import metrics as sk

from mutirao.cli import main
from mutirao.datasets.class_folders import (
    ImageSet,
    UnreadableError,
    check_image_folder,
    picture,
    read_image_folder,
    refuse_shared,
    require_same_classes,
)
from mutirao.datasets.image_layouts import train_test_split
from mutirao.errors import ConfigError
from mutirao.systems.images import metrics
from mutirao.systems.images.features import Extractor, views_of
from mutirao.systems.images.image_sources import by_laboratory, by_slide, even, partition_images


def write_set(root: Path, counts: dict[str, int], slides: int = 6, seed: int = 0) -> None:
    """Small pictures named as Herlev's, a few slides shared by all classes."""
    draw = np.random.default_rng(seed)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{1000 + int(draw.integers(slides))}-{seed}-{i:03d}.png")


def test_what_cannot_be_used_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path, {"a": 30, "b": 20, "empty": 0})
    good = tmp_path / "a" / "1-x.jpeg"
    Image.new("RGB", (60, 60), "red").save(good)
    whole = good.read_bytes()
    (tmp_path / "a" / "2-cut.jpeg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b" / "3-zero.png").write_bytes(b"")
    (tmp_path / "b" / "4-text.jpg").write_text("no picture")
    (tmp_path / "b" / "notes.txt").write_text("not a picture, and not meant as one")
    locked = tmp_path / "b" / "5-locked.png"
    locked.write_bytes(whole)
    plain = Path.read_bytes

    def refused(self: Path) -> bytes:
        if self.name == locked.name:
            raise PermissionError(13, "Permission denied")
        return plain(self)

    monkeypatch.setattr(Path, "read_bytes", refused)
    with caplog.at_level(logging.WARNING):
        found = read_image_folder(tmp_path, r"^(\d+)-")
    assert found.counts() == {"a": 31, "b": 20, "empty": 0}
    assert {p.name for p, _ in found.unreadable} == {"2-cut.jpeg", "3-zero.png", "4-text.jpg", "5-locked.png"}
    assert "the class 'empty' has no usable pictures" in caplog.text
    assert "Permission denied" in caplog.text
    assert any(line.startswith("unreadable") for line in check_image_folder(tmp_path))


def test_folders_that_are_wrong_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_image_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no class folders"):
        read_image_folder(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        read_image_folder(tmp_path / "file")
    (tmp_path / "set" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no usable picture"):
        read_image_folder(tmp_path / "set")
    write_set(tmp_path / "good", {"a": 1})
    with pytest.raises(ConfigError, match="is not a regular expression"):
        read_image_folder(tmp_path / "good", "(")
    with pytest.raises(ConfigError, match="client_2 lacks b"):
        require_same_classes({"client_1": ["a", "b"], "client_2": ["a"]})


def test_no_slide_crosses_and_every_class_is_tested(tmp_path: Path) -> None:
    write_set(tmp_path, {"a": 60, "b": 40, "c": 30}, slides=25)
    found = read_image_folder(tmp_path, r"^(\d+)-")
    for seed in range(5):
        train, held = train_test_split(found, 0.2, seed)
        assert set(found.slides[train]).isdisjoint(found.slides[held])
        assert sorted([*train, *held]) == list(range(len(found)))
        assert set(found.labels[held]) == {0, 1, 2}
        assert 0.1 < len(held) / len(found) < 0.3


def test_no_slide_of_herlev_crosses(real_data: Path) -> None:
    found = read_image_folder(real_data / "herlev", r"^(\d+)-")
    assert len(found) == 917
    assert sorted(found.counts().values()) == [70, 74, 98, 146, 150, 182, 197]
    train, held = train_test_split(found, 0.2, 0)
    assert set(found.slides[train]).isdisjoint(found.slides[held])
    assert "" not in found.slides[held]  # who knows no slide is never in the test


def test_equal_pictures_stay_together_and_without_slides_there_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_set(tmp_path, {"a": 30, "b": 30}, slides=12)
    for i in range(8):  # the same picture under another slide's name
        source = sorted((tmp_path / "a").iterdir())[i]
        (tmp_path / "a" / f"{2000 + i}-copy.png").write_bytes(source.read_bytes())
    found = read_image_folder(tmp_path, r"^(\d+)-")
    train, held = train_test_split(found, 0.2, 1)
    refuse_shared(found.take(train), found.take(held))
    with caplog.at_level(logging.WARNING):
        train_test_split(read_image_folder(tmp_path), 0.2, 1)
    assert "no slide is known" in caplog.text


def test_slides_and_laboratories_from_a_table(tmp_path: Path) -> None:
    write_set(tmp_path / "set", {"a": 8, "b": 8})
    names = [p.relative_to(tmp_path / "set") for p in sorted((tmp_path / "set").glob("*/*"))]
    rows = [f"{n},s{i % 4},lab{i % 2}" for i, n in enumerate(names)]
    (tmp_path / "t.csv").write_text("file,slide,laboratory\n" + "\n".join(rows))
    found = read_image_folder(tmp_path / "set", str(tmp_path / "t.csv"))
    assert set(found.slides) == {"s0", "s1", "s2", "s3"}
    parts = partition_images(by_laboratory, found, 2, np.random.default_rng(0))
    assert [set(found.laboratories[p]) for p in parts] == [{"lab0"}, {"lab1"}]
    parts = partition_images(by_slide, found, 2, np.random.default_rng(0))
    assert set(found.slides[parts[0]]).isdisjoint(found.slides[parts[1]])
    with pytest.raises(ConfigError, match="laboratory is known"):
        partition_images(by_laboratory, read_image_folder(tmp_path / "set"), 2, np.random.default_rng(0))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=12, max_size=80), st.integers(1, 4), st.integers(0, 99))
def test_even_is_even_class_by_class(labels: list[int], clients: int, seed: int) -> None:
    y = np.array(labels)
    parts = even(y, clients, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts)) == list(range(len(y)))
    for c in np.unique(y):
        per = [int((y[p] == c).sum()) for p in parts]
        assert max(per) - min(per) <= 1


def test_prepare_writes_the_federation(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_set(source / "Training", {"a": 12, "b": 9})
    write_set(source / "Test", {"a": 4, "b": 4}, seed=1)
    words = ["data", "prepare", str(source), "--out", str(tmp_path / "out")]
    run = CliRunner().invoke(main, words)
    assert run.exit_code == 0, run.output
    counts = {p.name: len(list(p.glob("*/*"))) for p in (tmp_path / "out").iterdir()}
    assert counts == {"client_1": 7, "client_2": 7, "client_3": 7, "global_test": 8}
    assert {p.name for p in (tmp_path / "out" / "client_2").iterdir()} == {"a", "b"}
    assert "not empty" in CliRunner().invoke(main, words).output
    skewed = [*words[:-1], str(tmp_path / "skew"), "--partition", "dirichlet", "--alpha", "0.1"]
    assert CliRunner().invoke(main, skewed).exit_code == 0
    same = next((source / "Training" / "a").iterdir())
    (source / "Test" / "a" / "again.png").write_bytes(same.read_bytes())
    refused = CliRunner().invoke(main, [*words[:-1], str(tmp_path / "third")])
    assert refused.exit_code == 2
    assert "in training and in test" in refused.output
    (source / "Test" / "c").mkdir()
    differ = CliRunner().invoke(main, [*words[:-1], str(tmp_path / "fourth")])
    assert "Training lacks c" in differ.output
    assert not (tmp_path / "fourth").exists()


def test_features_are_cached_by_content_and_damage_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    write_set(tmp_path / "set", {"a": 2})
    files = sorted((tmp_path / "set" / "a").iterdir())
    extract = Extractor(weights="random", views=2)
    first = extract(files)
    assert first.shape == (2, 2, 320)
    assert not np.array_equal(first[0, 0], first[0, 1])
    kept = sorted((tmp_path / "cache").rglob("*.npy"))
    assert {p.stem for p in kept} == {hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    kept[0].write_bytes(b"damaged")
    files[0].rename(files[0].with_name("renamed.png"))
    moved = [files[0].with_name("renamed.png"), files[1]]
    again = Extractor(weights="random", views=2)
    calls: list[int] = []
    monkeypatch.setattr(Extractor, "of_pixels", lambda self, x: calls.append(1) or first[0])
    again(moved)
    assert len(calls) == 1  # only the damaged one
    maps = Extractor(weights="random", views=1, depth="pixels")(moved)
    assert maps.shape == (2, 1, 3, 224, 224)
    assert maps.dtype == np.uint8


def test_a_view_is_drawn_from_the_picture_alone(tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    one, other = views_of(image, "name", 4), views_of(image, "name", 3)
    assert np.array_equal(one[:3], other)
    with pytest.raises(UnreadableError, match="0 bytes"):
        picture(b"")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(10, 80), st.integers(2, 5))
def test_figures_against_scikit_learn(seed: int, n: int, classes: int) -> None:
    draw = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), draw.integers(0, classes, n)])
    p = draw.dirichlet(np.ones(classes), len(y)).round(2) + 1e-9
    p /= p.sum(1, keepdims=True)
    found = p.argmax(1)
    abnormal = np.arange(classes) > 0
    figures = metrics.screening_metrics(p, y, [f"c{i}" for i in range(classes)], abnormal)
    assert figures["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, found))
    assert figures["loss"] == pytest.approx(sk.log_loss(y, p, labels=range(classes)))
    score, positive = p[:, 1:].sum(1), y > 0
    assert figures["auc"] == pytest.approx(sk.roc_auc_score(positive, score))
    fpr, tpr, _ = sk.roc_curve(positive, score, drop_intermediate=False)
    assert figures["sensitivity@95"] == pytest.approx(tpr[fpr <= 0.05 + 1e-9].max())
    assert np.array_equal(metrics.confusion(y, found, classes), sk.confusion_matrix(y, found))
    sure, total = p.max(1), 0.0
    for b in range(15):
        here = (sure >= b / 15) & ((sure < (b + 1) / 15) | (b == 14))
        if here.any():
            total += here.mean() * abs((found == y)[here].mean() - sure[here].mean())
    assert figures["ece"] == pytest.approx(total, abs=1e-9)


def test_a_hospital_tells_what_it_can_say_under_names_that_all_know() -> None:
    classes, abnormal = ("light dysplastic", "normal"), np.array([True, False])
    outputs, y = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20) % 2
    p = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    whole, told = (
        metrics.screening_metrics(p, y, classes, abnormal),
        metrics.reported_metrics(classes, abnormal, outputs, y),
    )
    assert told == pytest.approx({k: v for k, v in whole.items() if not k.startswith("recall")})
    alone = metrics.reported_metrics(classes, abnormal, outputs, np.ones(20, int))
    assert alone.keys() == {"balanced_accuracy", "accuracy", "loss", "ece"}  # of one kind alone there is no AUC
    assert metrics.reported_metrics(classes, abnormal, outputs * np.nan, y) == {}


def test_the_interval_of_an_auc_covers_it_and_is_wider_over_slides() -> None:
    draw = np.random.default_rng(0)
    slide = np.repeat(np.arange(20), 10)
    positive = slide % 2 == 1
    score = positive + draw.normal(0, 1.5, 20)[slide] + draw.normal(0, 0.3, 200)
    wide = metrics.auc_interval(score, positive, slide, np.random.default_rng(1), draws=300)
    narrow = metrics.auc_interval(score, positive, np.arange(200), np.random.default_rng(1), draws=300)
    assert wide[0] < metrics.auc(score, positive) < wide[1]
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])


def test_taking_rows_keeps_all_columns_together(tmp_path: Path) -> None:
    write_set(tmp_path, {"a": 3, "b": 3})
    found = read_image_folder(tmp_path, r"^(\d+)-")
    part: ImageSet = found.take(np.array([4, 0]))
    assert part.files == (found.files[4], found.files[0])
    assert part.labels.tolist() == [1, 0]
    assert part.classes == ("a", "b")
