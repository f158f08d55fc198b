"""Methods with more than a mean: against their papers' formulas, on least squares, over Flower, and resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import nn
from torch.nn import functional

from loopgrid import LoopGrid, identity
from mutirao.aggregation import FedAvg
from mutirao.aggregation.base import effective_steps
from mutirao.aggregation.feddyn import FedDyn
from mutirao.aggregation.fedexp import FedExP
from mutirao.aggregation.fednova import FedNova
from mutirao.aggregation.qfedavg import QFedAvg
from mutirao.aggregation.scaffold import Scaffold
from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import Answers, Failure, Fleet, Reply, Request, Wrapper
from mutirao.core.parts import as_aggregator
from mutirao.core.rounds import Patience, Run, train
from mutirao.deploy.flower.client import client_app
from mutirao.errors import ConfigError
from mutirao.experiments.task import Task, find
from mutirao.flower.flower_fleet import FlowerFleet
from mutirao.runs.execute import execute
from mutirao.selection import RoundRobin, Uniform, everyone
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer

__all__ = ["identity"]  # a fixture that holds for all tests here, too

Floats = npt.NDArray[np.float64]
WIDTH, CLIENTS, LR = 4, 6, 0.05
METHODS = [
    Scaffold(population=CLIENTS),
    Scaffold(option=1, weights="equal", population=CLIENTS),
    FedDyn(alpha=0.5, population=CLIENTS),
    FedNova(),
    FedExP(),
    QFedAvg(q=2.0, client_lr=LR),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


def problems(equal: bool = False) -> dict[str, tuple[Floats, Floats]]:
    """Least squares of clients that differ in everything: curvature, solution and, unless `equal`, size."""
    draw, found = np.random.default_rng(2), {}
    for k in range(CLIENTS):
        n = 20 if equal else 10 + 8 * k
        x = draw.normal(size=(n, WIDTH)) * draw.uniform(0.3, 1.6, WIDTH)
        found[f"c{k}"] = x, x @ draw.normal(size=WIDTH) + draw.normal(size=n)
    return found


def task_of(data: dict[str, tuple[Floats, Floats]], epochs: int = 10, batch: int = 1000, **more: Any) -> Task:
    def loss(outputs: Any, y: Any) -> Any:
        return functional.mse_loss(outputs[:, 0], y) / 2

    def model() -> nn.Module:
        return nn.Linear(WIDTH, 1, bias=False)

    trainer = Trainer(model, loss=loss, lr=LR, epochs=epochs, batch_size=batch, **more)
    clients = {c: Samples(x.astype(np.float32), y.astype(np.float32)) for c, (x, y) in data.items()}
    return Task(trainer, clients, lambda: {"weight": np.zeros((1, WIDTH), np.float32)})


def end_of(task: Task, method: Any, rounds: int, per_round: int = CLIENTS) -> Floats:
    run = Run(task.initial(), seed=4)
    select = everyone if per_round == CLIENTS else RoundRobin(per_round)
    list(train(run, LocalFleet(task.handler, task.population), rounds=rounds, select=select, aggregate=method))
    return run.arrays["weight"][0].astype(np.float64)


def gradient(problem: tuple[Floats, Floats], w: Floats) -> Floats:
    x, y = problem
    return x.T @ (x @ w - y) / len(y)


def solution(data: dict[str, tuple[Floats, Floats]], equal: bool) -> Floats:
    """Where sum_k p_k f_k is least, with p_k = n_k / n, or all the same."""
    shares = {c: 1.0 if equal else len(y) for c, (_, y) in data.items()}
    hessian = sum(shares[c] * x.T @ x / len(y) for c, (x, y) in data.items())
    return np.linalg.solve(hessian, sum(shares[c] * x.T @ y / len(y) for c, (x, y) in data.items()))


def turns(rounds: int, per_round: int) -> list[list[str]]:
    """Who takes part, as round robin has it."""
    names = [f"c{k}" for k in range(CLIENTS)]
    return [[names[(r * per_round + i) % CLIENTS] for i in range(per_round)] for r in range(rounds)]


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_scaffold_is_the_papers_algorithm(option: Any, weights: Any) -> None:
    data, steps, first = problems(), 5, 0.0
    x, c, own = np.zeros(WIDTH), np.zeros(WIDTH), {name: np.zeros(WIDTH) for name in data}
    for who in turns(7, 2):
        moves, changes = {}, {}
        for name in who:
            y = x.copy()
            for _ in range(steps):
                y = y - LR * (gradient(data[name], y) + c - own[name])
            new = gradient(data[name], x) if option == 1 else own[name] - c + (x - y) / (steps * LR)
            moves[name], changes[name] = y - x, new - own[name]
            own[name] = new
        sizes = {name: len(data[name][1]) if weights == "samples" else 1 for name in who}
        first = first or np.mean(list(sizes.values()))
        x = x + 0.8 * sum(size / sum(sizes.values()) * moves[name] for name, size in sizes.items())
        c = c + sum(size / (CLIENTS * first) * changes[name] for name, size in sizes.items())
    method = Scaffold(lr=0.8, option=option, weights=weights, population=CLIENTS)
    np.testing.assert_allclose(end_of(task_of(data, steps), method, 7, 2), x, rtol=2e-4, atol=2e-5)


def test_feddyn_is_the_papers_algorithm() -> None:
    data, steps, alpha = problems(), 5, 0.3
    x, h, own = np.zeros(WIDTH), np.zeros(WIDTH), {name: np.zeros(WIDTH) for name in data}
    for who in turns(7, 2):
        ends = {}
        for name in who:
            y = x.copy()
            for _ in range(steps):
                y = y - LR * (gradient(data[name], y) - own[name] + alpha * (y - x))
            own[name] = own[name] - alpha * (y - x)
            ends[name] = y
        h = h - alpha / CLIENTS * sum(y - x for y in ends.values())
        x = np.mean(list(ends.values()), axis=0) - h / alpha
    method = FedDyn(alpha=alpha, population=CLIENTS)
    np.testing.assert_allclose(end_of(task_of(data, steps), method, 7, 2), x, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_fednova_is_the_papers_algorithm(momentum: float) -> None:
    """Clients of different sizes take different numbers of steps."""
    data, batch = problems(), 10
    task = task_of(data, epochs=2, batch=batch, momentum=momentum)
    current = {"weight": np.full((1, WIDTH), 0.5, np.float32)}
    draw = np.random.default_rng(0)
    replies, tau, direction = {}, 0.0, np.zeros(WIDTH)
    total = sum(len(y) for _, y in data.values())
    for name, (_, y) in data.items():
        steps = 2 * -(-len(y) // batch)
        end = current["weight"] + draw.normal(size=(1, WIDTH)).astype(np.float32)
        replies[name] = Reply({"weight": end}, metrics={"reach": effective_steps(LR, momentum, 0.0, steps)}, n=len(y))
        a = steps if not momentum else (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
        d = (current["weight"] - end)[0].astype(np.float64) / a
        tau, direction = tau + len(y) / total * a, direction + len(y) / total * d
    merged = FedNova()(current, replies, {})
    np.testing.assert_allclose(merged.arrays["weight"][0], current["weight"][0] - tau * direction, rtol=1e-5)
    assert end_of(task, FedNova(), 3).shape == (WIDTH,)  # and the clients tell what it needs


def test_fedexp_is_the_papers_algorithm() -> None:
    draw = np.random.default_rng(1)
    current = {"w": np.zeros(5, np.float32)}
    ends = [draw.normal(size=5).astype(np.float32) for _ in range(4)]
    merged = FedExP(epsilon=0.01)(current, {f"c{i}": Reply({"w": e}, n=3) for i, e in enumerate(ends)}, {})
    gaps = np.array([e - current["w"] for e in ends], np.float64)
    mean = gaps.mean(0)
    step = max(1.0, (gaps**2).sum() / (2 * 4 * ((mean**2).sum() + 0.01)))
    assert step > 1
    np.testing.assert_allclose(merged.arrays["w"], current["w"] + step * mean, rtol=1e-5)
    assert merged.figures["c0"]["server_step"] == pytest.approx(step)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_qfedavg_is_the_papers_algorithm(q: float) -> None:
    draw, lr = np.random.default_rng(1), 0.1
    current = {"w": draw.normal(size=5).astype(np.float32)}
    ends, losses = [draw.normal(size=5).astype(np.float32) for _ in range(4)], [0.2, 1.0, 2.0, 1.5]
    replies = {
        f"c{i}": Reply({"w": e}, metrics={"start_loss": f}, n=i + 1)
        for i, (e, f) in enumerate(zip(ends, losses, strict=True))
    }
    above, below = np.zeros(5), 0.0
    for end, loss in zip(ends, losses, strict=True):
        v = (current["w"] - end).astype(np.float64) / lr
        above += loss**q * v
        below += q * loss ** (q - 1) * (v**2).sum() + loss**q / lr
    merged = QFedAvg(q=q, client_lr=lr)(current, replies, {})
    np.testing.assert_allclose(merged.arrays["w"], current["w"] - above / below, rtol=1e-5)
    if q == 0:
        np.testing.assert_allclose(merged.arrays["w"], np.mean(ends, axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "equal"),
    [
        (Scaffold(population=CLIENTS), False),
        (Scaffold(option=1, population=CLIENTS), False),
        (Scaffold(weights="equal", population=CLIENTS), True),
        (FedDyn(alpha=0.5, population=CLIENTS), True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_drift_correction_ends_at_the_optimum_of_all_where_fedavg_does_not(
    method: Any, equal: bool, momentum: float
) -> None:
    data = problems()
    best, task = solution(data, equal), task_of(data, epochs=8, momentum=momentum)
    assert float(np.linalg.norm(end_of(task, method, 40) - best)) < 1e-3
    assert float(np.linalg.norm(end_of(task, FedAvg(), 40) - best)) > 0.04


@pytest.mark.parametrize("option", [1, 2])
def test_clients_of_unequal_size_end_at_the_optimum_also_if_few_of_them_take_part(option: Any) -> None:
    """c stays a mean of the c_k with the same weights, whoever else answers."""
    data = problems()
    task, best = task_of(data, epochs=8), solution(data, equal=False)

    def gap(method: Any) -> float:
        run = Run(task.initial(), seed=4)
        fleet = LocalFleet(task.handler, task.population)
        list(train(run, fleet, rounds=150, select=Uniform(2), aggregate=method))
        return float(np.linalg.norm(run.arrays["weight"][0] - best))

    assert gap(Scaffold(option=option, population=CLIENTS)) < 1e-3
    if option == 2:
        assert gap(FedAvg()) > 0.1


def test_control_variates_by_steps_alone_are_wrong_with_momentum() -> None:
    """(x - y) / (K lr) is several times the gradient then: what is corrected is never right again."""
    data = problems()
    task = task_of(data, epochs=20, momentum=0.8)
    end = end_of(task, Scaffold(population=CLIENTS), 1)
    run = Run(task.initial(), seed=4)
    list(
        train(
            run,
            LocalFleet(task.handler, task.population),
            rounds=1,
            select=everyone,
            aggregate=Scaffold(population=CLIENTS),
        )
    )
    np.testing.assert_array_equal(run.arrays["weight"][0], end)
    naive = -end / (20 * LR)
    assert np.linalg.norm(naive) > 2 * np.linalg.norm(run.memory["scaffold.c"])


def test_fednova_goes_nearer_the_optimum_than_fedavg_when_clients_take_unequal_steps() -> None:
    data = problems()
    task = task_of(data, epochs=1, batch=10)  # one to five steps a round
    best = solution(data, equal=False)
    gaps = [np.linalg.norm(end_of(task, part, 60) - best) for part in (FedNova(), FedAvg())]
    assert gaps[0] < 0.7 * gaps[1]


def test_qfedavg_makes_losses_more_alike() -> None:
    data = problems()
    task = task_of(data, epochs=5)

    def spread(q: float) -> float:
        w = end_of(task, QFedAvg(q=q, client_lr=LR), 40)
        return float(np.std([np.mean((x @ w - y) ** 2) / 2 for x, y in data.values()]))

    assert spread(5.0) < 0.9 * spread(0.0)


@every_method
def test_over_flowers_messages_it_is_the_same_to_the_bit(method: Any) -> None:
    task = task_of(problems(), epochs=2, batch=10)
    local, remote = Run(task.initial(), seed=3), Run(task.initial(), seed=3)
    grid = LoopGrid(client_app(lambda _: task))
    for name in task.population:
        grid.join(name=name)
    fleets = (
        LocalFleet(lambda request, site: task.handler(request, site), task.population),
        FlowerFleet(grid, timeout=20, greet=5),
    )
    for run, fleet in zip((local, remote), fleets, strict=True):
        rounds = list(train(run, fleet, rounds=4, select=RoundRobin(4), aggregate=method))
        assert [r.row["failed"] for r in rounds] == [0] * 4
    assert digest(local.arrays) == digest(remote.arrays)
    assert digest(local.memory) == digest(remote.memory)


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fednova", "fedexp", "qfedavg"])
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    recipe = find("quickstart")
    settings = {"clients": 8, "per_round": 3, "aggregate": name, "epochs": 2}
    whole = execute(recipe, {**settings, "rounds": 4}, tmp_path / "whole")
    execute(recipe, {**settings, "rounds": 2}, tmp_path / "parts")
    parts = execute(recipe, {**settings, "rounds": 4}, tmp_path / "parts", resume=True)
    assert parts["digest"] == whole["digest"]


@every_method
def test_statistics_and_counters_are_means_whatever_the_weights(method: Any) -> None:
    def model(value: float) -> Arrays:
        return {
            "norm.running_var": np.full(3, value, np.float32),
            "norm.num_batches_tracked": np.array(int(value)),
            "w": np.full(2, value, np.float32),
        }

    told = {"loss": 1.0, "start_loss": 1.0}
    ends = {
        f"c{i}": Reply(model(v), {"control": np.ones(2, np.float32)}, told | {"reach": r}, 10)
        for i, (v, r) in enumerate([(2, 0.1), (4, 2.0), (6, 1.0)])
    }
    merged = method(model(1.0), ends, {})
    np.testing.assert_allclose(merged.arrays["norm.running_var"], 4.0)
    assert merged.arrays["norm.num_batches_tracked"] == 4


def test_a_lie_about_the_reach_does_not_take_over() -> None:
    current = {"w": np.zeros(2, np.float32)}
    honest = {f"c{i}": Reply({"w": np.ones(2, np.float32)}, metrics={"reach": 1.0}, n=10) for i in range(9)}
    for reach in (1e-30, 1e30):
        liar = {"liar": Reply({"w": np.full(2, -1.0, np.float32)}, metrics={"reach": reach}, n=10)}
        merged = FedNova()(current, honest | liar, {})
        assert max(merged.weights.values()) <= 100 * min(merged.weights.values()) * 1.001
        memory: Arrays = {}
        Scaffold(population=10)(current, honest | liar, memory)
        assert np.abs(memory["scaffold.c"]).max() < 11  # of 0.1 x 100, at most
    nothing = Reply({"w": np.ones(2, np.float32)}, n=1)
    for part in (FedNova(), Scaffold(population=1), Scaffold(option=1, population=1), QFedAvg(client_lr=0.1)):
        assert as_aggregator(part).fault(nothing) is not None


@pytest.mark.parametrize("option", [1, 2])
def test_nobody_moves_the_control_variate_at_will(option: Any) -> None:
    """Option 1 believes a vector, option 2 an update and its reach: either may lie."""
    current, draw = {"w": np.zeros(4, np.float32)}, np.random.default_rng(0)
    memory: Arrays = {}
    part = Scaffold(option=option, population=10)
    for _ in range(3):
        ends = {f"c{i}": draw.normal(size=4).astype(np.float32) for i in range(9)}
        told = {c: Reply({"w": w}, {"control": -w}, {"reach": 1.0}, 10) for c, w in ends.items()}
        lie = np.full(4, 1e6, np.float32)
        part(current, told | {"liar": Reply({"w": lie}, {"control": -lie}, {"reach": 1e-9}, 10)}, memory)
    assert np.linalg.norm(memory["scaffold.c"]) < 3 * 10 * 4 / 10 + 4  # three times ten of ten, each of some 2 to 4


@pytest.mark.parametrize(
    ("method", "equal"),
    [(Scaffold(population=CLIENTS), False), (FedDyn(alpha=0.5, population=CLIENTS), True)],
    ids=repr,
)
@pytest.mark.parametrize("how", ["screened", "lost", "never asked"])
def test_replies_that_do_not_count_leave_nothing_behind(method: Any, equal: bool, how: str) -> None:
    """What a client keeps of an update that the server never joined would shift the optimum for good."""
    data = problems()
    task, best = task_of(data, epochs=8), solution(data, equal)
    gone = np.random.default_rng(5)

    class Lossy(Wrapper):
        def ask(self, requests: Mapping[str, Request]) -> Answers:
            lost = {c for c in sorted(requests) if gone.random() < 0.25 and self.round < 40}
            self.round += 1
            asked = {c: r for c, r in requests.items() if how == "lost" or c not in lost}
            answers = self.fleet.ask(asked)
            kept = {c: r for c, r in answers.replies.items() if c not in lost}
            return Answers(kept, {c: Failure("late", "lost on its way") for c in sorted(lost)})

    def drop(current: Arrays, replies: Mapping[str, Reply]) -> Any:
        out = {c for c in sorted(replies) if gone.random() < 0.25 and run.round < 40}
        return {c: r for c, r in replies.items() if c not in out}, dict.fromkeys(sorted(out), "by lot")

    fleet: Fleet = LocalFleet(task.handler, task.population)
    if how != "screened":
        fleet = Lossy(fleet)
        fleet.round = 0
    run = Run(task.initial(), seed=4)
    filters = [drop] if how == "screened" else []
    patience = Patience(min_replies=1)
    list(train(run, fleet, rounds=100, select=everyone, aggregate=method, filters=filters, patience=patience))
    assert float(np.linalg.norm(run.arrays["weight"][0] - best)) < 2e-3


def test_who_must_know_more_says_so() -> None:
    current, replies = (
        {"w": np.zeros(2, np.float32)},
        {"c": Reply({"w": np.ones(2, np.float32)}, metrics={"reach": 1.0, "start_loss": 1.0}, n=1)},
    )
    for part, word in ((Scaffold(), "population"), (FedDyn(), "population"), (QFedAvg(), "client_lr")):
        with pytest.raises(ConfigError, match=word):
            part(current, replies, {})
