"""States of simulated sites in files: only what changed is written, any end is survived, and damage is named."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_run_folder import CONFIG, NAME, in_child, run_until_write, same_run, whole

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import FLEETING, Reply, Request, Site
from mutirao.core.rounds import Run, train
from mutirao.errors import Damaged
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.execute import execute
from mutirao.runs.journals import WASTE
from mutirao.runs.run_folder import Folder, load_run
from mutirao.runs.unlearning import forget
from mutirao.runs.verify import verify
from mutirao.selection import Uniform
from mutirao.simulation import client_states
from mutirao.simulation.local_fleet import LocalFleet

_ = whole  # a fixture: a run with all of its states in every state file
NAMES = [f"c{i}" for i in range(12)]


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any state is much, and there is room in memory for two or three."""
    monkeypatch.setattr(client_states, "FEW", 0)
    monkeypatch.setattr(client_states, "MOST", 2000)


def walk(request: Request, site: Site) -> Reply:
    """Each client remembers all it has done so far."""
    before = site.state.get("sum", np.zeros(100))
    site.state["sum"] = before + request.arrays["w"][0] + int(site.id[1:])
    site.state[FLEETING + "key"] = np.ones(3)
    return Reply({"w": request.arrays["w"] + 0.01 * site.state["sum"][:3]}, n=1)


def rounds(path: Path, until: int, resume: bool = False, keep: int | None = None, lodges: bool = True) -> Run:
    with Folder.open(path) as folder:
        folder.keep_bytes = keep
        fleet, run = LocalFleet(walk, dict.fromkeys(NAMES)), folder.resume("") if resume else Run({"w": np.ones(3)})
        assert run is not None
        if lodges:
            fleet.use_state_store(folder.sites.states)
        if not resume:
            folder.begin(run, "")
        for done in train(run, fleet, rounds=until, select=Uniform(4), aggregate=FedAvg()):
            folder.commit(run, done)
        return run


def files_in(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "checkpoints/sites").iterdir())


def same_states(one: Arrays, two: Arrays) -> bool:
    return digest(one) == digest(two)


@pytest.mark.slow
def test_killed_inside_every_single_write(whole: Path, tmp_path: Path) -> None:
    survived, first = 0, 20  # writes of the first round, which `test_folder` has, too
    for fatal in range(first, 1000):
        out = tmp_path / f"run{fatal}"
        status = in_child(lambda out=out, fatal=fatal: run_until_write(out, fatal))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        execute(NAME, CONFIG, out, resume=True)
        same_run(out, whole)
        assert same_states(load_run(out).sites, load_run(whole).sites)
        survived += 1
        shutil.rmtree(out)
    assert survived == fatal - first > 30  # more than without files for states
    assert files_in(out) == ["states_001", "states_002", "states_003", "states_004"]


def test_a_run_goes_on_bit_for_bit_and_every_checkpoint_has_its_own_states(tmp_path: Path) -> None:
    plain = rounds(tmp_path / "plain", 9, lodges=False)
    filed = rounds(tmp_path / "whole", 9)
    rounds(tmp_path / "parts", 4)
    parts = rounds(tmp_path / "parts", 9, resume=True)
    assert digest(plain.arrays) == digest(filed.arrays) == digest(parts.arrays)
    assert filed.sites == parts.sites == {}
    assert files_in(tmp_path / "whole") == files_in(tmp_path / "parts")
    for number in range(10):
        found = [Folder(tmp_path / name).load(number)[0].sites for name in ("plain", "whole", "parts")]
        assert same_states(found[0], found[1])
        assert same_states(found[0], found[2])
    assert same_states(load_run(tmp_path / "parts").sites, plain.sites)
    assert Folder(tmp_path / "parts").newest(states=False).sites == {}
    assert verify(tmp_path / "parts")[1] == []


def test_a_round_writes_the_states_that_it_changed(tmp_path: Path) -> None:
    rounds(tmp_path, 6)
    files = tmp_path / "checkpoints/sites"
    assert files_in(tmp_path) == [f"states_{n:03d}" for n in range(1, 7)]
    assert [file.stat().st_size // 800 for file in sorted(files.iterdir())] == [4] * 6
    assert not any(k.startswith("sites/") for k in Folder(tmp_path).examine(6)[1])
    assert not any(FLEETING in key for key in Folder(tmp_path).load(6)[0].sites)


def test_files_that_no_checkpoint_needs_are_removed_and_the_others_are_not(tmp_path: Path) -> None:
    reference = rounds(tmp_path / "all", 14)
    rounds(tmp_path / "few", 9, keep=0)
    rounds(tmp_path / "few", 14, resume=True, keep=0)
    folder = Folder(tmp_path / "few")
    assert folder.committed() == [14, 13, 12]
    for number in folder.committed():
        one, two = folder.load(number)[0], Folder(tmp_path / "all").load(number)[0]
        assert same_states(one.sites, two.sites)
        assert digest(one.arrays) == digest(two.arrays)
    assert digest(reference.arrays) == digest(folder.load(14)[0].arrays)
    needed = {filed.path.name for n in (14, 13, 12) for filed in folder.sites._read(mark_of(folder, n)).last.values()}
    assert files_in(tmp_path / "few") == sorted(needed)
    assert len(files_in(tmp_path / "all")) == 14 > len(needed)
    assert verify(tmp_path / "few")[1] == []


def test_old_files_with_little_in_them_are_written_anew(tmp_path: Path) -> None:
    """Every round one client fewer comes: what a file holds of it alone must not keep all of that file."""

    def by_number(roster: Any, number: int, rng: Any) -> list[str]:
        return NAMES[number - 1 :]

    with Folder.open(tmp_path) as folder:
        folder.keep_bytes = 0
        fleet, run = LocalFleet(walk, dict.fromkeys(NAMES)), Run({"w": np.ones(3)})
        fleet.use_state_store(folder.sites.states)
        folder.begin(run, "")
        for done in train(run, fleet, rounds=12, select=by_number, aggregate=FedAvg()):
            folder.commit(run, done)
            index = folder.sites.index
            assert index.taken == sum(index.files.values()) <= WASTE * index.needed + 12_000
            assert index.needed == sum(f.size for f in index.last.values())
    assert files_in(tmp_path)[0] != "states_001"
    again = Folder(tmp_path).load(12)[0].sites
    assert float(again['["c0", "sum"]'][0]) == 1.0  # as its only round left it
    assert len(again) == 12
    assert verify(tmp_path)[1] == []


def mark_of(folder: Folder, number: int) -> list[Any]:
    found: list[Any] = folder.examine(number)[2]["sites"]
    return found


def test_replaced_states_count_among_the_bytes_of_checkpoints(tmp_path: Path) -> None:
    room = 40_000  # of which a round's model and state file take 2 kB, and four states 4 kB
    rounds(tmp_path / "a", 20, keep=room)
    rounds(tmp_path / "b", 11, keep=room)
    rounds(tmp_path / "b", 20, resume=True, keep=room)
    kept = [Folder(tmp_path / name).committed() for name in "ab"]
    assert kept[0] == kept[1]
    assert 3 < len(kept[0]) < 15
    live = 12 * 1000
    assert sum(f.stat().st_size for f in (tmp_path / "a/checkpoints").rglob("*s*_*")) < room + 3 * live


@pytest.mark.parametrize("harm", ["altered", "cut", "gone", "swapped"])
def test_a_damaged_state_is_named_and_the_run_goes_back_to_before_it(harm: str, tmp_path: Path) -> None:
    reference = rounds(tmp_path / "whole", 9)
    rounds(tmp_path / "run", 7)
    file, other = (tmp_path / f"run/checkpoints/sites/states_00{n}" for n in (7, 6))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes({"altered": content, "cut": content[:-9], "swapped": other.read_bytes()}[harm])
    says = "is missing" if harm == "gone" else "was altered or cut off"
    problem, *more = verify(tmp_path / "run")[1]
    assert problem.startswith(f"checkpoints/sites/{file.name}: {says}")
    assert not more
    with pytest.raises(Damaged, match=f"{file.name} {says}"):
        Folder(tmp_path / "run").load(7)
    assert load_run(tmp_path / "run").round == 6
    assert digest(rounds(tmp_path / "run", 9, resume=True).arrays) == digest(reference.arrays)
    assert verify(tmp_path / "run")[1] == []


def test_an_altered_list_of_states_is_named(tmp_path: Path) -> None:
    rounds(tmp_path, 5)
    journal = tmp_path / "checkpoints/sites.journal"
    content = bytearray(journal.read_bytes())
    content[-5] ^= 1
    journal.write_bytes(content)
    assert verify(tmp_path)[1] == ["checkpoints/sites.journal: was altered or cut off"]
    assert rounds(tmp_path, 5, resume=True).round == 5
    assert verify(tmp_path)[1] == []


def test_states_that_grow_are_moved_out_of_the_state_file_when_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_states, "FEW", 6 * 800)
    reference = rounds(tmp_path / "whole", 8)
    facts = [Folder(tmp_path / "whole").examine(n)[2] for n in range(9)]
    first = next(n for n, told in enumerate(facts) if "sites" in told)
    assert 1 < first < 8
    for until in (first - 1, first, first + 1):
        rounds(tmp_path / str(until), until)
        assert digest(rounds(tmp_path / str(until), 8, resume=True).arrays) == digest(reference.arrays)
        assert same_states(load_run(tmp_path / str(until)).sites, load_run(tmp_path / "whole").sites)


def test_who_withdraws_takes_the_state_along_and_the_others_keep_theirs(tmp_path: Path) -> None:
    execute(NAME, CONFIG, tmp_path / "run")
    first: dict[str, int] = {}
    for row in CsvTable(tmp_path / "run/clients.csv").read():
        first.setdefault(row["client"], int(row["round"]))
    late = max(first, key=first.__getitem__)
    record = forget(tmp_path / "run", late, tmp_path / "kept", prepare_only=True)
    assert record["rounds_kept"] == first[late] - 1 > 0
    before = Folder(tmp_path / "run").load(record["rounds_kept"])[0].sites
    assert same_states(load_run(tmp_path / "kept").sites, before)
    forget(tmp_path / "run", late, tmp_path / "without")
    left = load_run(tmp_path / "without").sites
    assert late not in {json.loads(k)[0] for k in left}
    assert sum(int(v) for v in left.values()) == 12  # four rounds of three visits
    assert verify(tmp_path / "without")[1] == []
