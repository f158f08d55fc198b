"""Users who reveal less: blocks, no items, counts in a sum; and settings that contradict each other are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.needs import Needs
from mutirao.core.rounds import Run
from mutirao.core.sparse_rows import BLOCKS, OF, ROWS, expand_rows
from mutirao.errors import ConfigError, Refused
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon
from mutirao.systems.recsys.item_aggregation import TOUCHES, ByItem
from mutirao.systems.recsys.item_privacy import PrivateFedRecon, block_numbers
from mutirao.systems.recsys.ratings import Taste
from mutirao.systems.recsys.trained import embeddings_of_run

METHOD = FedRecon(items=60, dimension=6)
MODEL = {ITEMS: np.random.default_rng(0).normal(0, 0.2, (60, 6)).astype(np.float32)}
TASTE = Taste(np.arange(3, 60, 4, dtype=np.int32), (1 + np.arange(15) % 5).astype(np.float32))
CONFIG = {"seed": 0, "round": 1}
RECIPE = find("recsys")


def test_blocks_have_k_items_or_more_and_hold_every_item_once() -> None:
    for items, block in ((60, 7), (61, 20), (5, 20), (40, 20)):
        sizes = np.bincount(block_numbers(items, block))
        assert sizes.sum() == items
        assert sizes.min() >= min(items, block)


def test_a_user_names_blocks_and_the_same_ones_in_every_round() -> None:
    user = PrivateFedRecon(METHOD, "blocks", block=5)
    few = Site("a", Taste(np.array([2, 9], np.int32), np.array([4, 1], np.float32)))
    named = [user(Request("rows", {}, {"seed": s, "round": r}), few).extras[BLOCKS] for s, r in ((0, 1), (7, 9))]
    np.testing.assert_array_equal(*named)
    blocks = block_numbers(60, 5)
    assert set(blocks[named[0]]) == set(blocks[[2, 9]])
    assert len(named[0]) == sum(int((blocks == b).sum()) for b in set(blocks[[2, 9]]))


def test_who_names_no_rows_refuses_to() -> None:
    with pytest.raises(Refused, match="no client reveals which items"):
        PrivateFedRecon(METHOD, "all")(Request("rows", {}, CONFIG), Site("a", TASTE))


def test_on_the_rows_of_its_blocks_a_user_does_what_it_does_on_the_whole() -> None:
    user = PrivateFedRecon(METHOD, "blocks", block=5, touch=0.1)
    rows = user(Request("rows", {}, CONFIG), Site("a", TASTE)).extras[BLOCKS]
    part = user(Request("train", {ITEMS: MODEL[ITEMS][rows], ITEM_ROWS: rows}, CONFIG), Site("a", TASTE))
    whole = METHOD(Request("train", MODEL, CONFIG), Site("a", TASTE))
    np.testing.assert_array_equal(part.arrays[ITEM_ROWS], whole.arrays[ITEM_ROWS])
    np.testing.assert_array_equal(part.arrays[ITEMS], whole.arrays[ITEMS])
    np.testing.assert_array_equal(part.arrays[TOUCHES + ROWS], whole.arrays[ITEM_ROWS])
    assert part.n == 1
    with pytest.raises(ValueError, match="not sent the rows it asked for"):
        user(Request("train", {ITEMS: MODEL[ITEMS][:9], ITEM_ROWS: rows[:9]}, CONFIG), Site("a", TASTE))


@pytest.mark.parametrize("rows", [np.array([1, 1]), np.array([5, 60]), np.array([0.5, 1.0]), np.arange(5)])
def test_absurd_rows_are_that_clients_failure_alone(rows: Any) -> None:
    request = Request("train", {ITEMS: MODEL[ITEMS][:2], ITEM_ROWS: rows}, CONFIG)
    answer = PrivateFedRecon(METHOD, "blocks").many({"a": request}, {"a": Site("a", TASTE)})["a"]
    assert isinstance(answer, Failure)
    assert "not sent the rows it asked for" in answer.reason


def test_the_mean_by_item_is_the_same_when_only_sums_are_seen() -> None:
    draw, replies = np.random.default_rng(1), {}
    for k in range(6):
        rows = np.sort(draw.choice(60, 9, replace=False)).astype(np.int32)
        values = MODEL[ITEMS][rows] + draw.normal(0, 0.1, (9, 6)).astype(np.float32)
        replies[f"u{k}"] = Reply({ITEMS: values, ITEM_ROWS: rows}, n=9)
    plain = ByItem()(MODEL, replies, {}).arrays[ITEMS]
    full, counts = np.zeros((60, 6)), np.zeros(60)
    for reply in replies.values():
        full[reply.arrays[ITEM_ROWS]] += reply.arrays[ITEMS] - MODEL[ITEMS][reply.arrays[ITEM_ROWS]]
        counts[reply.arrays[ITEM_ROWS]] += 0.1
    mean = {ITEMS: (MODEL[ITEMS] + full / 6).astype(np.float32), TOUCHES: (counts / 6).astype(np.float32)}
    current = {**MODEL, TOUCHES: np.zeros(60, np.float32)}
    part = ByItem(sums="exact")
    summed = part(current, {f"u{k}": Reply(mean, n=1) for k in range(6)}, {})
    assert part.mean_only
    assert part.needs == Needs()
    np.testing.assert_allclose(summed.arrays[ITEMS], plain, atol=2e-6)
    assert not summed.arrays[TOUCHES].any()


def test_noised_counts_are_averaged_over_the_rounds() -> None:
    part, memory = ByItem(sums="noised", shrinkage=1.0), {}
    current = {ITEMS: np.zeros((2, 3)), TOUCHES: np.zeros(2)}
    for counts in ([0.4, -0.2], [0.2, 0.2]):  # tenths of a touch
        mean = {ITEMS: np.ones((2, 3)), TOUCHES: np.array(counts)}
        made = part(current, {"everybody": Reply(mean, n=10)}, memory).arrays[ITEMS]
    np.testing.assert_allclose(made, np.repeat([[10 / (30 + 1)], [10 / (0 + 1)]], 3, 1))


def test_rows_are_spread_to_a_table_of_the_length_that_was_told() -> None:
    rows, total = np.array([1, 3], np.int32), np.array([5])
    sent = {"t": np.ones((2, 2)), "t" + ROWS: rows, "t" + OF: total, "b": np.zeros(1)}
    made = expand_rows(sent)
    assert made.keys() == {"t", "b"}
    np.testing.assert_array_equal(made["t"], [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]])
    assert expand_rows({"t": sent["t"]})["t"] is sent["t"]
    for wrong in ({"t" + OF: np.array([2**50])}, {"t" + OF: np.array([3])}, {"t" + ROWS: np.array([3, 1])}):
        with pytest.raises(ValueError, match="'t@"):
            expand_rows({**sent, **wrong})


def made_with(**settings: Any) -> tuple[np.ndarray, list[dict[str, Any]]]:
    small = {"rounds": 2, "per_round": 6, "dimension": 6, "evaluate_every": 2}
    config = resolve(RECIPE.config, small, list(settings.items()))
    task = RECIPE.prepare(config)
    run = Run(task.initial(), seed=config.seed)
    rows = [d.row for d in RECIPE.flow(LocalFleet(task.worker, task.population), config, task, run)]
    assert [row["failed"] for row in rows] == [0, 0]
    return run.arrays[ITEMS], rows


def test_a_secure_sum_over_whole_tables_or_blocks_gives_the_plain_model() -> None:
    plain, _ = made_with()
    masked, _ = made_with(secure="secagg+", download="all")
    blocks, _ = made_with(secure="secagg+", download="blocks")
    assert np.abs(plain - masked).max() < 1e-5
    np.testing.assert_array_equal(masked, blocks)


def test_users_add_their_share_of_the_noise_before_it_is_masked() -> None:
    """With a noise of 0 left to the server, the model of a run is noised all the same."""
    common = {"secure": "secagg+", "download": "all", "privacy": "central", "select": "everyone", "clients": 6}
    common |= {"rounds": 2, "aggregate": "fedavg", "privacy.clip": 0.5}
    noised, rows = made_with(**common, **{"privacy.noise": 1.0, "secure.noise": 1.0})
    start = RECIPE.prepare(resolve(RECIPE.config, {"dimension": 6, "clients": 6})).initial()[ITEMS]
    spread_of = float((noised - start).std())  # two rounds of sqrt(6) 0.5 / 6
    assert spread_of == pytest.approx((2 * 6) ** 0.5 * 0.5 / 6, rel=0.1)
    assert rows[-1]["epsilon"] > 0
    with pytest.raises(ConfigError, match="a share of the noise of privacy=central"):
        made_with(secure="secagg+", download="all", **{"secure.noise": 1.0})


@pytest.mark.parametrize("settings", [{"download": "all"}, {"privacy": "central"}], ids=str)
def test_a_recorded_run_ends_and_its_items_can_be_served(settings: dict[str, Any], tmp_path: Path) -> None:
    small = {"rounds": 2, "per_round": 6, "dimension": 6, "evaluate_every": 2}
    summary = execute("recsys", resolve(RECIPE.config, small, list(settings.items())), tmp_path / "run", pictures=False)
    assert summary["rounds"] == 2
    assert embeddings_of_run(tmp_path / "run").vectors.shape == (400, 6)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"secure": "secagg+"}, "download=touched reveals which items a user rated, which secure=secagg"),
        ({"privacy": "local"}, "download=touched reveals which items a user rated, which privacy=local"),
        ({"download": "blocks"}, "the rows it sends back would reveal them"),
        ({"download": "blocks", "privacy": "central"}, "the rows it sends back would reveal them"),
        ({"block": 1}, "block: 1 is too small"),
    ],
)
def test_a_promise_that_another_setting_breaks_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made_with(**settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_asked_of_users_is_what_a_policy_lists() -> None:
    for settings, requests, extras in (
        ({}, True, (ITEMS,)),
        ({"download": "all"}, False, ()),
        ({"download": "blocks", "secure": "secagg+"}, True, (BLOCKS,)),
    ):
        config = resolve(RECIPE.config, {}, list(settings.items()))
        found = RECIPE.disclosure(config, RECIPE.prepare(config))
        assert ("rows" in found.requests, found.request_extras, found.extras) == (requests, (), extras)
