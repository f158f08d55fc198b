"""Over Flower's wire the recommender gives the same model to the bit; rows of items travel, and nothing of the user."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message

from loopgrid import LoopGrid, identity
from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run
from mutirao.core.sparse_rows import ROWS
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.flower.client import STATE
from mutirao.experiments.task import find
from mutirao.flower.messages import unpack
from mutirao.simulation.local_fleet import LocalFleet

__all__ = ["identity"]  # a fixture that holds for all tests here, too

DIMENSION = 7


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["squared", "bpr"])
def test_only_item_rows_and_a_loss_cross_the_wire(loss: str) -> None:
    recipe = find("recsys")
    config = resolve(
        recipe.config, {"clients": 8, "per_round": 5, "rounds": 2, "dimension": DIMENSION, "loss": loss, "negatives": 1}
    )
    task = recipe.prepare(config)
    seen: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = []

    def listen(message: Message, reply: Message) -> list[Message]:
        records = (reply.content.get(name, ArrayRecord()) for name in ("arrays", "extras"))
        arrays, extras = (unpack(record) for record in records)  # type: ignore[arg-type]
        do = str(message.content["request"]["do"])  # type: ignore[call-overload, index]
        seen.append((do, arrays, extras, set(reply.content["metrics"])))  # type: ignore[arg-type]
        return [reply]

    grid = LoopGrid(client_app(lambda _: task))
    for name in task.population:
        grid.meddlers[grid.join(name=name)] = listen
    there, here = Run(task.initial()), Run(task.initial())
    rounds = list(recipe.flow(FlowerFleet(grid, timeout=5, greet=5), config, task, there))
    list(recipe.flow(LocalFleet(task.handler, task.population), config, task, here))
    assert digest(there.arrays) == digest(here.arrays)
    assert [r["bytes_down"] for r in there.history] == [r["bytes_down"] for r in here.history]
    assert all(done.row["failed"] == 0 for done in rounds)
    assert [do for do, *_ in seen].count("rows") == [do for do, *_ in seen].count("train") == 10
    for do, arrays, extras, metrics in seen:
        if do == "rows":
            assert (arrays, set(extras), metrics) == ({}, {"items"}, set())
            assert extras["items"].dtype == np.int32
        else:
            assert (set(arrays), extras, metrics) == ({"items", "items" + ROWS}, {}, {"loss"})
            assert arrays["items"].shape == (len(arrays["items" + ROWS]), DIMENSION)
    assert not any(isinstance(node.state.get(STATE), ArrayRecord) for node in grid.nodes.values())
