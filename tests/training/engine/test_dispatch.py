"""Which way clients go, what happens to those that cannot, and how models are judged on many clients."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.core.arrays import digest
from mutirao.core.client_evaluation import across_clients
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.metrics import evaluate_logits, regression_metrics
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.engine.batched_evaluation import evaluate_in_batches
from mutirao.training.engine.dispatch import choose_engine
from mutirao.training.engine.jobs import Job, plan_jobs
from mutirao.training.engine.stacked import assign_to_stacks
from mutirao.training.samples import ClientData, Samples
from mutirao.training.trainer import Trainer

DRAW = np.random.default_rng(0)
CONFIG = {"seed": 1, "round": 1}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Branching(nn.Module):
    """A model that looks at its numbers to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.mean() > 0 else self.layer(-x)


class Counting(nn.Module):
    """A model that does something else at each step, which no tape can know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.layer(x) * (1 + self.steps % 2)


def data(n: int, features: int = 6, classes: int = 3) -> tuple[Any, Any]:
    return DRAW.normal(size=(n, features)).astype(np.float32), DRAW.integers(0, classes, n)


def asked(trainer: Trainer, population: dict[str, Any], do: str = "train", **config: Any) -> dict[str, Reply | Failure]:
    requests = {c: Request(do, trainer.initial(0), CONFIG | config) for c in population}
    shared = next(iter(requests.values())).arrays
    requests = {c: Request(do, shared, r.config) for c, r in requests.items()}
    return trainer.many(requests, {c: Site(c, d) for c, d in population.items()})


@pytest.mark.parametrize(
    ("model", "way"),
    [
        (mlp, "fused"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), "stacked"),
        (lambda: nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 2000), nn.Linear(2000, 3)), "auto"),
        (
            lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(4, 3)),
            "stacked",
        ),
    ],
)
def test_the_model_decides_unless_the_user_does(model: Any, way: str) -> None:
    many = [f"c{i}" for i in range(20)]
    assert choose_engine(Trainer(model), jobs_of(Trainer(model), many)) == way
    for engine in ("fused", "stacked", "threads", "processes", "plain"):
        assert choose_engine(Trainer(model, engine=engine), []) == engine
    with pytest.raises(ValueError, match="one of auto, fused, stacked, threads, processes, plain"):
        Trainer(model, engine="fast")


def jobs_of(trainer: Trainer, names: list[str], samples: int = 9) -> list[Job]:
    config = {"seed": 0, "round": 1}
    requests = {c: Request("train", trainer.initial(0), config) for c in names}
    return plan_jobs(trainer, requests, {c: Site(c, data(samples)) for c in names})[0]


def test_company_does_not_decide_over_the_kernel() -> None:
    trainer = Trainer(mlp, batch_size=1)
    for names in (["c0"], [f"c{i}" for i in range(40)]):
        assert choose_engine(trainer, jobs_of(trainer, names)) == "fused"


def test_a_small_round_of_what_could_be_stacked_is_trained_plainly_as_over_a_network() -> None:
    trainer = Trainer(mlp, batch_size=1, optimizer="adam")
    few = [f"c{i}" for i in range(16)]
    assert choose_engine(trainer, jobs_of(trainer, few, 32)) == "plain"  # 512 steps
    assert choose_engine(trainer, jobs_of(trainer, few, 33)) == "stacked"
    assert choose_engine(trainer, jobs_of(trainer, [*few, "c16"], 1)) == "stacked"


@pytest.mark.parametrize("model", [Branching, Counting])
def test_what_cannot_be_stacked_is_trained_plainly_and_said_once(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    population = {f"c{i}": data(9) for i in range(3)}
    trainer = Trainer(model, engine="stacked", batch_size=4)
    with caplog.at_level(logging.INFO, "mutirao"):
        for _ in range(3):
            assert all(isinstance(r, Reply) for r in asked(trainer, population).values())
    assert len(caplog.records) == 1
    assert "cannot be stacked" in caplog.text
    if model is Branching:
        plain = asked(Trainer(model, engine="plain", batch_size=4), population)
        ours = asked(trainer, population)
        assert [digest(r.arrays) for r in ours.values()] == [digest(r.arrays) for r in plain.values()]  # type: ignore[union-attr]


@pytest.mark.parametrize("engine", ["stacked", "threads", "processes", "plain"])
def test_a_bad_client_fails_alone(engine: str) -> None:
    good = {f"c{i}": data(10 + i) for i in range(4)}
    wrong = data(10)
    bad = {
        "a empty": data(0),
        "b wide": data(10, features=7),
        "c label": (wrong[0], np.full(10, 3)),
        "d negative": (wrong[0], np.full(10, -1)),
        "e none": None,
    }
    trainer = Trainer(mlp, engine=engine, batch_size=4)
    answers = asked(trainer, good | bad)
    assert [c for c, r in answers.items() if isinstance(r, Failure)] == sorted(bad)
    assert "no samples" in str(answers["a empty"])
    without = asked(Trainer(mlp, engine=engine, batch_size=4), good)
    for client, reply in without.items():
        ours = answers[client]
        assert isinstance(ours, Reply)
        assert isinstance(reply, Reply)
        for name, value in reply.arrays.items():
            np.testing.assert_allclose(ours.arrays[name], value, rtol=1e-5, atol=1e-6)


def test_clients_may_start_from_different_models() -> None:
    population = {f"c{i}": data(9) for i in range(4)}
    results = []
    for engine in ("stacked", "plain"):
        trainer = Trainer(mlp, engine=engine, batch_size=4, mu=0.3)
        requests = {c: Request("train", trainer.initial(i), CONFIG) for i, c in enumerate(population)}
        results.append(trainer.many(requests, {c: Site(c, d) for c, d in population.items()}))
    for client, reply in results[0].items():
        other = results[1][client]
        assert isinstance(reply, Reply)
        assert isinstance(other, Reply)
        for name, value in reply.arrays.items():
            np.testing.assert_allclose(value, other.arrays[name], rtol=1e-4, atol=1e-6)


def test_the_request_and_the_callers_randomness_are_left_alone() -> None:
    population = {f"c{i}": data(20) for i in range(3)}
    for engine in ("fused", "stacked", "threads", "processes", "plain"):
        for model in (mlp, lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))):
            trainer = Trainer(model, engine=engine, batch_size=8, momentum=0.9)
            arrays = trainer.initial(0)
            before, state = digest(arrays), torch.get_rng_state()
            requests = {c: Request("train", arrays, CONFIG) for c in population}
            trainer.many(requests, {c: Site(c, d) for c, d in population.items()})
            assert digest(arrays) == before
            assert torch.equal(state, torch.get_rng_state())


def test_the_work_is_dealt_evenly() -> None:
    class Fake:
        def __init__(self, client: str, steps: int) -> None:
            self.client, self.lengths = client, [0] * steps

    def steps(sizes: list[int], tallest: int) -> list[list[int]]:
        shares: Any = [(Fake(f"c{i}", n), None) for i, n in enumerate(sizes)]
        return [[len(job.lengths) for job, _ in piece] for piece in assign_to_stacks(shares, tallest)]

    assert steps([75] * 10, 7) == [[75] * 5] * 2
    assert steps([3], 7) == [[3]]
    assert steps([3, 4], 7) == [[4], [3]] or steps([3, 4], 7) == [[4, 3]]
    assert all(len(piece) <= 7 for piece in steps(list(range(1, 101)), 7))
    loads = [sum(piece) for piece in steps(list(range(1, 101)), 10)]
    assert max(loads) < 1.2 * min(loads)


@pytest.mark.parametrize("do", ["evaluate", "probe"])
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_judging_many_is_judging_each(do: str, engine: str) -> None:
    storage = data(500)
    owned = np.split(DRAW.permutation(500), [1, 30, 250, 251])
    held: dict[str, Any] = {f"c{i}": Samples(*storage, rows) for i, rows in enumerate(owned)}
    held |= {"own": data(120), "wide": data(5, features=7), "none": data(0)}
    population = {
        c: ClientData(data(3), own) if do == "evaluate" else ClientData(own, data(3)) for c, own in held.items()
    }
    trainer = Trainer(mlp, engine=engine)
    answers = asked(trainer, population, do, probe_samples=50)
    assert [c for c, r in answers.items() if isinstance(r, Failure)] == ["none", "wide"]
    for client in population.keys() - {"none", "wide"}:
        reply = answers[client]
        alone = trainer(
            Request(do, trainer.initial(0), CONFIG | {"probe_samples": 50}), Site(client, population[client])
        )
        assert isinstance(reply, Reply)
        assert reply.n == alone.n == len(Samples.of(held[client]))
        assert reply.metrics == pytest.approx(alone.metrics, rel=1e-5)
        assert set(reply.metrics) == ({"loss", "entropy"} if do == "probe" else {"loss", "accuracy"})


def test_a_judgement_does_not_depend_on_the_number_of_workers() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3))

    samples = Samples(*data(200_000))  # several batches
    found = [Trainer(model, workers=w).evaluate(Trainer(model).initial(0), samples) for w in (1, 2, 4)]
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {"loss", "accuracy"}


def test_entropy_is_that_of_the_predicted_classes() -> None:
    trainer = Trainer(lambda: nn.Linear(6, 3))
    arrays = {k: np.zeros_like(v) for k, v in trainer.initial(0).items()}
    assert trainer.probe(arrays, Samples(*data(7)))["entropy"] == pytest.approx(np.log(3))
    arrays["bias"][0] = 100.0
    assert trainer.probe(arrays, Samples(*data(7)))["entropy"] == pytest.approx(0.0, abs=1e-6)


def test_a_loss_that_is_no_mean_over_samples_is_judged_client_by_client() -> None:
    def worst(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, y, reduction="none").max()

    trainer = Trainer(mlp, loss=worst)
    population = {f"c{i}": ClientData(data(5), data(12)) for i in range(3)}
    answers = asked(trainer, population, "evaluate")
    for client, reply in answers.items():
        assert isinstance(reply, Reply)
        assert reply.metrics == trainer.evaluate(trainer.initial(0), population[client].test)


@pytest.mark.parametrize("classes", [True, False])
def test_figures_of_ones_own_are_told_by_every_client_one_by_one_or_at_once(classes: bool) -> None:
    def labelled(n: int) -> ClientData:
        x, y = data(n)
        return ClientData(Samples(x, y), Samples(x, y if classes else x[:, :3]))

    population = {f"c{i}": labelled(7 + 5 * i) for i in range(4)}
    loss = functional.cross_entropy if classes else functional.mse_loss
    trainer = Trainer(mlp, loss=loss, figures=evaluate_logits if classes else regression_metrics)
    arrays = trainer.initial(0)
    requests = {c: Request("evaluate", arrays, {"seed": 0, "round": 1}) for c in population}
    sites = {c: Site(c, d) for c, d in population.items()}
    together = evaluate_in_batches(trainer, requests, sites)
    assert together.keys() == population.keys()
    for client, reply in together.items():
        alone, samples = trainer(requests[client], sites[client]), population[client].test
        assert isinstance(reply, Reply)
        assert reply.metrics == pytest.approx(alone.metrics, rel=1e-5)
        with torch.inference_mode():
            outputs = trainer.fill(arrays)(samples.x)
        right = trainer.figures(outputs.numpy(), samples.y.numpy())  # type: ignore[misc]
        assert alone.metrics == pytest.approx({"loss": float(loss(outputs, samples.y)), **right}, rel=1e-5)


def test_squared_errors_that_do_not_fit_are_refused() -> None:
    x, y = DRAW.normal(size=(40, 6)).astype(np.float32), DRAW.integers(0, 30, 40)
    for engine in ("stacked", "plain"):
        trainer = Trainer(lambda: nn.Linear(6, 30), engine=engine)
        answers = asked(trainer, {"ana": (x, y), "bia": (x, y)}, extras="squared_errors")
        assert all("16 grades" in str(r) for r in answers.values())
        answers = asked(trainer, {"ana": (x, y.astype(np.float32))}, extras="squared_errors")
        assert "only where the labels are classes" in str(answers["ana"])
        assert "no extras nonsense" in str(asked(trainer, {"ana": (x, y)}, extras="nonsense")["ana"])


def test_the_worst_client_is_seen() -> None:
    population = {f"c{i:02d}": ClientData(data(5), data(50)) for i in range(20)}
    trainer = Trainer(mlp)
    run = Run(trainer.initial(0))
    found = across_clients(LocalFleet(trainer, population), run)
    each = [trainer.evaluate(run.arrays, d.test)["accuracy"] for d in population.values()]
    assert found["accuracy_clients"] == 20
    assert found["accuracy_mean"] == pytest.approx(np.mean(each))
    assert found["accuracy_worst"] == pytest.approx(min(each))
    assert found["accuracy_p10"] <= found["accuracy_p50"] <= found["accuracy_p90"]
    both = across_clients(LocalFleet(trainer, population), run, also={"loss": False, "auc": True})
    losses = [trainer.evaluate(run.arrays, d.test)["loss"] for d in population.values()]
    assert both.keys() == {*found, *(name.replace("accuracy", "loss") for name in found)}  # nobody tells an AUC
    assert both["loss_worst"] == pytest.approx(max(losses))
    lower = across_clients(LocalFleet(trainer, population), run, ["c03", "c04"], "loss", higher_is_better=False)
    assert lower["loss_worst"] >= lower["loss_p90"] >= lower["loss_mean"]
    with pytest.raises(ConfigError, match="none of 20 clients"):
        across_clients(LocalFleet(trainer, population), run, metric="rmse")
