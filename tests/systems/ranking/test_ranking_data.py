"""What the ranking recipe takes for `data`: a folder of folds, one fold, one file, judgements apart."""

import pytest

from mutirao.config import resolve
from mutirao.errors import ConfigError
from mutirao.report import execute
from mutirao.systems.ranking.recipe import Config

FEW = {"rounds": 1, "clients": 2, "per_round": 2, "partition": "by_query"}


def write(file, queries, documents=4):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{k % 3} qid:{q} 1:{k} 2:{q * q % 7} # d{k}\n" for q in queries for k in range(documents)]
    file.write_text("".join(lines))
    return file


def digest(tmp_path, **settings):
    name = "-".join(str(v).replace("/", "_") for v in settings.values())
    return execute("ranking", resolve(Config, FEW | settings), tmp_path / "runs" / name, pictures=False)["digest"]


def test_the_folder_of_a_fold_is_that_fold(tmp_path):
    for fold in (1, 2):
        for k, part in enumerate(("train", "vali", "test")):
            write(tmp_path / f"OHS/Fold{fold}/{part}.txt", range(10 * fold + k, 40, 3 * fold))
    second = digest(tmp_path, data=str(tmp_path / "OHS"), fold=2)
    assert digest(tmp_path, data=str(tmp_path / "OHS/Fold2")) == second
    assert digest(tmp_path, data=str(tmp_path / "OHS/Fold2"), fold=2) == second
    assert (
        digest(tmp_path, data=str(tmp_path / "OHS")) == digest(tmp_path, data=str(tmp_path / "OHS"), fold=1) != second
    )
    with pytest.raises(ConfigError, match="Fold2 is fold 2, but fold=3 is requested"):
        digest(tmp_path, data=str(tmp_path / "OHS/Fold2"), fold=3)


def test_one_file_will_do_and_judgements_may_come_from_another(tmp_path):
    file = write(tmp_path / "one.txt", range(10))
    own = digest(tmp_path, data=str(file))
    assert own != digest(tmp_path, data=str(file), fold=2)
    (tmp_path / "judged").write_text("".join(f"{q} 0 d{k} {k % 3}\n" for q in range(10) for k in range(4)))
    assert digest(tmp_path, data=str(file), qrels=str(tmp_path / "judged")) == own
    (tmp_path / "judged").write_text("".join(f"{q} 0 d{k} {(k + 1) % 3}\n" for q in range(10) for k in range(4)))
    assert digest(tmp_path, data=str(file), fold=1, qrels=str(tmp_path / "judged")) != own
