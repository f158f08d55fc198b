"""A trained ranker at work: the run's own figures from a file, as a TREC run, in ONNX, and words for what is wrong."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval
from click.testing import CliRunner

import mutirao
from mutirao.cli.main import main
from mutirao.config import resolve
from mutirao.errors import ConfigError, Damaged
from mutirao.report import execute
from mutirao.systems.ranking.feature_scale import FeatureScale
from mutirao.systems.ranking.letor import write_letor
from mutirao.systems.ranking.ranker import Ranker
from mutirao.systems.ranking.ranking_sources import load_splits
from mutirao.systems.ranking.recipe import Config
from mutirao.systems.ranking.scorers import dense

SMALL: dict[str, Any] = {"queries": 50, "clients": 4, "rounds": 3, "hidden": 6, "lr": 0.05, "aggregate": "fedavg"}
KINDS = [
    {"loss": "grades", "transform": "none"},
    {"loss": "grades", "transform": "log", "layers": 2, "norm": "layer"},
    {"loss": "lambdarank", "transform": "log", "norm": "batch"},
    {"loss": "listnet", "transform": "none"},
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind['loss']}-{kind['transform']}")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A finished run, the file of its test part, and its summary."""
    home = tmp_path_factory.mktemp("run")
    config = resolve(Config, SMALL | request.param)
    summary = execute("ranking", config, home / "run", pictures=False)
    write_letor(home / "test.txt", load_splits(config)[2])
    return home / "run", home / "test.txt", summary


def run_json(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(main, [*map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("which", "figures"), [("best", "best"), ("last", "final")])
def test_a_run_and_its_ranker_say_the_same(made: tuple[Path, Path, Any], which: str, figures: str) -> None:
    run, file, summary = made
    found = run_json("rank", run, file, "--which", which)
    assert found["metrics"] == pytest.approx({k: summary[figures][k] for k in found["metrics"]}, abs=1e-6)
    assert set(found["metrics"]) == {"ndcg@5", "ndcg@1", "ndcg@10", "mrr@5", "mrr@1", "mrr@10"}


def test_scores_trec_and_onnx_are_one(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    import onnxruntime

    run, file, summary = made
    packed = tmp_path / "test.txt.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    run_json(
        "rank", run, packed, "--out", tmp_path / "scores.txt", "--onnx", tmp_path / "r.onnx", "--save", tmp_path / "r"
    )
    run_json("rank", run, file, "--format", "trec", "--out", tmp_path / "run.trec")
    scores = np.loadtxt(tmp_path / "scores.txt")
    data = mutirao.Ranker.load(tmp_path / "r")
    lines = file.read_text().splitlines()
    x = np.array([[float(w.split(":")[1]) for w in line.split()[2:]] for line in lines], np.float32)
    np.testing.assert_array_equal(data.score(x), scores)
    (by_onnx,) = onnxruntime.InferenceSession(tmp_path / "r.onnx").run(None, {"features": x})
    np.testing.assert_allclose(by_onnx, scores, rtol=1e-5, atol=1e-5)
    ranked: dict[str, dict[str, float]] = {}
    for line in (tmp_path / "run.trec").read_text().splitlines():
        query, q0, document, place, score, tag = line.split()
        assert (q0, tag) == ("Q0", "mutirao")
        ranked.setdefault(query, {})[document] = -float(place)  # trec_eval sorts equal scores by name
        assert int(place) == len(ranked[query])
        assert float(score) == scores[int(document.removeprefix("line")) - 1]
    grades: dict[str, dict[str, int]] = {}
    for number, line in enumerate(lines, start=1):
        grade, query = line.split()[:2]
        grades.setdefault(query.removeprefix("qid:"), {})[f"line{number}"] = 2 ** int(grade) - 1
    truth = pytrec_eval.RelevanceEvaluator(grades, {"ndcg_cut.10"}).evaluate(ranked)
    assert np.mean([q["ndcg_cut_10"] for q in truth.values()]) == pytest.approx(summary["best"]["ndcg@10"], abs=1e-6)


def test_documents_go_by_the_names_in_comments(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    run, file, _ = made
    lines = [f"{line} #docid = GX{i} inc = 1" for i, line in enumerate(file.read_text().splitlines())]
    (tmp_path / "named.txt").write_text("\n".join(lines) + "\n")
    run_json("rank", run, tmp_path / "named.txt", "--format", "trec", "--out", tmp_path / "run.trec")
    names = {line.split()[2] for line in (tmp_path / "run.trec").read_text().splitlines()}
    assert names == {f"GX{i}" for i in range(len(lines))}


def test_what_cannot_be_ranked_is_said_in_one_line(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    run = made[0]
    ranker = Ranker.load(run)
    many = ranker.features
    with pytest.raises(ConfigError, match=f"1 to 2, but 1 to {many} are agreed on; missing: 3 to {many}"):
        ranker.score(np.zeros((1, 2)))
    (tmp_path / "few.txt").write_text("1 qid:1 1:0.5\n0 qid:1 1:0.25\n")
    (tmp_path / "more.txt").write_text(f"1 qid:1 {many + 1}:0.5\n")
    for name, words in (("few", "--sparse if it leaves out zeros"), ("more", f"too many: {many + 1}")):
        done = CliRunner().invoke(main, ["rank", str(run), str(tmp_path / f"{name}.txt")])
        assert done.exit_code != 0
        assert words in str(done.exception) + done.output
    assert run_json("rank", run, tmp_path / "few.txt", "--sparse")["documents"] == 2
    with pytest.raises(ConfigError, match=r"ranker.safetensors does not exist"):
        Ranker.load(tmp_path)
    with pytest.raises(Damaged, match="contains no ranker"):
        Ranker.load(run / "checkpoints" / "best.safetensors")


@pytest.mark.parametrize(
    "wrong_settings",
    [{"hidden": 10**12}, {"hidden": "wide"}, {"layers": 10**7}, {"norm": "none such"}, {"metrics": "ndcg@5,none such"}],
)
def test_a_file_that_lies_of_its_network_is_refused(tmp_path: Path, wrong_settings: dict[str, Any]) -> None:
    settings = {"loss": "grades", "hidden": 3, "layers": 1, "norm": "none"}
    settings |= {"metrics": "ndcg@5", "gain": "exponential", "empty": "0"}
    arrays = {k: v.numpy() for k, v in dense(2, 3, 3).state_dict().items()}
    Ranker(FeatureScale((0.0, 0.0), (1.0, 1.0), "none", 2), arrays, settings).save(tmp_path / "good")
    assert len(Ranker.load(tmp_path / "good").score(np.zeros((2, 2)))) == 2
    Ranker(FeatureScale((0.0, 0.0), (1.0, 1.0), "none", 2), arrays, settings | wrong_settings).save(tmp_path / "bad")
    with pytest.raises((Damaged, ConfigError), match=r"ranker|metrics"):
        Ranker.load(tmp_path / "bad")
