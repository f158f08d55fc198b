"""Presets: each is a recipe's settings, and runs on small files of its data's form."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import mutirao
from mutirao.cli.main import main
from mutirao.config import resolve
from mutirao.datasets import DATA_SETS
from mutirao.experiments.presets import expand, presets
from mutirao.experiments.task import NAMES, find

DRAW = np.random.default_rng(0)


def write_idx(home: Path) -> None:
    (home / "fashion-mnist").mkdir()
    for side, count in (("train", 120), ("t10k", 40)):
        x, y = DRAW.integers(0, 256, (count, 28, 28), np.uint8), (np.arange(count) % 10).astype(np.uint8)
        head = [0x803, count, 28, 28], [0x801, count]
        for kind, number, sizes, part in (("images", 3, head[0], x), ("labels", 1, head[1], y)):
            content = np.array(sizes, ">i4").tobytes() + part.tobytes()
            (home / "fashion-mnist" / f"{side}-{kind}-idx{number}-ubyte.gz").write_bytes(gzip.compress(content))


def write_leaf(home: Path) -> None:
    for side, count in (("train", 6), ("test", 2)):
        users = [f"f{k:04d}_00" for k in range(12)]
        data = {
            user: {"x": DRAW.random((count, 784)).round(3).tolist(), "y": [(7 * k + j) % 62 for j in range(count)]}
            for k, user in enumerate(users)
        }
        (home / "femnist" / "data" / side).mkdir(parents=True)
        table = {"users": users, "num_samples": [count] * 12, "user_data": data}
        (home / "femnist" / "data" / side / "all_data_0_niid_0_keep_0.json").write_text(json.dumps(table))


def write_cifar100(home: Path) -> None:
    (home / "cifar-100-binary").mkdir()
    for side, count in (("train", 200), ("test", 100)):
        y = np.arange(count) % 100
        rows = np.concatenate([y[:, None] // 5, y[:, None], DRAW.integers(0, 256, (count, 3072))], axis=1)
        (home / "cifar-100-binary" / f"{side}.bin").write_bytes(rows.astype(np.uint8).tobytes())


WRITE = {"fashion-mnist": write_idx, "femnist": write_leaf, "cifar100": write_cifar100}


def test_every_preset_suits_its_recipe_and_names_a_known_set() -> None:
    assert presets().keys() == WRITE.keys()
    for name, whole in presets().items():
        assert name not in NAMES, "a recipe's own name comes first"
        recipe, table = expand(name)
        config = resolve(find(recipe).config, table)
        assert config.data in DATA_SETS
        assert whole["about"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITE)
def test_a_preset_runs_on_small_files_of_its_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    WRITE[name](tmp_path)
    sets = ["rounds=1", "epochs=1", "clients=10", "per_round=2", "model=small"]
    done = CliRunner().invoke(main, ["run", name, *(word for s in sets for word in ("--set", s))])
    assert done.exit_code == 0, done.output
    kept = (tmp_path / "runs" / name / "config.toml").read_text()
    assert 'recipe = "cifar10"' in kept
    assert f'data = "{presets()[name]["data"]}"' in kept
    assert f"lr = {presets()[name]['lr']}" in kept


def test_python_knows_presets_and_the_list_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_DATA", str(tmp_path))
    write_idx(tmp_path)
    done = mutirao.run("fashion-mnist", rounds=1, epochs=1, clients=10, per_round=2, out=tmp_path / "run")
    assert done.summary["rounds"] == 1
    shown = CliRunner().invoke(main, ["list"]).output
    assert all(f"  {name}" in shown for name in presets())
    assert "learning rate of the clients  [0.03]" in CliRunner().invoke(main, ["list", "femnist"]).output


def test_without_its_data_a_preset_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_DATA", str(tmp_path))
    done = CliRunner().invoke(main, ["run", "cifar100", "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "mutirao data get cifar100 fetches it (169 MB" in done.stderr
