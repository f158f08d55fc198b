"""Only what is trained travels: which names that is, that nothing else moves, and that all have one frozen part."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loopgrid import LoopGrid, identity
from mutirao.aggregation import FedAvg
from mutirao.config import Common
from mutirao.core.agreement import agreement_config
from mutirao.core.arrays import Arrays, digest, flat, nbytes
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Run, train
from mutirao.deploy.flower.client import client_app
from mutirao.errors import ConfigError, Refused, TooFewReplies
from mutirao.experiments.task import Recipe, Task
from mutirao.flower.flower_fleet import FlowerFleet
from mutirao.privacy import DPSGD
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.optimizers import arrays_of, seeded
from mutirao.training.samples import ClientData, Samples
from mutirao.training.trainable_state import find_state_names
from mutirao.training.trainer import Trainer

__all__ = ["identity"]  # a fixture that holds for all tests here, too

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(240, 6)).astype(np.float32), DRAW.integers(0, 3, 240)
SITES = {f"c{i}": Site(f"c{i}", Samples(X[40 * i : 40 * i + 40], Y[40 * i : 40 * i + 40])) for i in range(6)}


class Transfer(nn.Module):
    """A frozen body with its normalisation, and a trained head with one of its own."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        with seeded(seed):
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8, affine=False))
        self.body.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def small() -> nn.Module:
    with seeded(7):
        body = nn.Linear(6, 8).requires_grad_(False)
    return nn.Sequential(body, nn.ReLU(), nn.Linear(8, 3))


def convolutional() -> nn.Module:
    with seeded(7):
        body = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 16, 3, padding=2), nn.BatchNorm2d(16))
    body.requires_grad_(False)
    return nn.Sequential(body, nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 20, 3))


def ask(trainer: Trainer, arrays: Arrays | None = None, do: str = "train") -> dict[str, Reply]:
    request = Request(do, trainer.initial(0) if arrays is None else arrays, {"seed": 0, "round": 1})
    answers = trainer.many(dict.fromkeys(SITES, request), SITES)
    replies = {c: r for c, r in answers.items() if isinstance(r, Reply)}
    assert len(replies) == len(SITES), answers
    return replies


def test_the_names_that_travel_are_what_is_trained_and_the_buffers_beside_it() -> None:
    found = find_state_names(Transfer())
    assert [n for n in found.shared if not n.startswith("head.")] == []
    assert {"head.1.running_mean", "head.1.num_batches_tracked", "head.0.weight"} <= set(found.shared)
    assert {"body.0.weight", "body.1.running_var", "body.3.running_mean"} <= set(found.frozen)
    assert found.frozen_modules == {"body.1", "body.3"}
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert find_state_names(plain).shared == tuple(plain.state_dict())


@pytest.mark.parametrize("engine", ["plain", "stacked", "threads", "auto"])
@pytest.mark.parametrize("model", [Transfer, small, convolutional])
def test_on_every_way_only_what_is_trained_comes_back_and_nothing_else_moves(
    engine: str, model: Callable[[], nn.Module]
) -> None:
    trainer, plain = (Trainer(model, epochs=2, batch_size=8, engine=e) for e in (engine, "plain"))
    before = digest(trainer.frozen())
    ours, theirs = ask(trainer), ask(plain)
    for client, reply in ours.items():
        assert tuple(reply.arrays) == trainer.state_names.shared
        np.testing.assert_allclose(flat(reply.arrays), flat(theirs[client].arrays), rtol=1e-3, atol=1e-4)
        assert reply.metrics == pytest.approx(theirs[client].metrics, rel=1e-3)
    assert digest(arrays_of(trainer.thread_module(), trainer.state_names.frozen)) == before


def test_training_is_that_of_torch_with_the_frozen_norms_in_evaluation_mode() -> None:
    trainer = Trainer(small, batch_size=40)
    start = trainer.initial(0)
    reply = ask(trainer, start)["c0"]
    model = small()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in start.items()}, strict=False)
    x, y = SITES["c0"].data.batch(slice(0, 40))
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    np.testing.assert_allclose(reply.arrays["2.weight"], model.state_dict()["2.weight"].numpy(), rtol=1e-5, atol=1e-6)


def test_evaluation_and_probes_use_the_whole_model() -> None:
    trainer = Trainer(Transfer)
    start = trainer.initial(0)
    model = trainer.fill(start).eval()
    samples = SITES["c0"].data
    x, y = samples.batch(slice(0, 40))
    with torch.inference_mode():
        wanted = float(nn.functional.cross_entropy(model(x), y))
    assert trainer.evaluate(start, samples)["loss"] == pytest.approx(wanted, rel=1e-6)
    assert ask(trainer, start, "probe")["c0"].metrics["loss"] == pytest.approx(wanted, rel=1e-5)
    held = {"c0": Site("c0", ClientData(samples, samples))}
    judged = trainer.many({"c0": Request("evaluate", start, {"seed": 0, "round": 1})}, held)["c0"]
    assert isinstance(judged, Reply)
    assert judged.metrics["loss"] == pytest.approx(wanted, rel=1e-5)


def test_the_seed_decides_what_is_trained_and_not_what_is_frozen() -> None:
    def drawn() -> nn.Module:  # a body that nobody has seeded
        return nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 3))

    first, second = Trainer(drawn), Trainer(drawn)
    assert digest(first.initial(0)) != digest(first.initial(1))
    assert first.agreed() == second.agreed() != Trainer(small).agreed()
    assert pickle.loads(pickle.dumps(Trainer(small))).agreed() == Trainer(small).agreed()
    instance = small()
    assert Trainer(lambda: copy.deepcopy(instance)).agreed() == Trainer(small).agreed()
    assert Trainer(lambda: nn.Linear(2, 2)).agreed() == {}


@pytest.mark.parametrize(
    ("share", "says"),
    [
        ("2.*, 5.weight", "share: '5.weight' matches none of the model's arrays: 0.weight, 0.bias, 2.weight, 2.bias"),
        ("2.weight", "share: '2.bias' is trained but not shared, so that its training is lost"),
        ("0.*", "share: '2.weight' is trained but not shared"),
    ],
)
def test_a_pattern_that_would_lose_something_is_refused_by_name(share: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(small, share=share).initial(0)


def test_patterns_say_what_else_travels_or_stays() -> None:
    assert tuple(Trainer(small, share="*").initial(0)) == tuple(small().state_dict())
    assert Trainer(small, share="*").agreed() == {}

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    trainer = Trainer(normed, share="*.weight, *.bias", batch_size=8)  # statistics that do not travel do not move
    before = digest(trainer.frozen())
    assert all("running" not in name for name in ask(trainer)["c0"].arrays)
    assert digest(arrays_of(trainer.thread_module(), trainer.state_names.frozen)) == before


def test_a_wholly_frozen_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter with requires_grad"):
        Trainer(lambda: nn.Linear(2, 2).requires_grad_(False)).initial(0)


def test_private_training_moves_and_sends_the_same_names() -> None:
    pytest.importorskip("opacus")

    def model(seed: int = 7) -> nn.Module:
        with seeded(seed):
            body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        return nn.Sequential(body.requires_grad_(False), nn.ReLU(), nn.Linear(8, 3))

    trainer, privacy = Trainer(model, batch_size=20), DPSGD(clip=1.0, noise=1.0, repeatable=True)
    start = trainer.initial(0)
    request = Request("train", start, {"seed": 0, "round": 1, **agreement_config(trainer.agreed())})
    reply = trainer.private_training(privacy)(request, Site("ana", SITES["c0"].data))
    assert tuple(reply.arrays) == trainer.state_names.shared == ("2.weight", "2.bias")
    assert digest(reply.arrays) != digest(start)
    with pytest.raises(Refused, match=r"^agreed\.frozen: "):
        Trainer(lambda: model(8)).private_training(privacy)(request, Site("ana", SITES["c0"].data))
    with pytest.raises(Refused, match=r"^told\.epochs: not a hyperparameter of this client; supported: lr, mu"):
        trainer.private_training(privacy)(replace(request, config={"epochs": 2}), Site("ana", SITES["c0"].data))


def trainers(odd: str) -> dict[str, Trainer]:
    """Of all clients one has another body."""
    same, other = Trainer(Transfer), Trainer(lambda: Transfer(seed=8))
    return {c: other if c == odd else same for c in SITES}


def test_a_client_with_another_frozen_part_is_refused_by_name() -> None:
    each = trainers("c3")
    fleet = LocalFleet(lambda request, site: each[site.id](request, site), {c: site.data for c, site in SITES.items()})
    run = Run(each["c0"].initial(0))
    tell = agreement_config(each["c0"].agreed())
    done = next(train(run, fleet, rounds=1, select=everyone, aggregate=FedAvg(), config=tell))
    failures = {row["client"]: row["failure"] for row in done.clients if row["failure"]}
    here, there = each["c3"].agreed()["frozen"], each["c0"].agreed()["frozen"]
    assert failures == {"c3": f"refused: agreed.frozen: frozen {there[:12]} is agreed on, here it is {here[:12]}"}
    alone = each["c3"].many({"c3": Request("probe", run.arrays, {"seed": 0, "round": 1, **tell})}, SITES)["c3"]
    assert str(alone) == failures["c3"]


def test_over_flowers_messages_the_same_client_is_refused_and_the_others_get_the_same_bits() -> None:
    each, names = trainers("c3"), sorted(SITES)
    population = {c: site.data for c, site in SITES.items()}

    def task_of(trainer: Trainer) -> Task:
        return Task(trainer, population, lambda: trainer.initial(0))

    grid = LoopGrid(client_app(lambda context: task_of(each[str(context.node_config["name"])])))
    for name in names:
        grid.join(name=name)
    fleet, tell = FlowerFleet(grid, timeout=20, greet=2), agreement_config(each["c0"].agreed())
    there, here = Run(each["c0"].initial(0)), Run(each["c0"].initial(0))
    done = next(train(there, fleet, rounds=1, select=everyone, aggregate=FedAvg(), config=tell, expect=6))
    failures = {row["client"]: row["failure"] for row in done.clients if row["failure"]}
    assert list(failures) == ["c3"]
    assert failures["c3"].startswith("refused: agreed.frozen: frozen ")
    local = LocalFleet(lambda request, site: each[site.id](request, site), population)
    next(train(here, local, rounds=1, select=everyone, aggregate=FedAvg(), config=tell))
    assert digest(there.arrays) == digest(here.arrays)


def test_a_site_that_has_nothing_frozen_refuses_as_well() -> None:
    trainer = Trainer(lambda: nn.Linear(6, 3))
    run = Run(trainer.initial(0))
    fleet = LocalFleet(trainer, {c: site.data for c, site in SITES.items()})
    with pytest.raises(TooFewReplies, match="frozen abcdef is agreed on, there is none here"):
        list(train(run, fleet, rounds=1, select=everyone, aggregate=FedAvg(), config={"agreed.frozen": "abcdef"}))


def test_a_recipe_tells_the_digest_by_itself() -> None:
    trainer = Trainer(Transfer)
    task = Task(trainer, {}, lambda: trainer.initial(0))
    assert Recipe(Common, lambda config: task).prepare(Common()).agreed == trainer.agreed()


def test_frozen_parts_cost_nothing_on_the_way() -> None:
    def wide() -> nn.Module:
        with seeded(7):
            body = nn.Linear(6, 500).requires_grad_(False)
        return nn.Sequential(body, nn.ReLU(), nn.Linear(500, 3))

    trainer = Trainer(wide)
    run = Run(trainer.initial(0))
    fleet = LocalFleet(trainer, {c: site.data for c, site in SITES.items()})
    done = next(train(run, fleet, rounds=1, select=everyone, aggregate=FedAvg()))
    assert done.row["bytes_down"] == 6 * nbytes(run.arrays) == 6 * 4 * (500 * 3 + 3)
