"""Data of many kinds, dealt, dealt already, or with a column that says whose they are."""

import logging
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes, load_iris
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mutirao as mu
from mutirao.api.input_data import read_given
from mutirao.api.recipe import hold_back, join
from mutirao.errors import ConfigError
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import ClientData, Samples

pytestmark = pytest.mark.usefixtures("without_pictures")

X, Y = load_iris(return_X_y=True)
X = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
NAMES = np.array(["setosa", "versicolor", "virginica"])
FRAME = pd.DataFrame(X, columns=["a", "b", "c", "d"]).assign(kind=NAMES[Y], ward=np.arange(150) % 5)
SMALL: dict[str, Any] = {"per_round": 3, "rounds": 2}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model() -> nn.Module:
    return nn.Linear(4, 3)


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, i: int) -> Any:
        return X[i], int(Y[i])


COLUMNS = {**{c: FRAME[c].to_numpy() for c in "abcd"}, "kind": NAMES[Y]}
KINDS: dict[str, tuple[Any, str | None]] = {
    "pair": ((X, Y), None),
    "lists": ((X.tolist(), Y.tolist()), None),
    "from 1": ((X, Y + 1), None),
    "text": ((X, NAMES[Y]), None),
    "gaps": ((X, Y * 7 - 3), None),
    "int32 and float64": ((X.astype(np.float64), Y.astype(np.int32)), None),
    "TensorDataset": (TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), None),
    "Dataset": (Items(), None),
    "DataLoader": (DataLoader(Items(), batch_size=7), None),
    "columns": (COLUMNS, "kind"),
    "frame": (FRAME.drop(columns="ward"), "kind"),
    "Arrow": (pa.table(COLUMNS), "kind"),
}


@pytest.mark.slow
def test_all_kinds_of_data_make_the_same_run() -> None:
    digests = {
        kind: mu.run(model, data, target=target, clients=5, **SMALL).digest for kind, (data, target) in KINDS.items()
    }
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("kind", ["from 1", "text", "gaps", "frame"])
def test_labels_are_numbered_once_for_all_and_a_line_says_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mutirao")
    data, target = KINDS[kind]
    found = read_given(data, target, None, None)
    assert len(found.classes) == 3
    assert found.whole is not None
    assert found.whole.y.tolist() == Y.tolist()
    assert len([r for r in caplog.records if "labels are numbered" in r.message]) == 1


def test_clients_that_see_some_classes_number_them_as_the_others_do() -> None:
    held = {"a": (X[:100], NAMES[Y][:100]), "b": (X[100:], NAMES[Y][100:])}
    found = read_given(held, None, None, None)
    assert found.classes == tuple(NAMES)
    assert found.sets["b"][0].y.unique().tolist() == [2]


@pytest.mark.pictures
def test_a_column_names_the_client_of_each_row() -> None:
    result = mu.run(model, FRAME, target="kind", client="ward", **SMALL)
    assert set(result.clients["client"]) <= {0, 1, 2, 3, 4} | set("01234")
    table = tomllib.loads((result.folder / "config.toml").read_text())
    assert (table["clients"], table["partition"]["name"]) == (5, "dealt")
    by_hand = {str(w): (X[FRAME.ward == w], NAMES[Y][FRAME.ward == w]) for w in range(5)}
    assert mu.run(model, by_hand, **SMALL).digest == result.digest
    assert mu.run(model, pa.Table.from_pandas(FRAME), target="kind", client="ward", **SMALL).digest == result.digest
    assert (result.folder / "partition.png").exists()
    for keywords, said in (
        ({"client": "wrad"}, "client='wrad': there is no such column; did you mean 'ward'?"),
        ({"client": "ward", "clients": 3}, "clients: the data are already assigned to 5 clients; leave it out"),
        ({"client": "ward", "partition": "iid"}, "partition: the data are already assigned to 5 clients; leave it out"),
    ):
        with pytest.raises(ConfigError) as caught:
            mu.run(model, FRAME, target="kind", **keywords)  # type: ignore[arg-type]
        assert said in str(caught.value)


def test_clients_bring_their_own_tests_or_keep_a_share_back() -> None:
    thirds = np.arange(150) % 3
    sets = {f"c{i}": (X[thirds == i], Y[thirds == i]) for i in range(3)}
    both = {name: ((x[:40], y[:40]), (x[40:], y[40:])) for name, (x, y) in sets.items()}
    told = {name: ClientData(Samples(*a), Samples(*b)) for name, (a, b) in both.items()}
    digests = [mu.run(model, data, rounds=2, clients_every=1) for data in (both, told)]
    assert digests[0].digest == digests[1].digest
    assert "accuracy_worst" in digests[0].final
    judged = np.concatenate([x[40:] for x, _ in sets.values()]), np.concatenate([y[40:] for _, y in sets.values()])
    trained = {name: a for name, (a, _) in both.items()}
    assert mu.run(model, trained, test=judged, rounds=2).final["accuracy"] == digests[0].final["accuracy"]
    shares = mu.run(model, sets, test=0.5, rounds=2)
    assert set(shares.clients["n"]) == {25}


def test_numbers_are_learnt_by_their_squared_error() -> None:
    x, y = load_diabetes(return_X_y=True)
    x, y = (x / x.std(0)).astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)
    result = mu.run(lambda: nn.Linear(10, 1), (x, y), clients=5, rounds=15, lr=0.05)
    assert result.best["r2"] > 0.35  # of all rows, least squares have 0.52; broadcasting (n, 1) with (n,) would have 0
    assert {"rmse", "mae", "r2", "loss"} <= result.final.keys()
    assert result.best["rmse"] == min(result.history["rmse"])
    table = tomllib.loads((result.folder / "config.toml").read_text())
    assert (table["loss"], table["partition"]["name"]) == ("squared_error", "iid")
    assert result.final["loss"] == pytest.approx(result.final["rmse"] ** 2, rel=1e-5)


def test_pooled_data_are_the_reference() -> None:
    for data, keywords in ((KINDS["pair"][0], {"clients": 5}), (FRAME, {"target": "kind", "client": "ward"})):
        result = mu.run(model, data, rounds=2, centralised=True, **keywords)  # type: ignore[arg-type]
        assert set(result.clients["client"]) == {"pooled"}


def test_what_is_known_by_digest_changes_with_every_number() -> None:
    def told(data: Any, **more: Any) -> str:
        return read_given(data, more.get("target"), more.get("client"), more.get("test")).summary

    x = X.copy()
    x[149, 3] = 9
    y = Y.copy()
    y[149] = 0
    mine = told((X, Y))
    assert mine == told((X.copy(), Y.copy()))
    others = [told((x, Y)), told((X, y)), told((X[:149], Y[:149])), told((X, Y), test=(X, Y)), told({"a": (X, Y)})]
    assert len({mine, *others}) == 6


@pytest.mark.parametrize(
    ("data", "keywords", "said"),
    [
        ({"a": (X, Y), "b": (X[:0], Y[:0])}, {}, "data: client 'b' has no samples"),
        ({"a": (X, Y), " ": (X, Y)}, {}, "data: ' ' cannot be the name of a client"),
        ({1: (X, Y), "1": (X, Y)}, {}, "data: the names of two clients are the same"),
        ({"a": (X, Y), "b": (X, NAMES[Y])}, {}, "data: some labels are text and some are numbers"),
        (FRAME, {"target": "kidn"}, "kidn"),
        (FRAME, {"target": "a"}, "'kind' is text"),
        ((X[:1], Y[:1]), {}, "one sample cannot be split"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(data: Any, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mu.run(model, data, **keywords)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@drawn(st.integers(2, 300), st.floats(0.001, 0.999), st.integers(0, 5))
def test_a_share_is_kept_back_and_nothing_is_lost(count: int, share: float, seed: int) -> None:
    rows = np.arange(count) * 3
    kept, back = hold_back(rows, share, np.random.default_rng(seed))
    assert sorted([*kept, *back]) == rows.tolist()
    assert len(back) == min(count - 1, max(1, round(share * count)))
    assert (np.diff(kept) > 0).all()
    assert (np.diff(back) > 0).all()


@drawn(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_sets_put_together_hold_the_samples_of_all(sizes: list[int], shared: bool) -> None:
    ends = np.cumsum(sizes)
    places = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    whole = Samples(X, Y)
    sets = [Samples(whole.x, whole.y, p) if shared else Samples(X[p], Y[p]) for p in places]
    joined = join(sets, "samples")
    x, y = joined.batch(slice(0, len(joined)))
    assert torch.equal(x, torch.from_numpy(X[: ends[-1]]))
    assert y.tolist() == Y[: ends[-1]].tolist()
    assert (joined.x is whole.x) == shared


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.a(left) + self.b(right)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_several_inputs_and_those_of_clients_go_in_as_one_would() -> None:
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    ways = [((x, x), y), ({"left": x, "right": x}, y), {"left": x, "right": x, "y": y}, TensorDataset(x, x, y)]
    assert len({mu.run(Two, data, clients=4, **SMALL).digest for data in ways}) == 1
    held = {f"c{i}": ({"left": x[i::2], "right": x[i::2]}, y[i::2]) for i in range(2)}
    assert mu.run(Two, held, rounds=2).final["accuracy"] > 0


class HubLike:
    """As much of a Hugging Face Dataset as is used; it notes the columns that are read whole."""

    column_names = ("pixels", "label")

    def __init__(self) -> None:
        self.read: list[str] = []

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self.read.append(key)
            return (X if key == "pixels" else Y).tolist()
        return {"pixels": X[key].tolist(), "label": Y[key].tolist()}


def test_of_a_hub_s_set_only_the_labels_are_looked_at_to_number_them() -> None:
    data = HubLike()
    digest = mu.run(model, data, target="label", clients=5, **SMALL).digest
    assert set(data.read) == {"label"}
    assert digest == mu.run(model, (X, Y), clients=5, **SMALL).digest


def test_clients_of_numbers_judge_by_a_share_of_the_test_set() -> None:
    y = X[:, 0] * 2
    result = mu.run(lambda: nn.Linear(4, 1), (X, y), clients=5, rounds=2, clients_every=1)
    assert result.final["rmse_worst"] >= result.final["rmse_mean"] > 0


@pytest.mark.parametrize("target", [None, "lable"])
def test_a_dict_of_columns_without_the_target_is_no_dict_of_clients(target: str | None) -> None:
    with pytest.raises(ConfigError, match=f"there is no column '{target or 'y'}' to learn; set target= to one of"):
        mu.run(model, {"x": X, "label": Y}, target=target)


def test_samples_that_are_read_when_needed_make_the_same_run() -> None:
    lazy = Samples.of(Items(), limit=500)  # bytes
    assert isinstance(lazy.x, LazyInputs)
    found = mu.run(model, lazy, clients=5, **SMALL)
    assert found.digest == mu.run(model, Items(), clients=5, **SMALL).digest
    summary = read_given(lazy, None, None, None).summary
    assert summary == read_given(Samples.of(Items(), limit=500), None, None, None).summary
    half = {"a": Samples.of(Items(), limit=500), "b": Samples.of(Items(), limit=500)}
    with pytest.raises(ConfigError, match="cannot be put together; give test= a set of its own"):
        mu.run(model, half, **SMALL)
    assert mu.run(model, half, test=(X, Y), rounds=2).final["accuracy"] > 0
