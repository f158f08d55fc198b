"""Before the first round: what is wrong is one line, on the first client that has it, and nothing is spent or moved."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mutirao.config import Common
from mutirao.core.arrays import digest
from mutirao.core.exclusion import PopulationWithout
from mutirao.core.fleet import ClientId, Wrapper
from mutirao.core.parts import as_handler
from mutirao.errors import ConfigError
from mutirao.experiments.group_client import GroupMember
from mutirao.experiments.task import Recipe, Task, find
from mutirao.robustness.attacks import Attacked, LabelFlip
from mutirao.runs.execute import execute
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import ClientData, Samples, VirtualClients, poison, virtual_clients
from mutirao.training.trainer import Trainer

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(30, 4)).astype(np.float32)
Y = DRAW.integers(0, 3, 30)
Y[:6] = [0, 1, 2, 0, 1, 2]


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def check(population: Mapping[ClientId, Any], model: Any = linear, **settings: Any) -> None:
    trainer = Trainer(model, batch_size=8, **settings)
    trainer.check(trainer.initial(0), population)


def refusal(population: Any, model: Any = linear, **settings: Any) -> str:
    if not isinstance(population, Mapping):
        population = {"ana": (X, Y), "bia": population, "cai": population}
    with pytest.raises(ConfigError) as error:
        check(population, model, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def with_value(value: float, row: int = 7) -> Any:
    x = X.copy()
    x[row, 2] = value
    return x


def frozen() -> nn.Module:
    return nn.Linear(4, 3).requires_grad_(False)


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Unused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3].clone().requires_grad_()


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


def normal() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def single() -> nn.Module:
    return nn.Linear(4, 1)


def own_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, y, label_smoothing=0.1)


ONE, WEIGHT = {"model": single, "loss": functional.mse_loss}, torch.ones(3)
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (
        (X, Y + 1),
        {},
        "client bia: labels run from 1 to 3, and the model has 3 outputs, for labels 0 to 2; number the "
        "classes of all clients at once, from 0, with mutirao.number_classes, or give the model 4 outputs",
    ),
    (
        (X, Y - 1),
        {},
        "client bia: labels run from -1 to 1, and the model has 3 outputs, for labels 0 to 2; number the "
        "classes of all clients at once, from 0, with mutirao.number_classes",
    ),
    ((X, Y + 1), {"loss": nn.CrossEntropyLoss(weight=WEIGHT)}, "client bia: labels run from 1 to 3"),
    ((X, Y + 1), {"loss": own_loss}, "client bia: the loss does not take label 3: Target 3 is out of bounds"),
    ((X, Y - 1), {"loss": own_loss}, "client bia: the loss does not take label -1: Target -1 is out of bounds"),
    ((with_value(np.nan), Y), {}, "client bia: x holds NaN or infinity, first in sample 7; fill in or drop"),
    ((with_value(np.inf), Y), {}, "client bia: x holds NaN or infinity, first in sample 7"),
    ((X, with_value(np.nan)[:, 2]), ONE, "client bia: y holds NaN or infinity, first in sample 7"),
    (({"input": with_value(-np.inf)}, Y), {}, "client bia: x['input'] holds NaN or infinity, first in sample 7"),
    ((X[:0], Y[:0]), {}, "client bia: has no samples to train on; give it more, or leave it out with exclude=bia"),
    ((X[:1], Y[:1]), {"model": normal}, "client bia: has one sample, and batch normalisation needs two"),
    ((X, Y[:9]), {}, "client bia: 30 rows of x and 9 of y do not belong together"),
    ((X, ["a"] * 30), {}, "client bia: y is text, not numbers; number the classes"),
    (
        (X[:, :3], Y),
        {},
        "client bia: the model does not take its inputs, float32 [8, 3]: mat1 and mat2 shapes cannot be "
        "multiplied (8x3 and 4x3); its first layer and a sample should agree in shape",
    ),
    (((X * 9).astype(np.uint8), Y), {}, "client bia: the model does not take its inputs, uint8 [8, 4]: "),
    (
        {"ana": (X, Y)},
        {"loss": functional.mse_loss},
        "client ana: the loss does not take outputs float32 [8, 3] and labels int64 [8]: ",
    ),
    (
        {"ana": (X, X[:, 0])},
        ONE,
        "client ana: the loss does not take outputs float32 [8, 1] and labels float32 [8]: Using a "
        "target size (torch.Size([8])) that is different to the input size (torch.Size([8, 1]))",
    ),
    ({"ana": (X, X[:, 0])}, {}, "client ana: the loss does not take outputs float32 [8, 3] and labels float32 [8]: "),
    (
        {"ana": (X, Y)},
        {"loss": lambda o, y: functional.cross_entropy(o, y, reduction="none")},
        "client ana: the loss of a "
        "batch is float32 [8], not one number; it should be a mean over samples (reduction='mean')",
    ),
    ({"ana": (X, Y)}, {"loss": lambda o, y: 3.0}, "client ana: the loss of a batch is float, not one number"),
    ({"ana": (X, Y)}, {"loss": lambda o, y: o.mean() / 0}, "client ana: the loss of a first batch is "),
    (
        {"ana": (X, Y)},
        {"loss": lambda o, y: (o - o).square().sum().sqrt()},
        "client ana: the gradient of a first batch is not",
    ),
    ({"ana": (X, Y)}, {"model": lambda: Detached(4, 3)}, "client ana: the loss has no gradient: nothing"),
    ({"ana": (X, Y)}, {"model": lambda: Unused(4, 3)}, "client ana: the loss does not depend on any weight"),
    (
        {"ana": (X, Y)},
        {"model": frozen},
        "the model has no parameter with requires_grad, so nothing can be trained",
    ),
    ({"ana": (X, Y)}, {"model": nn.Flatten}, "the model has no parameter with requires_grad"),
    ({"ana": (X, Y)}, {"model": lambda: Pair(4, 3)}, "client ana: the model gives a dict where classes need a tensor"),
    (
        {"ana": (X, Y)},
        {"model": lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))},
        "client ana: the model does not",
    ),
    ({"ana": ClientData((X, Y), (X, Y + 1))}, {}, "client ana: in its test data labels run from 1 to 3"),
    ({"ana": ClientData((X, Y), (with_value(np.nan), Y))}, {}, "client ana: in its test data x holds NaN"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_is_wrong_is_one_line_that_names_the_first_client_that_has_it(case: int) -> None:
    population, settings, line = WRONG[case]
    assert refusal(population, **settings).startswith(line)


def test_the_first_client_is_the_first_by_name_whatever_is_wrong_with_others() -> None:
    population = {"cai": (X[:0], Y[:0]), "bia": (with_value(np.nan), Y), "ana": (X, Y), "davi": (X, Y[:0])}
    assert refusal({**population, "davi": (X, Y)}).startswith("client bia: x holds NaN")
    assert refusal(PopulationWithout({**population, "davi": (X, Y)}, ["bia"])).startswith("client cai: has no samples")


SOUND: list[tuple[Any, dict[str, Any]]] = [
    ((X, Y), {}),
    ((X[:1], Y[:1]), {}),
    ((X, Y), {"model": normal}),
    ((X, np.where(Y == 1, -100, Y)), {}),  # which torch leaves out
    ((X, X[:, :1]), ONE),
    ((X, Y), {"loss": own_loss}),
    (
        (torch.tensor([[1, 2], [3, 4]]), [0, 1]),
        {"model": lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))},
    ),
    (
        (X.reshape(30, 4, 1).repeat(5, 2), Y[:, None].repeat(5, 1)),
        {"model": lambda: nn.Conv1d(4, 5, 1)},
    ),  # a class each
]


@pytest.mark.parametrize("case", range(len(SOUND)))
def test_what_is_sound_is_not_refused(case: int) -> None:
    data, settings = SOUND[case]
    check({"ana": data, "bia": data}, **settings)


@given(st.integers(0, 29), st.permutations(range(30)), st.lists(st.integers(0, 30), min_size=3, max_size=3))
def test_the_owner_of_a_row_is_found_as_if_clients_were_looked_at_one_by_one(
    row: int, order: list[int], ends: list[int]
) -> None:
    x = X.copy()
    x[row] = np.nan
    cuts = [0, *sorted(ends)]
    parts = [np.array(order[a:b], np.intp) for a, b in itertools.pairwise(cuts)]
    bad = [i for i, part in enumerate(parts) if len(part) == 0 or row in part]
    population = virtual_clients(x, Y, parts)
    if not bad:
        return check(population)
    why = (
        "has no samples"
        if len(parts[bad[0]]) == 0
        else f"x holds NaN or infinity, first in sample {list(parts[bad[0]]).index(row)}"
    )
    assert refusal(population).startswith(f"client c{bad[0]}: {why}")
    return None


def test_rows_that_nobody_owns_and_clients_that_are_excluded_do_not_matter() -> None:
    x = with_value(np.nan, row=29)
    check(virtual_clients(x, Y, [np.arange(10), np.arange(10, 20)]))
    check(PopulationWithout(virtual_clients(x, Y, [np.arange(10), np.arange(10, 30)]), ["c1"]))
    clients = virtual_clients(
        X, Y, [np.arange(5), np.arange(5, 9)], test=Samples(x, Y), tests=[np.arange(3), np.array([4, 29])]
    )
    assert refusal(clients).startswith("client c1: in its test data x holds NaN or infinity, first in sample 1")


class OnAccess(Mapping[ClientId, Any]):
    """Clients whose data are made on access, and counted."""

    def __init__(self, made: dict[ClientId, Any]) -> None:
        self.made, self.asked = made, list[ClientId]()

    def __getitem__(self, name: ClientId) -> Any:
        self.asked.append(name)
        if isinstance(self.made[name], Exception):
            raise self.made[name]
        return self.made[name]

    def __len__(self) -> int:
        return len(self.made)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.made)


def test_of_data_made_on_access_only_the_first_clients_are_looked_at() -> None:
    population = OnAccess({"bia": (with_value(np.nan), Y), "ana": (X, Y)})
    check(population)
    assert population.asked == ["ana"]
    assert refusal(PopulationWithout(OnAccess(population.made), ["ana"])).startswith("client bia: x holds NaN")
    check(OnAccess({"ana": OSError("gone"), "bia": (X, Y)}))  # its own failure, when it is asked


class Items:
    """Twenty samples, of which some are not a number."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.reads = bad, 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return (X[i] * np.nan if i in self.bad else X[i]), Y[i]


def test_of_lazy_samples_first_batches_are_looked_at() -> None:
    data = Items(13)
    whole = Samples.of(data, limit=16)
    parts = [np.arange(4), np.arange(4, 8), np.arange(8, 16), np.arange(16, 20)]
    assert refusal(virtual_clients(whole.x, whole.y, parts)).startswith(
        "client c2: x holds NaN or infinity among its first"
    )
    data.reads = 0
    check(virtual_clients(whole.x, whole.y, parts[:2] + parts[3:]))
    assert data.reads <= 12
    assert refusal({"ana": Samples(whole.x, Y[:20] + 1)}).startswith("client ana: labels run from 1 to 3")


def test_nothing_is_moved_by_it() -> None:
    trainer = Trainer(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)), batch_size=8
    )
    population = virtual_clients(X, Y, [np.arange(10), np.arange(10, 30)])
    arrays = trainer.initial(0)
    before, state = copy.deepcopy(arrays), torch.get_rng_state()
    spare = trainer.fill(arrays)
    held = copy.deepcopy(spare.state_dict())
    trainer.check(arrays, population)
    assert digest(arrays) == digest(before)
    assert torch.equal(state, torch.get_rng_state())
    assert trainer.thread_module() is spare
    assert all(torch.equal(held[k], v) for k, v in spare.state_dict().items())
    assert all(p.grad is None for p in spare.parameters())
    assert population.x.numpy().tobytes() == X.tobytes()


def rooms(population: Mapping[ClientId, Any], **more: Any) -> Recipe:
    def task(config: Common) -> Task:
        trainer = Trainer.of(config, linear)
        return Task(trainer, population, lambda: trainer.initial(config.seed), **more)

    return Recipe(Common, task)


SETTINGS = {"rounds": 1, "clients": 2, "per_round": 2}


@pytest.mark.parametrize("privacy", [{}, {"privacy": "dpsgd"}, {"privacy": "local"}, {"secure": "secagg+"}])
def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, privacy: dict[str, str]) -> None:
    if "privacy" in privacy:
        pytest.importorskip("opacus")
    recipe = rooms({"ana": (X, Y), "bia": (X, Y + 1), "cai": (X, Y)})
    with pytest.raises(ConfigError, match="client bia: labels run from 1 to 3"):
        execute(recipe, SETTINGS | privacy, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_looked_at_when_it_goes_on_and_fleets_elsewhere_are_not(tmp_path: Path) -> None:
    population = {"ana": Samples(X, Y), "bia": Samples(X.copy(), Y)}
    recipe = rooms(population)
    execute(recipe, SETTINGS, tmp_path / "run")
    population["bia"].x[3, 3] = torch.nan
    files = sorted(p.name for p in (tmp_path / "run").iterdir())
    with pytest.raises(ConfigError, match="client bia: x holds NaN"):
        execute(recipe, {**SETTINGS, "rounds": 2}, tmp_path / "run", resume=True)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == files
    task = recipe.prepare(recipe.config(**SETTINGS))  # type: ignore[arg-type]
    elsewhere = Wrapper(LocalFleet(task.handler, {"ana": (X, Y), "bia": (X, Y)}))
    execute(recipe, SETTINGS, tmp_path / "other", fleet=elsewhere)  # whose data are not these


def test_whoever_wraps_a_trainer_passes_the_check_on() -> None:
    population = {"ana": (X, Y), "bia": (X, Y + 1)}
    trainer = Trainer(linear)
    attacked = Attacked(trainer, frozenset({"ana"}), LabelFlip(), poison)
    member = GroupMember(lambda outputs: trainer, 3, None, 1, "weight")
    for handler in (attacked, member):
        with pytest.raises(ConfigError, match="client bia: labels run from 1"):
            as_handler(handler).check(trainer.initial(0), population)
    as_handler(lambda request, site: None).check({}, {})  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("name", ["quickstart", "selection", "groups"])
def test_recipes_have_it(name: str) -> None:
    recipe = find(name)
    task = recipe.prepare(recipe.config(clients=10, per_round=5))
    assert task.check is not None
    task.check(task.initial(), task.population)
    population = dict(task.population)
    first = min(population)
    train = Samples.of(population[first])
    population[first] = replace(population[first], train=Samples(train.x, train.y + 100, train.index))
    with pytest.raises(ConfigError, match=f"client {first}: labels run from 1"):
        task.check(task.initial(), population)


def test_a_million_clients_are_one_pass() -> None:
    count = 1_000_000
    order = np.arange(count, dtype=np.intp)
    y = np.zeros(count, np.int64)
    y[[5, 900_000]] = [7, 9]
    clients = VirtualClients(np.zeros((count, 4), np.float32), y, order, np.arange(count + 1))
    calls: list[Any] = []
    clients.__class__ = type("Counted", (VirtualClients,), {"__getitem__": lambda self, name: calls.append(name)})
    assert refusal(clients).startswith("client c000005: labels run from 7 to 7")
    assert calls == []
