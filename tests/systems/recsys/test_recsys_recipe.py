"""The recommender as a whole: it learns, transfers, resumes, counts what travels and tells what is wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mutirao.config import parse_assignment, resolve
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys.pretrain import Factorisation, pretrain

RECIPE = find("recsys")


def config_of(*sets: str) -> Any:
    small = ["rounds=20", "per_round=20", "dimension=12", "evaluate_every=5"]
    return resolve(RECIPE.config, {}, [parse_assignment(text) for text in (*small, *sets)])


def trained(*sets: str) -> tuple[list[dict[str, Any]], Run, Any]:
    config = config_of(*sets)
    task = RECIPE.prepare(config)
    run = Run(task.initial(), seed=config.seed)
    rows = [d.row for d in RECIPE.flow(LocalFleet(task.handler, task.population), config, task, run)]
    return rows, run, task


def test_it_learns_what_was_planted() -> None:
    rows, _, task = trained("rounds=60", "per_round=50")
    first = task.evaluate(task.initial())
    assert rows[-1]["rmse"] < 0.9 * first["rmse"]
    assert rows[-1]["rmse"] < 0.95, "the noise alone is 0.6, rounding 0.3"
    assert task.judge == "rmse"
    assert not task.higher_is_better


@pytest.mark.parametrize("loss", ["weighted", "bpr"])
def test_implicit_feedback_beats_popularity_by_far(loss: str) -> None:
    sets = ("split=leave_one_out", "rounds=60", "evaluate_every=60", "ridge=2", "per_round=40")
    rows, _, task = trained(f"loss={loss}", "taken=4", *sets)
    popular = np.zeros_like(task.initial()["items"])
    popular[:, 0] = task.population.ratings.recount().catalogue.counts
    assert rows[-1]["hr@10"] > 1.1 * task.evaluate({"items": popular})["hr@10"]
    assert task.judge == "ndcg@10"


@pytest.mark.parametrize(
    "sets",
    [
        ("split=time",),
        ("split=users_by_time",),
        ("fold=3",),
        ("support_by=time", "judge_by=vali"),
        ("biases=false", "ridge=5"),
        ("rebuild=sgd", "passes=3"),
        ("aggregate=fedavg",),
        ("aggregate.over=all",),
        ("engine=plain",),
        ("clients=50",),
        ("samples=10",),
        ("start=consent", "start.epochs=3", "start.begin=pca"),
    ],
)
def test_each_choice_learns(sets: tuple[str, ...]) -> None:
    rows, _, task = trained("rounds=10", *sets)
    assert rows[-1]["rmse"] < task.evaluate(task.initial())["rmse"] + 1e-3


def test_users_are_not_evaluated_on_what_they_were_trained_on() -> None:
    with pytest.raises(ConfigError, match="clients_every: users of recsys train on all their ratings"):
        trained("rounds=1", "clients_every=1")


def test_the_pooled_reference_learns_too() -> None:
    rows, _, task = trained("centralised=true", "rounds=10")
    assert list(task.population) == ["pooled"]
    assert rows[-1]["rmse"] < task.evaluate(task.initial())["rmse"]


def test_what_travels_is_the_same_model_but_fewer_bytes() -> None:
    (few, one, _), (all_rows, other, _) = (trained("rounds=3", f"download={d}") for d in ("touched", "all"))
    assert digest(one.arrays) == digest(other.arrays)
    whole = one.arrays["items"].nbytes
    assert all(row["bytes_down"] == 20 * whole for row in all_rows)
    assert all(row["bytes_down"] < 0.5 * 20 * whole for row in few)
    assert all(row["bytes_up"] < row["bytes_down"] for row in few)


def test_a_better_start_needs_fewer_rounds(tmp_path: Path) -> None:
    from mutirao.systems.recsys.embeddings import save_embeddings
    from mutirao.systems.recsys.recipe import load

    made = pretrain(load(config_of("seed=0")), Factorisation(12, epochs=20))
    save_embeddings(made, tmp_path / "items.safetensors")
    rows, _, _ = trained("rounds=5", "start=transfer", f"start.source={tmp_path}/items.safetensors")
    cold, _, _ = trained("rounds=5")
    assert rows[-1]["rmse"] < cold[-1]["rmse"] - 0.05


def test_a_run_goes_on_to_the_same_bit(tmp_path: Path) -> None:
    whole = execute("recsys", config_of("rounds=8", "evaluate_every=1"), tmp_path / "whole", pictures=False)
    execute("recsys", config_of("rounds=3", "evaluate_every=1"), tmp_path / "parts", pictures=False)
    parts = execute(
        "recsys", config_of("rounds=8", "evaluate_every=1"), tmp_path / "parts", resume=True, pictures=False
    )
    assert parts["digest"] == whole["digest"]
    assert parts["bytes_down"] == whole["bytes_down"]
    assert parts["bytes_up"] == whole["bytes_up"]
    one, two = (
        [{k: v for k, v in row.items() if k != "seconds"} for row in CsvTable(tmp_path / name / "history.csv").read()]
        for name in ("whole", "parts")
    )
    assert one == two


def test_no_vector_of_a_user_is_anywhere_in_the_run_folder(tmp_path: Path) -> None:
    """What is kept are item vectors, counts and losses: the state of the sites is empty."""
    from safetensors import safe_open

    execute("recsys", config_of("rounds=2"), tmp_path, pictures=False)
    for file in (tmp_path / "checkpoints").glob("*.safetensors"):
        with safe_open(file, "numpy") as content:
            assert not [name for name in content.keys() if name.startswith("sites/")]  # noqa: SIM118
            shapes = {name: content.get_tensor(name).shape for name in content.keys()}  # noqa: SIM118
            assert all(12 not in shape for name, shape in shapes.items() if name != "items")
    clients = CsvTable(tmp_path / "clients.csv").read()
    assert {k for row in clients for k in row} == {"round", "client", "try", "replied", "n", "weight", "age", "loss"}


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("data=nowhere",), "nowhere does not exist"),
        (("clients=100000",), "there are only 480 users"),
        (("optimizer=adam",), "train by plain SGD"),
        (("momentum=0.5",), "train by plain SGD"),
        (("batch_size=4",), "a rating a step"),
        (("partition=iid",), "leave it at dirichlet"),
        (("loss=hinge",), "is not a choice"),
        (("dimension=1",), "dimension: 1 is too small"),
        (("start=transfer",), "name a file of item vectors"),
        (("start=transfer", "start.source=nowhere.safetensors"), "nowhere.safetensors does not exist"),
        (("start=consent", "start.users=2.0"), "users is 2.0"),
        (("fold=6",), "fold: 6 is too large"),
        (("fold=2", "split=time"), "use split=users"),
        (("fold=2", "judge_by=vali"), "folds have no validation users"),
        (("aggregate.shrinkage=-1.0",), "at least 0"),
        (("loss=bpr", "taken=6"), "no user has 2 ratings or more"),
    ],
)
def test_what_is_wrong_is_one_line(sets: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trained(*sets)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_user_with_one_rating_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    lines = [f"u{u},i{(u * k) % 30},{1 + (u + k) % 5}" for u in range(20) for k in range(8)]
    (tmp_path / "r.csv").write_text("\n".join([*lines, "lonely,i1,5"]) + "\n")
    rows, _, task = trained(f"data={tmp_path}/r.csv", "columns=user,item,rating", "rounds=2", "per_round=4")
    assert "lonely" not in task.population
    assert rows[-1]["failed"] == 0


@pytest.mark.slow
def test_movielens_reaches_the_bar(real_data: Path) -> None:
    rows, _, _ = trained(f"data={real_data}/ml-1m", "rounds=120", "per_round=50", "dimension=50", "evaluate_every=120")
    assert rows[-1]["rmse"] < 0.907
    quick, _, _ = trained(
        f"data={real_data}/ml-1m", "rounds=1", "per_round=50", "dimension=50", "evaluate_every=1", "start=consent"
    )
    assert quick[-1]["rmse"] < 0.907


def test_the_summary_judges_by_the_lowest_error(tmp_path: Path) -> None:
    execute("recsys", config_of(), tmp_path, pictures=False)
    summary = json.loads((tmp_path / "summary.json").read_text())
    errors = [float(row["rmse"]) for row in CsvTable(tmp_path / "history.csv").read() if "rmse" in row]
    assert summary["best"]["rmse"] == pytest.approx(min(errors))


@pytest.mark.parametrize("sets", [{"device": "cuda"}, {"device": "gpu"}, {"precision": "bf16"}])
def test_a_device_that_nobody_would_use_is_refused(sets: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="trained by kernels for the CPU"):
        find("recsys").prepare(resolve(find("recsys").config, {}, sets.items()))


@pytest.mark.parametrize("loss", ["weighted", "bpr"])
def test_leave_one_out_judges_every_user_by_its_own_latest_item(loss: str) -> None:
    rows, _, task = trained(f"loss={loss}", "split=leave_one_out", "rounds=10", "evaluate_every=10", "ridge=1")
    assert task.judge == "ndcg@10"
    assert len(task.population) == len(task.evaluate.held_out.users)
    assert (
        {"hr@5", "ndcg@20", "mrr@10", "recall@10", "coverage@10", "sampled_hr@10"} <= set(task.metrics) <= set(rows[-1])
    )
    assert rows[-1]["sampled_hr@10"] > rows[-1]["hr@10"]


def test_leave_one_out_is_for_implicit_feedback() -> None:
    with pytest.raises(ConfigError, match="split=leave_one_out ranks items for implicit feedback; set loss=weighted"):
        trained("rounds=1", "split=leave_one_out")


def test_vectors_against_all_items_need_the_whole_matrix() -> None:
    implicit = ("loss=weighted", "split=leave_one_out", "others=all", "rounds=2", "biases=false", "half_life=7")
    with pytest.raises(ConfigError, match="set download=all"):
        trained(*implicit)
    rows, _, task = trained(*implicit, "download=all", "rebuild_weight=0.1")
    assert rows[-1]["bytes_down"] == 20 * task.initial()["items"].nbytes
