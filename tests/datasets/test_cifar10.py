import builtins
import doctest
import io
import os
import pickle
import struct
from typing import ClassVar

import numpy as np
import pytest
import torch

from mutirao.datasets import cifar
from mutirao.datasets.generated import synthetic
from mutirao.errors import ConfigError
from mutirao.systems.images.networks import NETWORKS, Normalize
from mutirao.training.optimizers import one_thread, seeded

FILES = (*cifar.TRAIN_FILES, cifar.TEST_FILE)
EACH = 20


def some_data(seed=0):
    draw = np.random.default_rng(seed)
    return {f: (draw.integers(0, 256, (EACH, 3072), np.uint8), draw.integers(0, 10, EACH)) for f in FILES}


class Python2Pickler(pickle._Pickler):
    """Writes byte strings as Python 2 did, which is how the published files are written."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_str2(self, value):
        self.write(
            b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
        )
        self.memoize(value)

    dispatch[bytes] = save_str2


def python2(value):
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(value)
    # An array's type is text in Python 3 and was a byte string in Python 2; the module has moved since.
    content = out.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    return content.replace(b"X\x02\x00\x00\x00u1", b"U\x02u1").replace(b"X\x01\x00\x00\x00|", b"U\x01|")


def write_binary(folder, data):
    folder.mkdir(parents=True)
    for name, (x, y) in data.items():
        (folder / f"{name}.bin").write_bytes(np.concatenate([y[:, None].astype(np.uint8), x], axis=1).tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(cifar.CIFAR10_CLASSES) + "\n\n")


def write_pickles(folder, data, dump=python2):
    folder.mkdir(parents=True)
    for name, (x, y) in data.items():
        table = {b"batch_label": b"batch", b"labels": y.tolist(), b"data": x, b"filenames": [b"a.png"] * len(y)}
        (folder / name).write_bytes(dump(table))
    meta = {
        b"num_cases_per_batch": 10000,
        b"label_names": [n.encode() for n in cifar.CIFAR10_CLASSES],
        b"num_vis": 3072,
    }
    (folder / "batches.meta").write_bytes(dump(meta))


@pytest.fixture
def binary(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    write_binary(folder, some_data())
    return folder


@pytest.fixture
def pickles(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write_pickles(folder, some_data())
    return folder


def test_the_examples_in_the_docs_are_true():
    result = doctest.testmod(cifar, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_binary_version_is_read_as_it_was_written(binary):
    found = cifar.read_cifar10(binary)
    written = some_data()
    assert found.x_train.dtype == found.x_test.dtype == np.uint8
    assert found.y_train.dtype == found.y_test.dtype == np.int64
    assert found.x_train.shape == (5 * EACH, 3, 32, 32)
    assert found.names == cifar.CIFAR10_CLASSES
    x, y = written["data_batch_2"]
    assert np.array_equal(found.x_train[EACH + 3, 1, 2, 5], x[3, 1024 + 2 * 32 + 5])  # red, green, blue planes; rows
    assert np.array_equal(found.y_train[EACH : 2 * EACH], y)
    assert np.array_equal(found.x_test.reshape(EACH, 3072), written["test_batch"][0])


def test_a_python_2_pickle_looks_like_the_published_ones(pickles):
    content = (pickles / "data_batch_1").read_bytes()
    assert content.startswith(b"\x80\x02}q")
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in content
    assert b"_codecs" not in content


@pytest.mark.parametrize(
    "dump",
    [
        python2,
        lambda v: pickle.dumps(v, 2),
        lambda v: pickle.dumps(v, 4),
        lambda v: pickle.dumps(v, 5),
        lambda v: pickle.dumps({k.decode(): w for k, w in v.items()}),
    ],
    ids=["python2", "2", "4", "5", "text"],
)
def test_both_versions_give_equal_arrays_from_the_folder_and_from_the_one_above(tmp_path, dump):
    write_binary(tmp_path / "a" / "cifar-10-batches-bin", some_data())
    write_pickles(tmp_path / "b" / "cifar-10-batches-py", some_data(), dump)
    first = cifar.read_cifar10(tmp_path / "a")
    paths = [tmp_path / "a" / "cifar-10-batches-bin", tmp_path / "b", str(tmp_path / "b" / "cifar-10-batches-py")]
    for path in paths:
        other = cifar.read_cifar10(path)
        for one, two in zip(first[:4], other[:4], strict=True):
            assert one.dtype == two.dtype
            assert np.array_equal(one, two)
        assert first.names == other.names


def test_columns_first_and_names_left_out(tmp_path):
    data = some_data()
    write_pickles(tmp_path / "p", {k: (np.asfortranarray(x), y) for k, (x, y) in data.items()})
    (tmp_path / "p" / "batches.meta").unlink()
    found = cifar.read_cifar10(tmp_path / "p")
    assert np.array_equal(found.x_test.reshape(EACH, -1), data["test_batch"][0])
    assert found.names == cifar.CIFAR10_CLASSES


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "data_batch_3.bin").unlink(), r"data_batch_3\.bin is missing"),
        (lambda f: (f / "test_batch.bin").write_bytes(b"x" * 3000), r"test_batch\.bin has 3,000 bytes.*truncated"),
        (lambda f: (f / "test_batch.bin").write_bytes(b""), r"test_batch\.bin holds no images"),
        (lambda f: (f / "data_batch_1.bin").write_bytes(b"\x0b" * 3073), r"data_batch_1\.bin has a label 11.*0 to 9"),
        (lambda f: (f / "batches.meta.txt").write_text("cat dog"), r"batches\.meta\.txt lists 2 classes"),
    ],
)
def test_damage_to_the_binary_version_is_named(binary, spoil, says):
    spoil(binary)
    with pytest.raises(ConfigError, match=says) as caught:
        cifar.read_cifar10(binary)
    assert "\n" not in str(caught.value)


def table(**changes):
    x, y = some_data()["test_batch"]
    return {b"data": x, b"labels": y.tolist()} | {k.encode(): v for k, v in changes.items()}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"not a pickle", "truncated, or not|refused"),
        (python2(table())[:-3000], "truncated"),
        (python2([1, 2]), "holds a list"),
        (python2(table(data=3)), "no 'data'"),
        (python2(table(data=np.zeros((EACH, 10), np.uint8))), "no 'data'"),
        (python2(table(labels=[300] * EACH)), "no 'labels'"),
        (python2(table(labels=[10] * EACH)), "has a label 10"),
        (python2(table(labels=["x"] * EACH)), "no 'labels'"),
        (python2(table(labels=[1, 2])), "20 images but 2 labels"),
        (pickle.dumps(table(data=np.zeros((EACH, 3072)))), "refused.*array of 'f8'"),
        (pickle.dumps(table(data=np.array([[print]]))), "refused"),
    ],
)
def test_damage_to_the_python_version_is_named(pickles, content, says):
    (pickles / "test_batch").write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        cifar.read_cifar10(pickles)
    assert str(pickles / "test_batch") in str(caught.value)
    assert "\n" not in str(caught.value)


class Calls:
    def __init__(self, function, *values):
        self.function, self.values = function, values

    def __reduce__(self):
        return self.function, self.values


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_cannot_run_code(pickles, tmp_path, protocol):
    mark = tmp_path / "was here"
    plain = Calls(os.system, f"touch '{mark}'")
    nested = Calls(builtins.exec, f"open({str(mark)!r}, 'w')")
    for attack in (plain, nested, Calls(builtins.getattr, "", "join"), Calls(np.load, str(mark))):
        for content in (attack, {b"data": attack, b"labels": [1]}, [attack]):
            blob = pickle.dumps(content, protocol)
            (pickles / "data_batch_1").write_bytes(blob)
            with pytest.raises(ConfigError, match="data_batch_1 is refused"):
                cifar.read_cifar10(pickles)
    pickle.loads(pickle.dumps(plain, protocol))
    assert mark.exists()  # an ordinary unpickler would have run it


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cnumpy\nndarray\n((I99999999999\nttR.",  # a huge array
        b"cnumpy\ndtype\n(Vu1\nI0\nI1\ntR(I3\nV|\nNNNI-1\nI-1\nI63\ntb.",  # a type said to hold objects
        b"cnumpy.core.multiarray\n_reconstruct\n(cos\nsystem\n(I0\ntVb\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct.__globals__\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x10testing.runstring\x93.",
        b"Pid\n.",  # a persistent id
        b"\x82\x01.",  # an extension
        b"(inumpy\nload\n.",
    ],
)
def test_crafted_opcodes_end_in_one_line(pickles, opcodes):
    (pickles / "test_batch").write_bytes(opcodes)
    with pytest.raises(ConfigError, match="test_batch"):
        cifar.read_cifar10(pickles)


def test_a_pickle_cannot_change_the_functions_it_is_given(pickles):
    before = {k: dict(vars(f)) for k, f in cifar.ALLOWED.items() if not isinstance(f, type)}
    # GLOBAL, then BUILD with a dict for its attributes, then the same for its slots
    blob = b"c_codecs\nencode\n(N}V__defaults__\n(Vx\nVlatin1\ntstb0cnumpy\ndtype\n}V__setstate__\nI1\nsb."
    (pickles / "test_batch").write_bytes(blob)
    with pytest.raises(ConfigError):
        cifar.read_cifar10(pickles)
    assert cifar._encode.__defaults__ is None
    assert callable(cifar._Bytes.__setstate__)
    assert before == {k: dict(vars(f)) for k, f in cifar.ALLOWED.items() if not isinstance(f, type)}


def test_paths_that_are_not_the_data_set_say_what_would_be_right(tmp_path, binary):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name, says in [
        ("nowhere", "there is no folder"),
        ("cifar-10-binary.tar.gz", "is a file"),
        ("empty", "does not hold CIFAR-10"),
    ]:
        with pytest.raises(ConfigError, match=f"{says}.*cifar-10-batches-bin"):
            cifar.read_cifar10(tmp_path / name)


def test_a_smaller_set_in_the_same_format_is_read_with_a_warning(binary, caplog):
    cifar.read_cifar10(binary)
    assert len(caplog.messages) == 6
    assert "holds 20 images, the published file 10000" in caplog.messages[0]


def test_check_finds_counts_and_that_the_files_are_not_the_published_ones(binary, pickles):
    for folder, version in ((binary, "binary"), (pickles, "Python")):
        findings = "\n".join(cifar.check_cifar10(folder))
        assert f"the {version} version" in findings
        assert "100 training images of 3 x 32 x 32, 10 classes" in findings
        assert "20 test images" in findings
        assert "MD5 of the records differs from the published one: data_batch_1" in findings


def test_check_knows_the_published_files(binary, monkeypatch):
    import hashlib

    sums = {f: hashlib.md5((binary / f"{f}.bin").read_bytes()).hexdigest() for f in FILES}
    monkeypatch.setattr(cifar, "MD5", sums)
    assert cifar.check_cifar10(binary)[-1] == "MD5 of the records in all six files is as published"
    monkeypatch.setitem(sums, "data_batch_4", "0" * 32)
    assert cifar.check_cifar10(binary)[-1].endswith("one: data_batch_4.bin")


def test_the_real_set_is_as_published(real_data):
    if not (real_data / "cifar-10-batches-bin").is_dir():
        pytest.skip("MUTIRAO_DATA holds no cifar-10-batches-bin")
    assert cifar.check_cifar10(real_data)[-1] == "MD5 of the records in all six files is as published"
    found = cifar.read_cifar10(real_data)
    assert np.bincount(found.y_train).tolist() == [5000] * 10
    pixels = found.x_train[:, :, ::4, ::4].astype(np.float64) / 255
    assert pixels.mean((0, 2, 3)) == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.005)


def test_the_stand_in_has_equal_classes_and_depends_on_the_generator_alone():
    x, y = synthetic(1250, np.random.default_rng(1))
    again, _ = synthetic(1250, np.random.default_rng(1))
    other, _ = synthetic(1250, np.random.default_rng(2))
    assert x.shape == (1250, 3, 32, 32)
    assert np.bincount(y).tolist() == [125] * 10
    assert np.array_equal(x, again)
    assert not np.array_equal(x, other)
    assert len(np.unique(x.reshape(len(x), -1), axis=0)) == len(x)
    assert 60 < x.mean() < 190
    assert ((x == 0) | (x == 255)).mean() < 0.02
    with pytest.raises(ConfigError):
        synthetic(0, np.random.default_rng(0))


@pytest.mark.slow
def test_a_small_network_learns_the_stand_in_and_a_linear_model_does_not():
    x, y = map(torch.as_tensor, synthetic(4000, np.random.default_rng(1)))
    x_test, y_test = map(torch.as_tensor, synthetic(1000, np.random.default_rng(2)))

    def accuracy(make):
        order = np.random.default_rng(0)
        with one_thread(), seeded(0):
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            for _ in range(4):
                for batch in torch.from_numpy(order.permutation(len(y))).split(25):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                    optimizer.step()
            with torch.no_grad():
                return float((model(x_test).argmax(1) == y_test).float().mean())

    linear = accuracy(lambda: torch.nn.Sequential(Normalize(), torch.nn.Flatten(), torch.nn.Linear(3072, 10)))
    assert linear < 0.4
    found = accuracy(NETWORKS["small"])
    assert found > 0.8, found


@pytest.mark.parametrize(("name", "parameters"), [("cnn", 576_778), ("small", 62_006)])
def test_the_networks_take_bytes_and_carry_no_constants(name, parameters):
    model = NETWORKS[name]()
    x = torch.from_numpy(synthetic(3, np.random.default_rng(0))[0])
    assert model(x).shape == (3, 10)
    assert sum(v.numel() for v in model.state_dict().values()) == parameters


def test_normalise_brings_the_usual_mean_and_deviation_to_0_and_1():
    grey = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    grey[0, :, 0, 0] = 255
    found = Normalize()(grey)
    assert found.dtype == torch.float32
    assert found[0, :, 1, 1].tolist() == pytest.approx([-0.4914 / 0.2470, -0.4822 / 0.2435, -0.4465 / 0.2616])
    assert found[0, :, 0, 0].tolist() == pytest.approx(
        [(1 - 0.4914) / 0.2470, (1 - 0.4822) / 0.2435, (1 - 0.4465) / 0.2616]
    )
