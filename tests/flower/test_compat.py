"""Flower's own apps and ours: our parts as a strategy of a stock app, and a plain fleet of stock clients."""

import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower

from loopgrid import LoopGrid, identity
from mutirao import Reply, Run, train
from mutirao.aggregation import FedAdam, FedAvg, FedProx, FedRisk
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Request, Site
from mutirao.errors import ConfigError, Diverged, TooFewReplies
from mutirao.flower import FlowerFleet, Strategy, errors_on
from mutirao.flower.messages import unpack
from mutirao.robustness.filters import NormFilter
from mutirao.selection import RoundRobin, Uniform
from mutirao.simulation.local_fleet import LocalFleet

__all__ = ["identity"]  # a fixture that holds for all tests here, too

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-strategy"
NODES, ROUNDS = 4, 3
TOLD = {"num-server-rounds": ROUNDS, "fraction-train": 1.0, "local-epochs": 1, "lr": 0.1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The pictures are so few that a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Flower's quickstart for PyTorch, a client and its task."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from flower_strategy import client_app, server_app, task

    yield type("Quickstart", (), {"client": client_app, "server": server_app, "task": task})
    for name in [name for name in sys.modules if name.startswith("flower_strategy")]:
        del sys.modules[name]


def grid_of(app: ClientApp) -> LoopGrid:
    grid = LoopGrid(app, **TOLD)
    for i in range(NODES):
        grid.join(**{"partition-id": i, "num-partitions": NODES})
    return grid


def first_model(quickstart: Any) -> ArrayRecord:
    torch.manual_seed(0)
    return ArrayRecord(quickstart.task.Net().state_dict())


def models_of(strategy: Any, grid: LoopGrid, start: ArrayRecord, rounds: int = ROUNDS) -> list[Arrays]:
    """The model after each round of Flower's own loop."""
    seen: list[Arrays] = []
    strategy.start(
        grid,
        start,
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": 0.1}),
        evaluate_fn=lambda number, arrays: seen.append(unpack(arrays)),
    )
    return seen[1:]


def furthest(ours: list[Arrays], theirs: list[Arrays]) -> float:
    assert len(ours) == len(theirs)
    return max(float(np.abs(a[k] - b[k]).max()) for a, b in zip(ours, theirs, strict=True) for k in b)


def add(**more: Any) -> Callable[[Message, Message], list[Message]]:
    """A client that sends more metrics."""

    def meddle(message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **more})
        return [reply]

    return meddle


PAIRS = [
    (FedAvg(), flower.FedAvg()),
    ("fedavg", flower.FedAvg(fraction_train=0.5, min_train_nodes=NODES)),
    (FedAdam(lr=0.01, tau=0.1), flower.FedAdam(eta=0.01, tau=0.1)),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_our_parts_in_a_stock_app_are_flowers_own_strategies(quickstart: Any, ours: Any, theirs: Any) -> None:
    start = first_model(quickstart)
    mine = models_of(Strategy(ours), grid_of(quickstart.client.app), start)
    assert furthest(mine, models_of(theirs, grid_of(quickstart.client.app), start)) < 1e-6


def test_the_whole_quickstart_runs_with_fedrisk_in_its_strategy(
    quickstart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grid = grid_of(quickstart.client.app)
    quickstart.server.app(grid, Context(7, 1, {}, grid.nodes[grid.get_node_ids()[0]].state, TOLD))
    net = quickstart.task.Net()
    test, loader = functools.partial(quickstart.task.test, net), quickstart.task.load_centralized_data()
    before = test(loader)[1]
    net.load_state_dict(torch.load("final_model.pt"))
    assert test(loader)[1] > before + 0.2


def test_fedrisk_with_errors_judged_at_the_server_weighs_as_fedrisk_does(quickstart: Any) -> None:
    start, loader = first_model(quickstart), quickstart.task.load_centralized_data()
    strategy = Strategy(FedRisk(classes=10), errors=errors_on(quickstart.task.Net(), loader))
    grid, sent = grid_of(quickstart.client.app), dict[str, Message]()
    for node in grid.nodes:
        grid.meddlers[node] = lambda message, reply, node=node: sent.setdefault(str(node), reply) and [reply]
    (made,) = models_of(strategy, grid, start, rounds=1)
    replies = {}
    for client, message in sent.items():
        arrays, net = unpack(message.content["arrays"]), quickstart.task.Net()
        net.load_state_dict({k: torch.tensor(v) for k, v in arrays.items()})
        errors = np.concatenate([((net(x).argmax(1) - y) ** 2).numpy() for x, y in loader]).astype(np.uint8)
        sizes = np.array([len(errors)], np.int32)
        replies[client] = Reply(arrays, {"squared_errors": errors, "batch_sizes": sizes}, n=1)
    by_hand = FedRisk(classes=10)(unpack(start), replies, {})
    assert all(np.array_equal(made[k], by_hand.arrays[k]) for k in made)
    assert len(set(by_hand.weights.values())) > 1  # risks differ, so that it is no plain mean


def test_a_client_that_sends_its_errors_needs_one_line_more(quickstart: Any) -> None:
    grid = grid_of(quickstart.client.app)
    errors = {node: [0, 1, 4, 1][i:] + [9] * i for i, node in enumerate(grid.nodes)}
    for node in grid.nodes:
        grid.meddlers[node] = add(squared_errors=errors[node])
    strategy = Strategy("fedrisk")
    models_of(strategy, grid, first_model(quickstart), rounds=1)
    risks = strategy.run.roster.figures["risk"]
    assert len(set(risks.tolist())) == NODES
    assert "squared_errors" not in strategy.run.roster.figures


def test_what_no_client_sends_is_refused_by_name_at_the_first_round(quickstart: Any) -> None:
    with pytest.raises(ConfigError, match=r"FedRisk.* needs squared_errors from the clients.*MetricRecord.*errors="):
        models_of(Strategy("fedrisk"), grid_of(quickstart.client.app), first_model(quickstart))


def test_errors_that_cannot_be_are_refused_by_name(quickstart: Any) -> None:
    strategy = Strategy("fedrisk", errors=lambda arrays: [0.5])
    with pytest.raises(ConfigError, match="errors: 'squared_errors' holds another than whole numbers from 0 to 255"):
        models_of(strategy, grid_of(quickstart.client.app), first_model(quickstart))


def test_who_asks_before_it_selects_is_refused_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match="before it selects, which Flower's own apps cannot answer"):
        Strategy("fedavg", select="powerofchoice")
    with pytest.raises(ConfigError, match=r"no part is called 'fedrsik'.*did you mean 'fedrisk'"):
        Strategy("fedrsik")
    with pytest.raises(ConfigError, match="7 is neither aggregator nor the name of one"):
        Strategy(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="fraction_train is 2, but must be from 0 to 1"):
        Strategy(fraction_train=2)


def broken(message: Message, reply: Message) -> list[Message]:
    """A client whose model is not a number."""
    if message.metadata.message_type == "train":
        state = reply.content["arrays"].to_torch_state_dict()
        reply.content["arrays"] = ArrayRecord({k: v * float("nan") for k, v in state.items()})
    return [reply]


def far(message: Message, reply: Message) -> list[Message]:
    """A client that moves the model a hundred times as far as the others."""
    if message.metadata.message_type == "train":
        sent = message.content["arrays"].to_torch_state_dict()
        state = {k: sent[k] + 100 * (v - sent[k]) for k, v in reply.content["arrays"].to_torch_state_dict().items()}
        reply.content["arrays"] = ArrayRecord(state)
    return [reply]


def test_broken_replies_are_left_out_and_named(quickstart: Any, caplog: pytest.LogCaptureFixture) -> None:
    grid = grid_of(quickstart.client.app)
    nodes, start = list(grid.nodes), first_model(quickstart)
    grid.meddlers = {nodes[0]: broken, nodes[1]: add(**{"num-examples": 10**9})}
    strategy = Strategy()
    (made,) = models_of(strategy, grid, start, rounds=1)
    assert all(np.isfinite(v).all() for v in made.values())
    assert f"{nodes[0]} not_finite" in caplog.text
    assert f"{nodes[1]} declares 1000000000 samples" in caplog.text
    grid.meddlers = {nodes[2]: lambda message, reply: [Message(Error(7, "disk full"), reply_to=message)]}
    models_of(Strategy(), grid, start, rounds=1)
    assert f"{nodes[2]} raised: disk full" in caplog.text


def test_a_filter_and_a_selector_do_what_they_do_elsewhere(quickstart: Any, caplog: pytest.LogCaptureFixture) -> None:
    grid = grid_of(quickstart.client.app)
    nodes = sorted(grid.nodes, key=str)
    grid.meddlers = {nodes[0]: far}
    strategy = Strategy(FedAvg(), select=RoundRobin(3), filters=[NormFilter()])
    models_of(strategy, grid, first_model(quickstart), rounds=2)
    assert strategy.run.roster.selected.tolist() == [2, 2, 1, 1]
    assert strategy.run.roster.replied.tolist() == [0, 2, 1, 1]
    assert f"{nodes[0]} update of length" in caplog.text


def test_clients_are_told_what_the_app_says_and_what_the_method_needs(quickstart: Any) -> None:
    grid, heard = grid_of(quickstart.client.app), list[dict[str, Any]]()
    grid.meddlers = dict.fromkeys(
        grid.nodes, lambda message, reply: heard.append(dict(message.content["config"])) or []
    )
    strategy = Strategy(FedProx(mu=0.3), seed=7)
    told = ConfigRecord({"lr": 0.1, "seed": 5, "proximal-mu": 9.0})
    strategy.start(grid, first_model(quickstart), num_rounds=1, train_config=told)
    assert heard[0] == {"lr": 0.1, "seed": 5, "round": 1, "server-round": 1, "mu": 0.3, "proximal-mu": 0.3}
    judged = Strategy("fedrisk", errors=lambda arrays: [0])
    judged.start(grid, first_model(quickstart), num_rounds=1, train_config=ConfigRecord({"lr": 0.1}))
    Strategy("fedrisk").start(grid, first_model(quickstart), num_rounds=1, train_config=ConfigRecord({"lr": 0.1}))
    assert [config.get("extras") for config in heard if "lr" in config] == [None] * 2 * NODES + [
        "squared_errors"
    ] * NODES


def test_a_strategy_that_loses_three_rounds_ends_and_one_that_diverges_at_once(quickstart: Any) -> None:
    grid, start = grid_of(quickstart.client.app), first_model(quickstart)
    grid.meddlers = dict.fromkeys(grid.nodes, lambda message, reply: [])
    with pytest.raises(TooFewReplies, match="round 3 failed 3 times: 0 usable replies"):
        models_of(Strategy(), grid, start, rounds=5)
    grid.meddlers = dict.fromkeys(grid.nodes, broken)
    with pytest.raises(Diverged, match="diverged at round 1"):
        models_of(Strategy(), grid, start)


def test_clients_judge_the_model_weighted_by_their_samples(quickstart: Any) -> None:
    start = first_model(quickstart)
    found = [
        strategy.start(grid_of(quickstart.client.app), start, num_rounds=2, train_config=ConfigRecord({"lr": 0.1}))
        for strategy in (Strategy(), flower.FedAvg())
    ]
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        ours, theirs = (getattr(result, kind) for result in found)
        for number in (1, 2):
            assert {k: pytest.approx(v, rel=1e-6) for k, v in ours[number].items()} == dict(theirs[number])


def handler_of(quickstart: Any) -> Callable[[Request, Site], Reply]:
    """What a stock client does, as a handler of ours."""

    def handler(request: Request, site: Site) -> Reply:
        net = quickstart.task.Net()
        net.load_state_dict({k: torch.tensor(v) for k, v in request.arrays.items()})
        loader = quickstart.task.load_data(site.data, NODES)[0]
        loss = quickstart.task.train(net, loader, 1, request.config["lr"])
        arrays = {k: v.numpy() for k, v in net.state_dict().items()}
        return Reply(arrays, metrics={"train_loss": loss}, n=len(loader.dataset))

    return handler


def test_a_plain_fleet_of_stock_clients_gives_what_a_local_fleet_gives(quickstart: Any) -> None:
    grid, start = grid_of(quickstart.client.app), unpack(first_model(quickstart))
    population = {str(node): i for i, node in enumerate(grid.nodes)}
    ends = []
    for fleet in (FlowerFleet(grid, 5, plain=True), LocalFleet(handler_of(quickstart), population)):
        run = Run(start)
        rows = [
            done.row
            for done in train(run, fleet, rounds=ROUNDS, select=Uniform(3), aggregate=FedAvg(), config={"lr": 0.1})
        ]
        ends.append((run, rows))
    (plain, its), (local, others) = ends
    assert grid.greetings == 0  # nobody was asked for a name
    assert plain.roster.ids == sorted(population)
    assert furthest([plain.arrays], [local.arrays]) < 1e-6  # a local fleet's threads add up in another order
    assert [row["train_train_loss"] for row in its] == pytest.approx([row["train_train_loss"] for row in others])


def test_a_plain_fleet_refuses_what_stock_clients_cannot_answer(quickstart: Any) -> None:
    grid = grid_of(quickstart.client.app)
    fleet = FlowerFleet(grid, 5, plain=True)
    first, *others = fleet.clients()
    with pytest.raises(ConfigError, match="answer 'train' and 'evaluate' with a model alone, not 'probe'"):
        fleet.ask({first: Request("probe", {})})
    start, config = unpack(first_model(quickstart)), {"lr": 0.1, "round": 1, "extras": "squared_errors"}
    grid.meddlers = {int(first): add(squared_errors=[0, 4]), int(others[0]): add(squared_errors=[256])}
    answers = fleet.ask(dict.fromkeys([first, *others], Request("train", start, config)))
    assert answers.replies[first].extras["squared_errors"].dtype == np.uint8
    assert {c: why.kind for c, why in answers.failures.items()} == dict.fromkeys(others, "missing_key") | {
        others[0]: "malformed"
    }
    (judged,) = fleet.ask({first: Request("evaluate", start, {"round": 1})}).replies.values()
    assert judged.metrics.keys() == {"eval_loss", "eval_acc"}


def test_the_pages_code_runs_as_it_stands(
    quickstart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (EXAMPLE.parents[1] / "docs" / "flower.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    own = ("plain=True", "initial_arrays(context)", "PathologicalPartitioner(")
    plain, stock, dealt = (next(block for block in code if words in block) for words in own)
    context = Context(7, 1, {}, RecordDict(), {"recipe": "quickstart", "clients": 3})
    space: dict[str, Any] = {}
    exec(plain, space)
    space["app"](grid_of(quickstart.client.app), context)
    assert capsys.readouterr().out == "1 3\n2 3\n"
    exec(stock, space)
    grid = LoopGrid(space["client"], **context.run_config)
    for i in range(3):
        grid.join(**{"partition-id": i})
    space["server"](grid, context)
    assert re.fullmatch(r"\[.*\] 0\.\d\n", capsys.readouterr().out)
    monkeypatch.chdir(tmp_path)
    exec(dealt, space)
    assert 'name = "dealt"' in (space["result"].folder / "config.toml").read_text()
