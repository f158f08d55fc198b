"""A record of processing says what the run knows, names what leaves, and leaves blanks where it cannot know."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.deploy.processing_record import WORDS, record_facts, write_record
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.unlearning import forget


def made(out: Path, recipe: str = "recsys", **more: Any) -> Path:
    small = {"rounds": 2, "per_round": 5, **({"dimension": 4, "evaluate_every": 1} if recipe == "recsys" else {})}
    execute(recipe, resolve(find(recipe).config, {}, [*{**small, **more}.items()]), out, pictures=False)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("record") / "run", start="consent", **{"start.epochs": 1})


def test_it_says_what_leaves_what_is_kept_and_who_was_pooled(run: Path) -> None:
    facts = record_facts(run)
    summary = json.loads((run / "summary.json").read_text())
    assert facts["leaves"]["requests"] == ["agree", "rows", "train"]
    assert facts["leaves"]["extras"] == ["items"]
    assert "loss" in facts["leaves"]["metrics"]
    assert facts["leaves"]["arrays"] == {"items": [400, 4]}
    assert facts["pooled"]["pooled"] == summary["consent"]["pooled"] == 96
    assert facts["digests"]["model"] == summary["digest"]
    files = [f for f in (run / "checkpoints").rglob("*") if f.is_file()]
    assert facts["kept"]["bytes"] == sum(f.stat().st_size for f in files)
    assert facts["measures"]["privacy"] == {"name": "none"}
    assert facts["download"] == "touched"
    assert facts["trail"]["faults"] == []


def test_what_is_asked_less_is_told_less(run: Path, tmp_path: Path) -> None:
    facts = record_facts(made(tmp_path / "all", download="all"))
    assert "rows" not in facts["leaves"]["requests"]
    assert facts["leaves"]["extras"] == []
    assert facts["pooled"] is None


@pytest.mark.parametrize("lang", sorted(WORDS))
def test_it_is_whole_in_both_languages(run: Path, lang: str) -> None:
    text = write_record(record_facts(run), lang)
    blank = WORDS[lang]["blank"]
    assert text.count(f": {blank}") >= 9, "who, why, how long, where: a run cannot know"
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        f"## {words}" for key, words in WORDS[lang].items() if key.startswith("# ")
    ]
    for said in ("37", "30(1)", "`rows`", "`items`", "`touched`", "96"):
        assert said in text
    assert "{" not in text


def test_both_languages_have_the_same_words() -> None:
    assert WORDS["en"].keys() <= WORDS["pt"].keys()
    for key, text in WORDS["en"].items():
        holes = {part.partition("}")[0] for part in text.split("{")[1:]}
        assert holes == {part.partition("}")[0] for part in WORDS["pt"][key].split("{")[1:]}, key
    with pytest.raises(ConfigError, match="'fr' is none of en, pt"):
        write_record({}, "fr")


def test_a_withdrawal_is_in_it_and_the_name_is_not(run: Path, tmp_path: Path) -> None:
    task = find("recsys").prepare(resolve(find("recsys").config, {}, []))
    everyone = set(find("recsys").prepare(resolve(find("recsys").config, {}, [("start", "consent")])).population)
    leaves = next(name for name in task.population if name not in everyone)
    told = forget(run, leaves, tmp_path / "without")
    facts = record_facts(tmp_path / "without")
    assert facts["withdrawn"]["excluded"] == 1
    assert facts["withdrawn"]["last"]["digest_after"] == told["digest_after"]
    assert facts["pooled"]["pooled"] == 95
    text = write_record(facts, "pt")
    assert "aqueles cujas avaliações reunidas" in text
    assert "client" not in facts["withdrawn"]["last"]


def test_privacy_and_a_broken_trail_are_told(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "quickstart", privacy="central", **{"privacy.noise": 1.0, "clients": 10})
    facts = record_facts(folder)
    assert facts["measures"]["privacy"]["noise"] == 1.0
    assert facts["spent"]["kind"] == "central"
    assert facts["subjects"]["kind"] is None
    lines = (folder / "audit.jsonl").read_text().splitlines()
    (folder / "audit.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert "BROKEN" in write_record(record_facts(folder), "en")


def test_data_that_are_gone_leave_a_reason(tmp_path: Path) -> None:
    data = tmp_path / "ratings.csv"
    data.write_text("user,item,rating\n" + "".join(f"{u},{i},{1 + (u + i) % 5}\n" for u in range(20) for i in range(6)))
    folder = made(tmp_path / "run", data=str(data))
    data.unlink()
    facts = record_facts(folder)
    assert "does not exist" in facts["leaves"]["unknown"]
    assert "could not be read again" in write_record(facts, "en")


def test_the_command_writes_and_never_over_what_was_filled_in(run: Path, tmp_path: Path) -> None:
    shell, out = CliRunner(), tmp_path / "record.md"
    done = shell.invoke(main, ["record", str(run), "--out", str(out), "--lang", "pt"])
    assert done.exit_code == 0, done.output
    assert out.read_text(encoding="utf-8").startswith("# Registro de operações de tratamento: run")
    again = shell.invoke(main, ["record", str(run), "--out", str(out)])
    assert again.exit_code != 0
    assert "somebody may have filled it in" in again.output
    assert json.loads(shell.invoke(main, ["record", str(run), "--json"]).output)["recipe"] == "recsys"
    assert "holds no run" in shell.invoke(main, ["record", str(tmp_path / "nowhere")]).output
