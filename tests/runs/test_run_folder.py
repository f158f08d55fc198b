"""The run folder survives: killed inside any write, damaged, foreign, locked, resumed, altered."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mutirao.runs.run_folder
from iris import IrisConfig, iris, iris_task
from mutirao.config import Part, resolve
from mutirao.core.arrays import digest, fingerprint
from mutirao.core.fleet import Answers, Failure, Request, collect
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError, Damaged, TooFewReplies
from mutirao.io import load_arrays, save_arrays
from mutirao.report import write_report
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.execute import execute as make_run
from mutirao.runs.execute import reopen
from mutirao.runs.run_folder import Folder, load_run, save_run
from mutirao.runs.verify import verify
from mutirao.simulation.local_fleet import LocalFleet

NAME = "iris:iris"
CONFIG = resolve(IrisConfig, {})


execute = partial(make_run, report=write_report)  # pictures are tested where they are made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    execute(NAME, CONFIG, out)
    return out


def summary(out: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((out / "summary.json").read_text())
    return content


def same_run(out: Path, reference: Path) -> None:
    """Everything but times and the resume events equals the undisturbed run, and the trail holds."""
    assert summary(out)["digest"] == summary(reference)["digest"]
    for name in ("history", "clients"):
        rows, expected = (
            [{k: v for k, v in row.items() if k != "seconds"} for row in CsvTable(folder / f"{name}.csv").read()]
            for folder in (out, reference)
        )
        assert rows == expected
    assert verify(out)[1] == []


def test_the_contract_of_the_folder(whole: Path) -> None:
    names = {p.name for p in whole.iterdir()}
    assert {"config.toml", "history.csv", "history.json", "clients.csv", "summary.json", "audit.jsonl"} <= names
    assert {"checkpoints", "report.html"} <= names
    header = (whole / "history.csv").read_text().splitlines()[0]
    assert header.startswith("round,seconds,selected,replied,failed,rejected,bytes_down,bytes_up,train_loss,accuracy")
    assert (whole / "clients.csv").read_text().startswith("round,client,try,replied,n,weight,")
    rows = json.loads((whole / "history.json").read_text())
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    arrays, _ = load_arrays(whole / "checkpoints" / "round_004.safetensors")
    assert digest(arrays) == summary(whole)["digest"]
    assert arrays["seen"].dtype == np.int64
    assert arrays["seen"].shape == ()
    _, facts = load_arrays(whole / "checkpoints" / "best.safetensors")
    assert facts["round"] == summary(whole)["best_round"]
    assert verify(whole)[1] == []


def test_config_toml_repeats_the_run_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    name, config = reopen(None, whole, [])
    execute(name, config, tmp_path / "again")
    same_run(tmp_path / "again", whole)


def in_child(work: object) -> int:
    """Run `work` in a forked process; return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
            os._exit(0)
        except BaseException as error:  # a child must never return into pytest
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return os.waitpid(pid, 0)[1]


class DyingFile:
    """Counts every write and rename of the run; dies in the middle of the chosen one."""

    def __init__(self, fatal: int) -> None:
        self.left = fatal

    def due(self) -> bool:
        self.left -= 1
        return self.left < 0


def run_until_write(out: Path, fatal: int) -> None:
    """Execute with resume; SIGKILL ourselves inside write number `fatal`, after half of its bytes."""
    counter = DyingFile(fatal)
    original = Path.open
    replace = Path.replace

    def opened(self: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        file = original(self, mode, *args, **kwargs)  # type: ignore[arg-type, call-overload]
        if "w" in mode or "a" in mode:
            real = file.write

            class Torn:
                def __getattr__(self, name: str) -> object:
                    return getattr(file, name)

                def __enter__(self) -> "Torn":
                    return self

                def __exit__(self, *_: object) -> None:
                    file.close()

                def write(self, content: bytes) -> int:
                    if counter.due():
                        real(content[: len(content) // 2])
                        file.flush()
                        os.kill(os.getpid(), signal.SIGKILL)
                    return int(real(content))

            return Torn()
        return file

    def replaced(self: Path, target: Path) -> Path:
        if counter.due():
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.open, Path.replace = opened, replaced  # type: ignore[method-assign, assignment]
    execute(NAME, CONFIG, out, resume=True)


@pytest.mark.slow
def test_killed_inside_every_single_write(whole: Path, tmp_path: Path) -> None:
    survived = 0
    for fatal in range(1000):
        out = tmp_path / f"run{fatal}"
        status = in_child(lambda out=out, fatal=fatal: run_until_write(out, fatal))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        execute(NAME, CONFIG, out, resume=True)
        same_run(out, whole)
        assert (out / "report.html").exists()
        survived += 1
        shutil.rmtree(out)
    assert survived == fatal > 40  # every write of the run was a place to die once


@pytest.mark.slow
def test_killed_again_and_again_at_random_instants(whole: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    slow = mutirao.runs.run_folder.save_arrays
    kills = 0
    while kills < 60:
        out = tmp_path / f"run{kills}"
        for _ in range(8):
            pid = os.fork()
            if pid == 0:
                mutirao.runs.run_folder.save_arrays = lambda *a, **k: (time.sleep(0.002), slow(*a, **k))[
                    1
                ]  # a slow disk
                try:
                    execute(NAME, CONFIG, out, resume=True)
                    os._exit(0)
                except BaseException as error:
                    print(repr(error), file=sys.stderr)
                    os._exit(1)
            time.sleep(draw.uniform(0.0, 0.08))
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            kills += 1
        else:
            execute(NAME, CONFIG, out, resume=True)
        same_run(out, whole)
        shutil.rmtree(out)


@pytest.mark.parametrize("target", ["state_004.safetensors", "round_004.safetensors"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign", "delete"])
def test_a_damaged_checkpoint_falls_back_to_the_last_whole_one(
    whole: Path, tmp_path: Path, target: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "summary.json").unlink()
    file = out / "checkpoints" / target
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-3] ^= 0xFF
        file.write_bytes(content)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "delete":
        file.unlink()
    else:
        other = tmp_path / "other"
        execute(NAME, resolve(IrisConfig, {"seed": 7}), other)
        shutil.copy(other / "checkpoints" / target, file)
    execute(NAME, CONFIG, out, resume=True)
    assert summary(out)["digest"] == summary(whole)["digest"]
    assert [r["round"] for r in CsvTable(out / "history.csv").read()] == ["1", "2", "3", "4"]
    assert target in caplog.text or (damage, target) == ("delete", "state_004.safetensors")
    if damage not in ("delete",):
        assert file.with_name(target + ".damaged").exists()  # set aside, not thrown away
    assert verify(out)[1] == []


def test_no_whole_checkpoint_is_a_clear_end_that_touches_nothing(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "summary.json").unlink()
    for file in (out / "checkpoints").glob("state_*"):
        file.write_bytes(b"garbage")
    before = (out / "history.csv").read_bytes()
    with pytest.raises(Damaged, match=r"no checkpoint in .* is intact"):
        execute(NAME, CONFIG, out, resume=True)
    assert (out / "history.csv").read_bytes() == before


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    with Folder.open(tmp_path / "run"), pytest.raises(ConfigError, match="in use by another process"):
        execute(NAME, CONFIG, tmp_path / "run")


def test_a_folder_with_a_run_is_refused_without_resume(whole: Path) -> None:
    with pytest.raises(ConfigError, match="already holds a run"):
        execute(NAME, CONFIG, whole)


def test_resume_on_a_finished_run_says_so_and_changes_nothing(whole: Path) -> None:
    before = {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    assert execute(NAME, CONFIG, whole, resume=True)["already"]
    assert {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()} == before


def test_resume_on_an_empty_folder_starts_fresh(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    execute(NAME, CONFIG, tmp_path / "run", resume=True)
    same_run(tmp_path / "run", whole)


def test_a_finished_run_can_be_given_more_rounds(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    execute(NAME, resolve(IrisConfig, {"rounds": 2}), out)
    name, config = reopen(NAME, out, [("rounds", 4)])
    execute(name, config, out, resume=True)
    assert summary(out)["digest"] == summary(whole)["digest"]
    assert verify(out)[1] == []


def test_a_begun_run_keeps_its_settings(whole: Path) -> None:
    with pytest.raises(ConfigError, match="seed cannot change"):
        reopen(NAME, whole, [("seed", 1)])
    with pytest.raises(ConfigError, match="holds a run of 'iris:iris', not of 'quickstart'"):
        reopen("quickstart", whole, [])


def alter(out: Path, file: str, old: str, new: str) -> None:
    text = (out / file).read_text()
    assert old in text
    (out / file).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("config.toml", "lr = 0.1", "lr = 0.2", "config.toml: altered"),
        ("history.csv", "\n2,", "\n9,", "history.csv: the rows of round 2 are missing"),
        ("clients.csv", ",25,", ",26,", "clients.csv: the rows of round 1 were altered"),
        ("summary.json", '"seed": 0', '"seed": 1', "summary.json: altered"),
        ("audit.jsonl", '"round": 3', '"round": 4', "audit.jsonl: line 4 (round) was altered"),
    ],
)
def test_verify_says_exactly_what_was_altered(
    whole: Path, tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    alter(out, file, old, new)
    assert any(said in line for line in verify(out)[1]), verify(out)[1]


AUDITED = ["config.toml", "history.csv", "history.json", "clients.csv", "summary.json", "audit.jsonl"]
AUDITED += [f"checkpoints/{n}.safetensors" for n in ("round_000", "round_004", "state_000", "state_004", "best")]


@pytest.mark.parametrize("file", AUDITED)
def test_verify_names_the_file_of_which_any_one_byte_was_changed(whole: Path, tmp_path: Path, file: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    content = (out / file).read_bytes()
    draw = random.Random(file)
    for at in {0, len(content) // 2, len(content) - 1, *(draw.randrange(len(content)) for _ in range(25))}:
        spoilt = bytearray(content)
        spoilt[at] ^= draw.choice([1, 2, 16, 128])
        (out / file).write_bytes(spoilt)
        assert any(line.startswith(file) for line in verify(out)[1]), (at, content[at], spoilt[at])
    (out / file).write_bytes(content)
    assert verify(out)[1] == []
    (out / file).unlink()
    assert verify(out)[1]


def test_no_file_of_a_run_goes_unaudited_but_pictures_the_page_and_the_log(whole: Path) -> None:
    files = {f.relative_to(whole).as_posix() for f in whole.rglob("*") if f.is_file()}
    rest = {
        name for name in files - {*AUDITED} if not re.fullmatch(r"checkpoints/(round|state)_00\d.safetensors", name)
    }
    assert {name for name in rest if not name.endswith(".png")} <= {".lock", "run.log", "report.html"}


def test_verify_names_what_was_altered_by_somebody_who_knows_the_form(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for key, value in (("elapsed", 1.0), ("seed", 5), ("history", 3), ("rest", None)):
        state = out / "checkpoints" / "state_004.safetensors"
        content = state.read_bytes()
        rest, facts = load_arrays(state)
        del facts["check"]
        if key == "rest":
            rest["memory/more"], value = np.ones(3), None
            facts["rest"] = digest(rest)
        else:
            facts[key] = value
        save_arrays(state, rest, facts | {"check": fingerprint(facts)})
        assert verify(out)[1] == ["checkpoints/state_004.safetensors: it is not the audited one"]
        state.write_bytes(content)
    best = out / "checkpoints" / "best.safetensors"
    arrays, facts = load_arrays(best)
    save_arrays(best, arrays, {"round": facts["round"] + 1})
    assert verify(out)[1] == [f"checkpoints/best.safetensors: it does not say that it is of round {facts['round']}"]
    shutil.copy(out / "checkpoints" / "round_001.safetensors", best)
    assert verify(out)[1] == ["checkpoints/best.safetensors: its arrays are not the audited ones"]
    save_arrays(best, arrays, facts)
    history = json.loads((out / "history.json").read_text())
    (out / "history.json").write_text(json.dumps(history))
    assert verify(out)[1] == ["history.json: altered since the run ended"]


def test_verify_notices_lost_lines_of_the_trail_and_swapped_models(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    lines = (out / "audit.jsonl").read_text().splitlines(keepends=True)
    (out / "audit.jsonl").write_text("".join(lines[:3]))
    assert any("events known to checkpoints/state_004.safetensors are gone" in p for p in verify(out)[1])
    (out / "audit.jsonl").write_text("".join(lines[:2] + lines[3:]))
    assert any("missing, added or out of order before line 3" in p for p in verify(out)[1])
    (out / "audit.jsonl").write_text("".join(lines))
    shutil.copy(out / "checkpoints" / "round_001.safetensors", out / "checkpoints" / "round_002.safetensors")
    assert verify(out)[1] == ["checkpoints/round_002.safetensors: its arrays are not the audited ones"]


KEEPING = [
    ({"keep": "few"}, [9, 8, 7, 4, 2, 1, 0]),
    ({"keep": "all"}, [*range(9, -1, -1)]),
    ({"keep": 4}, [9, 8, 7, 6]),
    ({"keep": 1}, [9]),
    ({"keep": "all", "keep_bytes": 0}, [9, 8, 7]),
    ({"keep": 2, "keep_bytes": 0}, [9, 8]),
]


@pytest.mark.parametrize(("settings", "kept"), KEEPING)
def test_checkpoints_are_kept_as_the_settings_say_and_nothing_else_is_missed(
    settings: dict[str, Any], kept: list[int], tmp_path: Path
) -> None:
    config = replace(CONFIG, rounds=9, **settings)
    told = execute(NAME, config, tmp_path / "run")
    assert Folder(tmp_path / "run").committed() == kept
    assert verify(tmp_path / "run")[1] == []
    files = [f for f in (tmp_path / "run" / "checkpoints").rglob("*") if f.is_file()]
    size = sum(f.stat().st_size for f in files)
    assert told["checkpoints"] == {"kept": kept[::-1], "removed": 10 - len(kept), "bytes": size}
    assert "best.safetensors" in {f.name for f in files}
    said = (tmp_path / "run" / "report.html").read_text()
    assert ("removed (keep=all keeps them)" in said) == (len(kept) < 10)


def test_a_run_that_kept_few_goes_on_to_the_same_model_and_what_is_kept_can_change(tmp_path: Path) -> None:
    execute(NAME, replace(CONFIG, rounds=9, keep="all"), tmp_path / "whole")
    execute(NAME, replace(CONFIG, rounds=5, keep="all"), tmp_path / "run")
    name, config = reopen(None, tmp_path / "run", [("rounds", 9), ("keep", 2)])
    execute(name, config, tmp_path / "run", resume=True)
    assert Folder(tmp_path / "run").committed() == [9, 8]
    same_run(tmp_path / "run", tmp_path / "whole")


def test_what_is_no_way_to_keep_checkpoints_is_refused() -> None:
    for wrong in ("some", 0, 2.5):
        with pytest.raises(ConfigError, match="keep"):
            resolve(IrisConfig, {"keep": wrong})


def test_a_failed_run_records_why_and_can_go_on(whole: Path, tmp_path: Path) -> None:
    task = iris_task(CONFIG)

    class DownInRoundThree(LocalFleet):
        def ask(self, requests: Mapping[str, Request]) -> Answers:
            if next(iter(requests.values())).config["round"] == 3:
                return collect(requests, [(c, Failure("gone", "the site is down")) for c in requests])
            return super().ask(requests)

    out = tmp_path / "run"
    with pytest.raises(TooFewReplies, match=r"round 3 failed 3 times: 0 usable replies, 2 needed .*the site is down"):
        execute(NAME, CONFIG, out, fleet=DownInRoundThree(task.handler, task.population))
    rows = CsvTable(out / "clients.csv").read()
    assert {r["failure"] for r in rows if r["round"] == "3"} == {"gone: the site is down"}
    assert verify(out)[1] == []
    execute(NAME, CONFIG, out, resume=True)
    same_run(out, whole)


def test_run_save_and_load(tmp_path: Path) -> None:
    task = iris_task(CONFIG)
    run = Run(task.initial(), seed=3)
    list(iris.flow(LocalFleet(task.handler, task.population), CONFIG, task, run))
    save_run(run, tmp_path / "run")
    back = load_run(tmp_path / "run")
    assert digest(back.arrays) == digest(run.arrays)
    assert (back.seed, back.round, back.history) == (3, 4, run.history)
    assert digest(back.memory) == digest(run.memory)
    save_run(run, str(tmp_path / "run"))
    assert len(load_run(str(tmp_path / "run")).history) == 4


def test_a_saved_run_holds_the_states_of_its_sites_and_verifies_as_untouched(tmp_path: Path) -> None:
    task = iris_task(CONFIG)
    fleet = LocalFleet(task.handler, task.population)
    run = Run(task.initial(), seed=3)
    for done in iris.flow(fleet, CONFIG, task, run):
        run.sites = fleet.snapshot()
        if done.row["round"] in (2, 4):
            save_run(run, tmp_path / "run")  # the second in the place of the first
    back = load_run(tmp_path / "run")
    assert digest(back.sites) == digest(run.sites)
    assert sum(int(v) for v in back.sites.values()) == 12  # four rounds of three visits
    good, problems = verify(tmp_path / "run")
    assert problems == []
    assert "history.csv, clients.csv: as audited" in good
    text = (tmp_path / "run" / "history.csv").read_text()
    (tmp_path / "run" / "history.csv").write_text(text.replace("\n2,", "\n3,"))
    assert verify(tmp_path / "run")[1] == ["history.csv: altered since the run was saved"]


def test_a_run_is_not_saved_over_a_record(whole: Path) -> None:
    with pytest.raises(ConfigError, match="already contains the record of a run"):
        save_run(Run({}), whole)


def test_parts_keep_their_memory_over_a_resume(tmp_path: Path) -> None:
    config = resolve(IrisConfig, {"rounds": 6}, [("aggregate", "fedavgm")])
    assert config.aggregate == Part("fedavgm", {"lr": 1.0, "momentum": 0.9})
    execute(NAME, config, tmp_path / "straight")
    half = resolve(IrisConfig, {"rounds": 3}, [("aggregate", "fedavgm")])
    execute(NAME, half, tmp_path / "halves")
    execute(*reopen(NAME, tmp_path / "halves", [("rounds", 6)]), tmp_path / "halves", resume=True)
    assert summary(tmp_path / "halves")["digest"] == summary(tmp_path / "straight")["digest"]
