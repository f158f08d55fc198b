"""The table of inputs: each trains to the same model as the plain pair, or says in one line why not."""

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.training.adapters import number_classes, renumber
from mutirao.training.inputs import call_model
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import ClientData, Samples, poison
from mutirao.training.trainer import Trainer

DRAW = np.random.default_rng(0)
N = 40
X = DRAW.normal(size=(N, 3)).astype(np.float32)
Y = DRAW.integers(0, 3, N)
WIDE = X.astype(np.float64)  # the same numbers
COLUMNS = {"a": WIDE[:, 0], "b": WIDE[:, 1], "c": WIDE[:, 2]}


class Items(Dataset[Any]):
    """A map-style Dataset of (x, y)."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return WIDE[i], int(Y[i])


class Dicts(Items):
    def __getitem__(self, i: int) -> Any:
        return {"a": WIDE[i, 0], "label": Y[i], "b": float(WIDE[i, 1]), "c": torch.tensor(WIDE[i, 2])}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class HuggingFace:
    """As much of its Dataset as people rely on: columns by name, rows as dicts, slices as dicts of lists."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.column_names, self.features = list(columns), dict.fromkeys(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | slice | str) -> Any:
        return self.columns[key] if isinstance(key, str) else {k: v[key] for k, v in self.columns.items()}


TABLE = {k: v.tolist() for k, v in COLUMNS.items()} | {"label": Y.tolist()}
ROWS = np.arange(N)[::-1].copy()

SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "pair": ((X, Y), {}),
    "pair of float64 and int32": ((WIDE, Y.astype(np.int32)), {}),
    "pair of lists": ((WIDE.tolist(), Y.tolist()), {}),
    "pair of tensors": ([torch.tensor(X), torch.tensor(Y)], {}),
    "pair of bytes as labels": ((X, Y.astype(np.uint8)), {}),
    "pair, other byte order": ((WIDE.astype(">f8"), Y.astype(">i2")), {}),
    "pair, backwards": ((X[::-1].copy()[::-1], Y[::-1].copy()[::-1]), {}),
    "pair of a frame and a series": ((pd.DataFrame(COLUMNS), pd.Series(Y)), {}),
    "TensorDataset": (TensorDataset(torch.tensor(X), torch.tensor(Y)), {}),
    "Dataset": (Items(), {}),
    "Dataset of dicts": (Dicts(), {"target": "label"}),
    "lazy Dataset": (Items(), {"limit": 100}),
    "lazy Dataset, nothing kept": (Items(), {"limit": 0}),
    "lazy Dataset of dicts": (Dicts(), {"target": "label", "limit": 100}),
    "Subset": (Subset(Subset(Items(), ROWS.tolist()), ROWS.tolist()), {}),
    "DataLoader": (DataLoader(Items(), batch_size=7, shuffle=True), {}),
    "DataLoader with a sampler": (DataLoader(Items(), sampler=SubsetRandomSampler(range(N))), {}),
    "dict": (COLUMNS | {"y": Y}, {}),
    "dict with a target": ({"label": Y.tolist()} | COLUMNS, {"target": "label"}),
    "pandas": (pd.DataFrame(TABLE), {"target": "label"}),
    "pandas, kept as objects": (pd.DataFrame(TABLE, dtype=object), {"target": "label"}),
    "pandas, nullable": (pd.DataFrame(TABLE).convert_dtypes(), {"target": "label"}),
    "polars": (pl.DataFrame(TABLE), {"target": "label"}),
    "Arrow": (pa.table(TABLE), {"target": "label"}),
    "Hugging Face": (HuggingFace(TABLE), {"target": "label"}),
    "lazy Hugging Face": (HuggingFace(TABLE), {"target": "label", "limit": 100}),
    "Samples": (Samples(X, Y), {}),
    "ClientData": (ClientData((X, Y), (X[:2], Y[:2])), {}),  # type: ignore[arg-type]
}


def trained(samples: Any, model: Any = lambda: nn.Linear(3, 3), **settings: Any) -> Reply:
    trainer = Trainer(model, batch_size=8, **settings)
    return trainer(Request("train", trainer.initial(0), {"seed": 1, "round": 1}), Site("ana", samples))


@pytest.mark.parametrize("name", SAME)
def test_each_way_to_hold_the_same_numbers_trains_the_same_model(name: str) -> None:
    data, more = SAME[name]
    samples = Samples.of(data, **more)
    assert samples.y.dtype is torch.int64
    assert isinstance(samples.x, LazyInputs) == ("limit" in more)
    assert digest(trained(samples).arrays) == digest(trained((X, Y)).arrays)


def test_models_are_judged_on_any_of_them_and_on_a_clients_test_data() -> None:
    trainer = Trainer(lambda: nn.Linear(3, 3))
    start = trainer.initial(0)
    wanted = trainer.evaluate(start, Samples(X, Y))
    for data in ((WIDE, Y), Items(), COLUMNS | {"y": Y}, ClientData((X[:3], Y[:3]), (X, Y))):  # type: ignore[arg-type]
        assert trainer.evaluate(start, data) == wanted


@pytest.mark.parametrize(
    ("labels", "kind"),
    [(Y == 1, torch.int64), (Y.astype(np.uint16), torch.int64), (WIDE[:, 0], torch.float32), (Y / 2, torch.float32)],
)
def test_labels_are_classes_or_numbers(labels: Any, kind: torch.dtype) -> None:
    assert Samples.of((X, labels)).y.dtype is kind
    assert Samples.of(pa.table({"a": WIDE[:, 0], "y": labels})).y.dtype is kind


def test_inputs_keep_their_whole_numbers_and_bytes_and_shorter_floats_become_float32() -> None:
    for given_, kept in (
        (np.uint8, torch.uint8),
        (np.int32, torch.int32),
        (np.bool_, torch.bool),
        (np.int64, torch.int64),
    ):
        assert Samples.of((np.ones((2, 3), given_), [0, 1])).x.dtype is kept
    assert Samples.of((X.astype(np.float16), Y)).x.dtype is torch.float32
    assert Samples.of((torch.tensor(X, dtype=torch.bfloat16), Y)).x.dtype is torch.float32
    assert Samples.of((np.ones((2, 3), np.uint16), [0, 1])).x.dtype is torch.int64


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "endless": (
        Endless(),
        {},
        "an? Endless has no length, so batches cannot be sampled from it; give a map-style Dataset",
    ),
    "loader of endless": (DataLoader(Endless()), {}, "has no length"),
    "generator": ((i for i in range(3)), {}, "a generator cannot be trained on; give a pair"),
    "list": ([1] * 201, {}, r"a list of 201 is not a pair \(x, y\); give a pair"),
    "array": (X, {}, "a ndarray cannot be trained on"),
    "nothing": (None, {}, "a NoneType cannot be trained on"),
    "no target": (pd.DataFrame(COLUMNS), {}, "no column 'y' to learn; set target= to one of: a, b, c"),
    "no target in a dict": (Dicts(), {}, "a sample has no 'y' to learn; set target= to one of: a, label, b, c"),
    "target alone": ({"y": Y}, {}, "no input column besides the target"),
    "text, pandas": (pd.DataFrame({"city": ["Rio"] * 2, "y": [0, 1]}), {}, "column 'city' is text, not numbers"),
    "text, polars": (pl.DataFrame({"city": ["Rio"] * 2, "y": [0, 1]}), {}, "column 'city' is text, not numbers"),
    "text, Arrow": (pa.table({"city": ["Rio"] * 2, "y": [0, 1]}), {}, "column 'city' is text, not numbers"),
    "category": (pd.DataFrame({"city": pd.Categorical(["a", "b"]), "y": [0, 1]}), {}, "column 'city' is text"),
    "dates": (pd.DataFrame({"day": pd.to_datetime(["2020-01-01"]), "y": [0]}), {}, "column 'day' is dates"),
    "text labels": ((X, ["a"] * N), {}, "y is text, not numbers; number the classes of all clients at once"),
    "text target": ({"a": [1, 2], "y": ["m", "f"]}, {}, "column 'y' is text.*number_classes"),
    "lengths": ((X, Y[:7]), {}, "40 rows of x and 7 of y do not belong together"),
    "lengths in a dict": (({"a": X, "b": X[:7]}, Y), {}, r"7 rows of x\['b'\] and 40 of y"),
    "lengths of columns": ({"a": [1], "b": [1, 2], "y": [1, 2]}, {}, "columns differ in length: a 1, b 2"),
    "ragged": (pa.table({"v": [[1.0, 2.0], [3.0]], "y": [0, 1]}), {}, r"column 'v': its rows differ in shape"),
    "ragged list": (([[1.0], [1.0, 2.0]], [0, 1]), {}, "x: its rows differ in shape"),
    "nested": (((X, (X, X)), Y), {}, r"x\[1\] is a tuple: inputs are tensors, a tuple or a dict of them, not nested"),
    "splits": ({"train": HuggingFace(TABLE), "y": Y}, {}, r"'train' holds a HuggingFace, not a column"),
    "complex": ((X * 1j, Y), {}, "x is complex, not numbers"),
    "objects": (([object()], [0]), {}, "x holds a object, not numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trained_on_is_one_line(name: str) -> None:
    data, more, line = WRONG[name]
    with pytest.raises(ValueError, match=line) as error:
        Samples.of(data, **more)
    assert "\n" not in str(error.value)


class Odd(Items):
    """One sample is not like the others."""

    def __init__(self, row: int, item: Any) -> None:
        self.row, self.item = row, item

    def __getitem__(self, i: int) -> Any:
        return self.item if i == self.row else super().__getitem__(i)


@pytest.mark.parametrize("limit", [1 << 30, 100])
def test_a_sample_unlike_the_first_is_named(limit: int) -> None:
    for item, line in (
        ((WIDE[0, :2], 1), r"sample 5 is float32 \[2\], and the first is float32 \[3\]"),
        ((np.ones(3, np.int64), 1), r"sample 5 is int64 \[3\], and the first is float32 \[3\]"),
        (((X[0], X[0]), 1), "a sample is a tuple of 2, and the first is one tensor"),
        ((X[0], [1, 2]), "labels: its rows differ in shape"),
        ("text", "a sample is a str, not"),
    ):
        with pytest.raises(ValueError, match=line):
            Samples.of(Odd(5, item), limit=limit)


def test_missing_values_are_left_for_the_check_before_the_first_round() -> None:
    frame = {"a": [1, None, 3], "y": [0, 1, 0]}
    for data in (pd.DataFrame(frame), pl.DataFrame(frame), pa.table(frame), pd.DataFrame(frame).convert_dtypes()):
        assert torch.isnan(Samples.of(data).x).flatten().tolist() == [False, True, False]


def test_a_dataset_is_read_once_and_its_own_labels_are_taken_if_they_are_those_of_its_samples() -> None:
    class Counted(Items):
        reads = 0
        targets: Any = Y.tolist()

        def __getitem__(self, i: int) -> Any:
            Counted.reads += 1
            return super().__getitem__(i)

    data = Counted()
    assert Samples.of(data).x is Samples.of(data).x
    assert Counted.reads == N + 1  # the first one tells the size
    Counted.reads = 0
    assert Samples.of(Counted(), limit=10).y.tolist() == Y.tolist()
    assert Counted.reads == 2
    data = Counted()
    data.targets = (Y + 1).tolist()  # such as classes from 1, which a transform of the labels brings to 0
    Counted.reads = 0
    assert Samples.of(data, limit=10).y.tolist() == Y.tolist()
    assert Counted.reads == N + 2


@pytest.mark.parametrize("limit", [1 << 30, 10])
def test_a_dataset_that_changed_or_was_copied_is_read_again_and_stays_fit_to_be_pickled(limit: int) -> None:
    data = Odd(5, (X[5], 0))
    before = Samples.of(data, limit=limit)
    copied, deep, packed = copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))
    copied.item = data.item = (X[5], 2)
    for changed, label in ((data, 2), (copied, 2), (deep, 0), (packed, 0)):
        samples = Samples.of(changed, limit=limit)
        assert int(samples.y[5]) == label
        assert samples.x is not before.x
        assert Samples.of(changed, limit=limit).x is samples.x
    assert int(before.y[5]) == 0


def test_a_dataset_without_a_length_is_refused() -> None:
    class Unmeasured(Dataset[Any]):
        def __getitem__(self, i: int) -> Any:
            return X[i], Y[i]

    with pytest.raises(ValueError, match="a Unmeasured has no length; give it __len__ and __getitem__"):
        Samples.of(Unmeasured())
    with pytest.raises(ValueError, match="a Subset is empty"):
        Samples.of(Subset(Items(), []))


def test_a_loader_whose_sampler_leaves_samples_out_gives_the_others() -> None:
    samples = Samples.of(DataLoader(Items(), sampler=SubsetRandomSampler([3, 5])))
    assert samples.x.tolist() == X[[3, 5]].tolist()


# Several inputs


class Both(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.one(a) + self.two(b)
        return out


class Whole(Both):
    """Takes them as they are given."""

    def forward(self, x: Any) -> Tensor:  # type: ignore[override]
        a, b = x.values() if isinstance(x, dict) else x
        return super().forward(a, b)


class Joined(nn.Module):
    """The same numbers in one tensor, which every engine takes."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.both(x[:, :3], x[:, 3:])
        return out


B = DRAW.normal(size=(N, 2)).astype(np.float32)


class Pairs(Items):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getitem__(self, i: int) -> Any:
        if self.kind == "flat":
            return X[i], B[i], Y[i]
        return ({"a": X[i], "b": B[i]} if self.kind == "dict" else (X[i], B[i])), Y[i]


SEVERAL: dict[str, Any] = {
    "tuple": ((X, B), Y),
    "dict": ({"a": X, "b": B}, Y),
    "columns": {"a": X, "b": B.tolist(), "y": Y},
    "TensorDataset": TensorDataset(torch.tensor(X), torch.tensor(B), torch.tensor(Y)),
    "Dataset of dicts": Pairs("dict"),
    "Dataset of tuples": Pairs("tuple"),
    "Dataset of triples": Pairs("flat"),
    "Arrow": pa.table({"a": X.tolist(), "b": B.tolist(), "y": Y}),
}
ENGINES = ("auto", "fused", "stacked", "threads", "plain")


def renamed(arrays: Arrays) -> Arrays:
    return {name.removeprefix("both."): array for name, array in arrays.items()}


@pytest.mark.parametrize("limit", [1 << 30, 64])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_inputs_train_are_judged_and_probed_as_one_tensor_would_be(name: str, limit: int) -> None:
    one = Trainer(Joined, batch_size=8, engine="plain")
    start, config = one.initial(0), {"seed": 1, "round": 1, "extras": "entropy,rms_loss,gradient_norm,squared_errors"}
    samples = Samples(np.concatenate([X, B], 1), Y)
    site = Site("ana", ClientData(samples, samples))
    wanted = [one(Request(do, start, config), site) for do in ("train", "evaluate", "probe")]
    held = Samples.of(SEVERAL[name], limit=limit)
    for model in (Both, Whole):
        several = Trainer(model, batch_size=8, engine="plain")
        got = [
            several(Request(do, renamed(start), config), Site("ana", ClientData(held, held)))
            for do in ("train", "evaluate", "probe")
        ]
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours.metrics == theirs.metrics
            assert digest(ours.arrays) == digest(renamed(theirs.arrays))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lazy", [False, True])
def test_several_inputs_go_every_way_with_the_plain_result(engine: str, lazy: bool) -> None:
    data = Samples.of(Pairs("dict"), limit=64) if lazy else Samples.of(({"a": X, "b": B}, Y))
    sites = {c: Site(c, Samples(data.x, data.y, np.arange(i, N, 3))) for i, c in enumerate("abc")}
    sites["d"] = Site("d", ({"a": X[:9], "b": B[:9]}, Y[:9]))  # a storage of its own
    trainer, plain = (Trainer(Both, batch_size=4, engine=e, workers=2) for e in (engine, "plain"))
    start = trainer.initial(0)
    for do in ("train", "probe"):
        requests = {c: Request(do, start, {"seed": 1, "round": 1, "extras": "rms_loss"}) for c in sites}
        got = trainer.many(requests, sites)
        for c, reply in got.items():
            assert not isinstance(reply, Failure)
            alone = plain(requests[c], sites[c])
            assert digest(reply.arrays) == digest(alone.arrays)
            assert reply.metrics == pytest.approx(alone.metrics, rel=1e-5)


def test_a_model_is_called_the_way_its_forward_reads() -> None:
    class Named(nn.Module):
        def forward(self, a: int, b: int = 5) -> Any:
            return "named", a, b

    class Any_(nn.Module):  # noqa: N801
        def forward(self, *given: Any, **named: Any) -> Any:
            return given, named

    class One(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    assert call_model(Named(), (1, 2)) == ("named", 1, 2)
    assert call_model(Named(), {"b": 1, "a": 2}) == ("named", 2, 1)
    assert call_model(Named(), {"a": 2}) == ("named", 2, 5)
    assert call_model(Named(), {"a": 2, "c": 3}) == ("named", {"a": 2, "c": 3}, 5)
    assert call_model(Any_(), {"a": 2}) == ((), {"a": 2})
    assert call_model(Any_(), (1, 2)) == ((1, 2), {})
    assert call_model(One(), (1, 2)) == (1, 2)
    assert call_model(One(), {"a": 2}) == {"a": 2}
    assert call_model(One(), {"x": 2}) == 2


def test_labels_of_several_inputs_can_be_flipped_by_a_liar() -> None:
    changed = poison(({"a": X, "b": B}, Y), lambda x, y: (x, 2 - y))
    x, y = Samples.of(changed).batch(slice(0, 3))
    assert y.tolist() == (2 - Y[:3]).tolist()
    assert x["b"].tolist() == B[:3].tolist()


# Classes by name


def test_classes_are_numbered_in_sorted_order_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mutirao")
    assert number_classes(np.array([0, 2, 1]), [1]) == ({0: 0, 1: 1, 2: 2}, ("0", "1", "2"))
    assert not caplog.records
    assert number_classes([3, 1], pd.Series([2])) == ({1: 0, 2: 1, 3: 2}, ("1", "2", "3"))
    assert number_classes(Y == 1) == ({False: 0, True: 1}, ("False", "True"))
    assert number_classes(pl.Series(["b", "a"])) == ({"a": 0, "b": 1}, ("a", "b"))
    assert number_classes(torch.tensor([5, 9])) == ({5: 0, 9: 1}, ("5", "9"))
    assert [r.getMessage() for r in caplog.records] == [
        "labels are numbered in sorted order: 1 is 0, 2 is 1, 3 is 2",
        "labels are numbered in sorted order: False is 0, True is 1",
        "labels are numbered in sorted order: a is 0, b is 1",
        "labels are numbered in sorted order: 5 is 0, 9 is 1",
    ]


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        ([], "no labels"),
        (["a", None], "label 1 is missing"),
        ([1.0, float("nan")], "label 1 is missing"),
        (np.array([1.0, np.nan]), "label 1 is missing"),
        ([1, "a"], "text and numbers at once"),
    ],
)
def test_labels_that_cannot_be_numbered_are_one_line(labels: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        number_classes(labels)


def test_text_in_one_client_and_numbers_in_another_cannot_be_numbered() -> None:
    with pytest.raises(ValueError, match="text and numbers at once"):
        number_classes(["a"], [1])
    with pytest.raises(ValueError, match="label 'c' is none of the classes a, b"):
        renumber(["a", "c"], {"a": 0, "b": 1})


@given(st.lists(st.lists(st.integers(-5, 5) | st.booleans(), min_size=1), min_size=1))
def test_numbered_labels_are_those_of_scikit_learn(clients: list[list[int]]) -> None:
    from sklearn.preprocessing import LabelEncoder

    every = [label for some in clients for label in some]
    numbers, names = number_classes(*clients)
    encoder = LabelEncoder().fit(np.array(every, int))
    assert len(names) == len(encoder.classes_)
    for some in clients:
        assert renumber(some, numbers).tolist() == encoder.transform(np.array(some, int)).tolist()
