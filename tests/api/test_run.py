"""`mutirao.run`: five lines of Python make the run that the command line and a loop by hand would make."""

import copy
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mutirao as mu
from iris import IrisConfig, iris_task
from mutirao.aggregation import FedYogi
from mutirao.cli import main
from mutirao.config import setting
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run, train
from mutirao.errors import ConfigError
from mutirao.partitioning import dirichlet
from mutirao.randomness import rng
from mutirao.selection import Uniform
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.optimizers import arrays_of
from mutirao.training.samples import Samples, virtual_clients
from mutirao.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("without_pictures")

X, Y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
SMALL: dict[str, Any] = {"clients": 8, "per_round": 4, "rounds": 3, "lr": 0.3}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_is_the_same_run_as_by_hand() -> None:
    result = mu.run(net, (X, Y), **SMALL, partition="dirichlet", alpha=0.3, aggregate="fedyogi")

    order = rng(0, 0, "test").permutation(len(Y))
    kept = np.sort(order[: round(0.2 * len(Y))])
    rest = np.setdiff1d(np.arange(len(Y)), kept)
    parts = dirichlet(Y[rest], 8, 0.3, rng(0, 0, "partition"))
    trainer = Trainer(net, lr=0.3)
    run = Run(trainer.initial(0), seed=0)
    fleet = LocalFleet(trainer, virtual_clients(X, Y, [rest[p] for p in parts]))
    for _ in train(run, fleet, rounds=3, select=Uniform(4), aggregate=FedYogi()):
        pass
    assert result.digest == digest(run.arrays)
    judged = trainer.evaluate(run.arrays, Samples(X, Y, kept))
    assert result.final["accuracy"] == judged["accuracy"]


def test_a_module_starts_with_its_own_weights_and_is_left_as_it_is() -> None:
    module = net()
    before = copy.deepcopy(arrays_of(module))
    result = mu.run(module, (X, Y), **SMALL)
    assert digest(arrays_of(module)) == digest(before)
    assert digest(result.arrays(0)) == digest(before)
    assert result.digest != digest(before)
    assert mu.run(module, (X, Y), **SMALL).digest == result.digest
    assert mu.run(module, TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), **SMALL).digest == result.digest


def test_what_makes_a_module_is_started_by_the_seed() -> None:
    digests = [mu.run(net, (X, Y), **SMALL, seed=seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_the_model_given_back_judges_as_the_run_was_judged() -> None:
    result = mu.run(net, (X, Y), test=(X[:300], Y[:300]), **SMALL)
    x = torch.from_numpy(X[:300])
    for which, figures in (("best", result.best), ("last", result.final), (3, result.final)):
        module = result.model(which)  # type: ignore[arg-type]
        assert not module.training
        found = (module(x).argmax(-1).numpy() == Y[:300]).mean()
        assert found == pytest.approx(figures["accuracy"])
    assert result.best["accuracy"] == max(result.history["accuracy"])
    with pytest.raises(ConfigError, match="round 9: its weights are not in"):
        result.model(9)


def test_it_goes_on_with_the_same_model_and_data_and_with_no_other() -> None:
    module, other = net(), net()
    short = mu.run(module, (X, Y), **SMALL | {"rounds": 1}, out="a")
    whole = mu.run(module, (X, Y), **SMALL, out="b")
    assert mu.run(module, (X, Y), **SMALL, out="a", resume=True).digest == whole.digest != short.digest
    changed = X.copy()
    changed[7, 3] += 1
    tanh = nn.Sequential(module[0], nn.Tanh(), module[2])  # type: ignore[index]  # the same weights
    for wrong, named in (
        (lambda: mu.run(other, (X, Y), **SMALL, out="a", resume=True), "model cannot change"),
        (lambda: mu.run(tanh, (X, Y), **SMALL, out="a", resume=True), "model cannot change"),
        (lambda: mu.run(module, (changed, Y), **SMALL, out="a", resume=True), "data cannot change"),
        (lambda: mu.run(module, (X, Y), test=0.3, **SMALL, out="a", resume=True), "test cannot change"),
        (lambda: mu.run(module, (X, Y), **SMALL | {"lr": 0.1}, out="a", resume=True), "lr cannot change"),
        (lambda: mu.run("quickstart", out="a", resume=True), "recipe cannot change"),
        (lambda: mu.run(module, (X, Y), **SMALL, out="a"), "out: a already holds a run; pass resume=True"),
    ):
        with pytest.raises(ConfigError, match=named):
            wrong()


def test_a_schedule_over_the_rounds_keeps_their_number() -> None:
    mu.run(net, (X, Y), **SMALL | {"rounds": 2}, schedule="cosine", out="a")
    with pytest.raises(ConfigError, match="rounds cannot change"):
        mu.run(net, (X, Y), **SMALL, schedule="cosine", out="a", resume=True)


def test_the_folder_is_one_that_every_command_reads() -> None:
    result = mu.run(net(), (X, Y), **SMALL)
    assert result.folder == Path("runs/python")
    table = tomllib.loads(Path("runs/python/config.toml").read_text())
    assert table["recipe"] == "python"
    assert table["model"].startswith("Sequential ")
    assert table["data"].startswith("tuple, 1797 samples, ")
    assert mu.run(net(), (X, Y), **SMALL).folder == Path("runs/python-2")
    for words in (["verify", "runs/python"], ["report", "runs/python"], ["plot", "runs/python", "curves"]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
    page = (result.folder / "report.html").read_text()
    assert "call mutirao.run again" in page
    assert "mutirao run config.toml" not in page
    for words in (
        ["run", "runs/python/config.toml"],
        ["run", "python", "--resume", "--out", "runs/python"],
        ["forget", "runs/python", "--client", "c1", "--out", "w"],
        ["replay", "runs/python", "--set", "select=aoi"],
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert "was started from Python with mutirao.run" in done.output
        assert done.output.count("\n") == 1


def test_named_recipes_come_through_the_same_door() -> None:
    settings = {"rounds": 2, "clients": 10, "per_round": 4, "epochs": 1}
    result = mu.run("quickstart", **settings, alpha=0.9, settings={"select": "aoi"})
    words = ["rounds=2", "clients=10", "per_round=4", "epochs=1", "partition.alpha=0.9", "select=aoi"]
    done = CliRunner().invoke(main, ["run", "quickstart", "--json", *(w for s in words for w in ("--set", s))])
    assert json.loads(done.stdout)["digest"] == result.digest
    assert isinstance(result.model(), nn.Module)
    again = mu.run(result.folder / "config.toml", out="again")
    assert again.digest == result.digest
    assert mu.run("runs/quickstart/config.toml", rounds=1, out="less").summary["rounds"] == 1
    with pytest.raises(ConfigError, match="unknown setting 'target'"):
        mu.run("quickstart", target="x")
    with pytest.raises(ConfigError, match="no recipe is called 'quikstart'; did you mean 'quickstart'"):
        mu.run("quikstart")
    with pytest.raises(ConfigError, match="data: a recipe takes it as a setting, not as a tuple"):
        mu.run("quickstart", (X, Y))


@dataclass(frozen=True, kw_only=True)
class TargetConfig(IrisConfig):
    target: str = setting("kind", "the column to learn")
    test: float = setting(0.2, "the share to judge by")


def test_what_a_recipe_calls_as_the_door_does_is_its_own_setting() -> None:
    own = mu.Recipe(TargetConfig, iris_task, name="own")
    result = mu.run(own, target="hue", test=0.3, data="x.csv")
    table = tomllib.loads((result.folder / "config.toml").read_text())
    assert (table["recipe"], table["target"], table["test"], table["data"]) == ("own", "hue", 0.3, "x.csv")
    with pytest.raises(ConfigError, match="the clients of this recipe do not train one torch module"):
        result.model()
    with pytest.raises(ConfigError, match="test: 'much' is not a number"):
        mu.run(own, test="much")


def test_a_recipes_own_model_is_a_setting_and_a_module_may_be_named() -> None:
    linear = mu.run("tabular", model="linear", data="wine", clients=3, rounds=1, out="linear")
    assert tomllib.loads((linear.folder / "config.toml").read_text())["model"] == "linear"
    assert sorted(linear.arrays()) == ["bias", "weight"]
    x, y, few = X, Y, {"rounds": 1, "clients": 3}
    assert mu.run(net, (x, y), **few, out="a").digest == mu.run(model=net, data=(x, y), **few, out="b").digest
    with pytest.raises(ConfigError, match="model: it is an argument of mutirao"):
        mu.run(net, (x, y), model="linear", out="c")
    with pytest.raises(ConfigError, match="model: expected a torch module"):
        mu.run()


def test_a_run_is_loaded_from_its_folder() -> None:
    done = mu.run(net(), (X, Y), **SMALL)
    found = mu.load(done.folder)
    assert (found.best, found.final, found.digest) == (done.best, done.final, done.digest)
    with pytest.raises(ConfigError, match="which torch module its weights belong to is not known"):
        found.model()
    x = torch.from_numpy(X[:9])
    assert torch.equal(mu.load(done.folder, model=net).model()(x), done.model()(x))
    with pytest.raises(ConfigError, match="give the same module"):
        mu.load(done.folder, model=lambda: nn.Linear(64, 10)).model()
    mu.run("quickstart", rounds=1, epochs=1, out="q")
    assert isinstance(mu.load("q").model(), nn.Module)
    with pytest.raises(ConfigError, match="nowhere holds no finished run"):
        mu.load("nowhere")


def own_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, y, label_smoothing=0.1)


def test_loss_and_optimiser_may_be_ones_own() -> None:
    plain = mu.run(net, (X, Y), **SMALL)
    smooth = mu.run(net, (X, Y), **SMALL, loss=own_loss)
    radam = mu.run(net, (X, Y), **SMALL | {"lr": 0.01}, optimizer=torch.optim.RAdam)
    named = mu.run(net, (X, Y), **SMALL | {"lr": 0.01}, optimizer="adamw")
    assert len({r.digest for r in (plain, smooth, radam, named)}) == 4
    said = [tomllib.loads((r.folder / "config.toml").read_text()) for r in (smooth, radam, named)]
    assert [t["loss"] for t in said] == ["own_loss", "cross_entropy", "cross_entropy"]
    assert [t["optimizer"] for t in said] == ["sgd", "RAdam", "adamw"]


def test_a_transform_changes_what_is_trained_on() -> None:
    def shift(x: Tensor, rng: np.random.Generator) -> Tensor:
        return x + float(rng.normal()) * 0.1

    digests = [mu.run(net, (X, Y), **SMALL, transform=t).digest for t in (shift, shift, None)]
    assert digests[0] == digests[1] != digests[2]


def test_of_a_partly_frozen_module_only_the_rest_travels_and_all_of_it_comes_back() -> None:
    module = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    module[0].requires_grad_(False)
    result = mu.run(module, (X, Y), **SMALL, out="a")
    assert sorted(result.arrays()) == ["2.bias", "2.weight"]
    made = result.model()
    assert torch.equal(made[0].weight, module[0].weight)  # type: ignore[index]
    assert not torch.equal(made[2].weight, module[2].weight)  # type: ignore[index]
    other = copy.deepcopy(module)
    other[0].weight.data[0, 0] += 1
    with pytest.raises(ConfigError, match="model cannot change"):
        mu.run(other, (X, Y), **SMALL | {"rounds": 4}, out="a", resume=True)


def test_a_summary_that_was_tampered_with_is_still_shown() -> None:
    done = mu.run(net, (X, Y), **SMALL, out="a")
    told = json.loads(Path("a/summary.json").read_text())
    told |= {"best": {"accuracy": "<b>", "loss": 1}, "final": 3, "best_round": [], "judge": "accuracy"}
    Path("a/summary.json").write_text(json.dumps(told))
    found = mu.load("a")
    assert (found.best, found.final, found.best_round) == ({"loss": 1}, {}, 0)
    assert repr(found) == "Result(a: 3 rounds)"
    assert "<td>accuracy</td><td>-</td><td>-</td>" in found._repr_html_()
    assert done.digest == found.digest


class Wrong(nn.Module):
    def __init__(self) -> None:
        raise RuntimeError("no\nluck")


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        ((None, (X, Y)), {}, "model: expected a torch module"),
        ((3, (X, Y)), {}, "model: expected nn.Module, got int; give an nn.Module"),
        ((lambda: 3, (X, Y)), {}, "model: expected a factory of nn.Module, but it returned int"),
        ((nn.Linear, (X, Y)), {}, "model: Linear() failed"),
        ((Wrong, (X, Y)), {}, "model: Wrong() failed: no luck"),
        ((nn.LazyLinear(10), (X, Y)), {}, "model: lazy layers have no shape yet"),
        ((net,), {}, "data: expected data for the model, got None"),
        ((net, 7), {}, "data: "),
        ((net, "digits"), {}, "data: "),
        ((net, {}), {}, "data: an empty dict"),
        ((net, (X, Y[:-1])), {}, "do not belong together"),
        ((net, (X, Y)), {"client": "hospital"}, "client='hospital': a tuple has no columns"),
        ((net, (X, Y)), {"test": 1.5}, "test: expected a share between 0 and 1 or a data set, got 1.5"),
        ((net, (X, Y)), {"test": 0}, "test: expected a share between 0 and 1 or a data set, got 0"),
        ((net, (X, Y)), {"loss": "mse"}, "loss: 'mse' cannot be called"),
        ((net, (X, Y)), {"optimizer": "adm"}, "optimizer: 'adm' is not a choice; did you mean 'adam'"),
        ((net, (X, Y)), {"partition": "by_key"}, "partition: no part is called 'by_key'"),
        ((net, (X, Y)), {"partition": "dealt"}, "partition=dealt: the data do not name their clients"),
        ((net, (X, Y)), {"settings": {"model": "x"}}, "model: it is an argument of mutirao.run"),
        ((net, (X, Y)), {"progress": "loud"}, "progress: 'loud' is none of auto, lines, quiet"),
        ((net, (X, Y)), {"clients": 5000}, "partition=dirichlet: 5000 clients"),
        ((net, (X, X[:, 0])), {"partition": "dirichlet"}, "partition=dirichlet: this partition splits by class"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_leaves_nothing(
    arguments: tuple[Any, ...], keywords: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        mu.run(*arguments, **keywords)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(Path().iterdir())


def test_it_is_quiet_in_a_pipe_and_says_lines_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    mu.run(net, (X, Y), **SMALL)
    assert capsys.readouterr() == ("", "")
    mu.run(net, (X, Y), **SMALL, progress="lines")
    assert "round 3/3" in capsys.readouterr().err
