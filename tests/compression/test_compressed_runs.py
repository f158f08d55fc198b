"""Whole runs with compression: any method and fleet, resumed in the middle, and what is refused by name."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg

from loopgrid import NAMES as PEOPLE
from loopgrid import LoopGrid, identity, softmax_task
from mutirao.compression import NAMES, Int8, NoCompression, TopK, compress_of, from_table, to_table
from mutirao.config import resolve
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.policy.pins import content_hash, pin_lines
from mutirao.deploy.rehearsal import local_fleet
from mutirao.errors import ConfigError
from mutirao.experiments.task import Recipe, find
from mutirao.flower.messages import pack
from mutirao.runs.execute import execute
from mutirao.runs.verify import verify_all

_ = identity  # a fixture that every test of Flower's messages needs
SMALL = {"rounds": 3, "clients": 4, "per_round": 3, "epochs": 1}
NUMBERS = 4810  # of the quickstart's model
POLICY = """
[recipes]
quickstart = "{hash}"
[asked]
requests = ["train", "agree"]
[reply]
arrays = ["*"]
metrics = ["*"]
"""


def config_of(compress: str = "topk", recipe: str = "quickstart", **settings: Any) -> Any:
    sets = [("compress", compress), *((k.replace("__", "."), v) for k, v in settings.items())]
    return resolve(find(recipe).config, SMALL, sets)


def history_of(out: Path) -> list[dict[str, str]]:
    with (out / "history.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def sites(compress: str, policies: Path | None = None) -> FlowerFleet:
    """Four nodes that learn of the compression from the run's configuration, under policies or without."""
    words = " ".join(f"{k}={v}" for k, v in (SMALL | {"compress": compress}).items())
    grid = LoopGrid(client_app(), recipe="quickstart", set=words)
    for i in range(4):
        more = {}
        if policies is not None:
            (policies / f"c{i}").mkdir(parents=True)
            (policies / f"c{i}" / "policy.toml").write_text(POLICY.format(hash=content_hash("quickstart")))
            more = {"policy": str(policies / f"c{i}" / "policy.toml")}
        grid.join(name=f"c{i}", **more)
    return FlowerFleet(grid, timeout=20, greet=20)


def test_bytes_up_are_those_of_what_travels(tmp_path: Path) -> None:
    figures = 3 * 8  # loss, accuracy and the number of samples
    wanted = {
        "none": 4 * NUMBERS,
        "int8": NUMBERS + 4 * 4,  # and a scale of each of four arrays
        "topk": 49 * (4 + 2),  # one in a hundred, and where
    }
    for kind, size in wanted.items():
        summary = execute("quickstart", config_of(kind), tmp_path / kind)
        assert [int(row["bytes_up"]) for row in history_of(tmp_path / kind)] == [3 * (size + figures)] * 3
        assert summary["bytes_up"] == 9 * (size + figures)
        assert [int(row["bytes_down"]) for row in history_of(tmp_path / kind)] == [3 * 4 * NUMBERS] * 3


@pytest.mark.parametrize("kind", ["topk", "int8"])
def test_over_flower_s_messages_and_under_policies_the_model_is_that_of_the_local_run(
    kind: str, tmp_path: Path
) -> None:
    config, sets = config_of(kind), [*(SMALL | {"compress": kind}).items()]
    here = execute("quickstart", config, tmp_path / "here", fleet=local_fleet("quickstart", sets))
    there = execute("quickstart", config, tmp_path / "there", fleet=sites(kind))
    judged = execute("quickstart", config, tmp_path / "judged", fleet=sites(kind, tmp_path))
    assert here["digest"] == there["digest"] == judged["digest"]
    assert here["bytes_up"] == there["bytes_up"] == judged["bytes_up"]
    trails = [tmp_path / f"c{i}" / "audit.jsonl" for i in range(4)]
    assert verify_all(tmp_path / "judged", trails)[1] == []
    told = [json.loads(line) for trail in trails for line in trail.read_text().splitlines()]
    assert all(e["arrays"] == sorted(NAMES[kind].keys) for e in told if e["event"] == "sent" and e["do"] == "train")


@pytest.mark.parametrize("kind", ["topk", "int8"])
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(kind: str, tmp_path: Path) -> None:
    more = {"compress__rounding": "stochastic"} if kind == "int8" else {}
    whole = execute("quickstart", config_of(kind, rounds=6, **more), tmp_path / "whole")
    execute("quickstart", config_of(kind, rounds=3, **more), tmp_path / "parts")
    parts = execute("quickstart", config_of(kind, rounds=6, **more), tmp_path / "parts", resume=True)
    assert parts["digest"] == whole["digest"]
    without = execute("quickstart", config_of(kind, rounds=6, compress__feedback=False, **more), tmp_path / "without")
    assert without["digest"] != whole["digest"]  # so what was kept did count


@pytest.mark.parametrize("engine", ["fused", "stacked", "threads", "plain"])
def test_all_ways_of_the_engine_send_the_same_bytes(engine: str, tmp_path: Path) -> None:
    summary = execute("quickstart", config_of("int8", engine=engine), tmp_path / engine)
    assert summary["bytes_up"] == 9 * (NUMBERS + 16 + 24)
    assert summary["final"]["accuracy"] > 0.3


OTHERS: list[dict[str, Any]] = [
    {"aggregate": "fedadam"},
    {"aggregate": "fedmedian"},
    {"aggregate": "krum"},
    {"aggregate": "fedrisk"},
    {"screen": "distance"},
    {"privacy": "central", "privacy__noise": 0.1},
    {"privacy": "local", "privacy__noise": 0.1},
    {"privacy": "dpsgd", "privacy__noise": 0.1},
    {"select": "aoiu"},
    {"devices": "fedcs"},
    {"clients_every": 1},
]


@pytest.mark.parametrize("more", OTHERS, ids=lambda more: "-".join(map(str, more.values())))
def test_it_goes_with_other_parts(more: dict[str, Any], tmp_path: Path) -> None:
    summary = execute("quickstart", config_of("topk", compress__share=0.1, **more), tmp_path / "run")
    assert summary["rounds"] == 3
    assert not any(int(row["failed"]) for row in history_of(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["topk", "int8"])
def test_groups_go_on_with_their_own_models(kind: str, tmp_path: Path) -> None:
    settings = {"clients": 5, "per_round": 4, "samples": 60}
    bytes_up = {}
    for name in ("none", kind):
        summary = execute("groups", config_of(name, "groups", **settings), tmp_path / name)
        assert not any(int(row["failed"]) for row in history_of(tmp_path / name))
        bytes_up[name] = summary["bytes_up"]
    assert bytes_up[kind] < 0.5 * bytes_up["none"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"secure": "secagg+"}, "compress=topk: secure=secagg.* masks every number"),
    ({"centralised": True}, "compress=topk: centralised training sends no updates"),
    ({"recipe": "recsys"}, "compress=topk: the flow of this recipe takes whole updates"),
    ({"compress__share": 0.0}, "compress=topk: share is 0.0"),
    ({"compress__share": 2.0}, "compress=topk: share is 2.0"),
]


@pytest.mark.parametrize(("more", "says"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_right_is_refused_by_name_and_leaves_nothing(
    more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    recipe = more.pop("recipe", "quickstart")
    with pytest.raises(ConfigError, match=says):
        execute(recipe, config_of("topk", recipe, **more), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_of_a_kind_are_checked_as_they_are_read() -> None:
    with pytest.raises(ConfigError, match=r"compress\.rounding: 'up' is not one of nearest, stochastic"):
        config_of("int8", compress__rounding="up")
    with pytest.raises(ConfigError, match="no part is called 'gzip'"):
        config_of("gzip")


def test_a_flow_of_its_own_has_to_say_that_it_takes_compressed_updates() -> None:
    def flow(*given: Any) -> Any:
        return iter(())

    own = Recipe(find("quickstart").config, find("quickstart").task, flow)
    with pytest.raises(ConfigError, match="takes whole updates"):
        own.prepare(config_of())
    assert replace(own, heeds=frozenset({"compress"})).prepare(config_of()).compress == TopK()


@pytest.mark.parametrize("made", [NoCompression(), TopK(0.2, False), Int8("stochastic")], ids=repr)
def test_a_kind_crosses_to_a_site_s_worker_and_back(made: Any) -> None:
    assert from_table(json.loads(json.dumps(to_table(made)))) == made
    with pytest.raises(ConfigError, match="set MUTIRAO_WORKER=off"):
        to_table(type("Own", (TopK,), {})())
    assert compress_of(config_of("none")) == NoCompression()


def test_a_policy_does_not_pin_it() -> None:
    assert "compress" not in pin_lines("quickstart", ())


def test_strategies_of_flower_s_own_are_refused_instead_of_being_sent_an_encoding() -> None:
    task = replace(softmax_task(), compress=TopK())
    grid = LoopGrid(client_app(lambda _: task))
    for name in PEOPLE:
        grid.join(name=name)
    said: list[str] = []
    for node in grid.nodes:
        grid.meddlers[node] = lambda asked, reply: said.append(reply.error.reason) or [reply]
    first = pack(task.initial())
    result = FlowersFedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1).start(grid, first, 1)
    assert not result.train_metrics_clientapp
    assert said == ["compress: a strategy of Flower's own takes whole updates; use none"] * len(PEOPLE)


@pytest.mark.parametrize("aggregate", ["fedbuff", "fedasync"])
def test_replies_that_are_held_back_were_decoded_before(aggregate: str, tmp_path: Path) -> None:
    """A stale reply is an encoding against the model it began with, not against the one of the round it comes in."""
    common = {"rounds": 6, "clients": 8, "per_round": 4, "devices": "tifl", "aggregate": aggregate}
    whole = execute(find("quickstart"), common, tmp_path / "whole")
    short = execute(find("quickstart"), {**common, "compress": "topk"}, tmp_path / "short")
    assert short["rounds"] == 6
    assert short["bytes_up"] < whole["bytes_up"] / 10
    with (tmp_path / "short" / "clients.csv").open() as file:
        assert max(float(row["staleness"]) for row in csv.DictReader(file) if row["staleness"]) > 0
    execute(find("quickstart"), {**common, "compress": "topk", "rounds": 3}, tmp_path / "parts")
    parts = execute(find("quickstart"), {**common, "compress": "topk"}, tmp_path / "parts", resume=True)
    assert parts["digest"] == short["digest"]
