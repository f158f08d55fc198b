"""Rosters too large for a state file: what a round changed is all it writes, and runs go on bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import digest
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.roster import Roster
from mutirao.core.rounds import Run, train
from mutirao.errors import Damaged
from mutirao.runs import journals
from mutirao.runs.journals import RosterJournal
from mutirao.runs.run_folder import Folder
from mutirao.runs.verify import verify
from mutirao.selection import AoIU
from mutirao.simulation.local_fleet import LocalFleet

NAMES = [f"c{i:02d}" for i in range(40)]


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten clients are many."""
    monkeypatch.setattr(journals, "FEW", 10)


def move(request: Request, site: Site) -> Reply:
    number = int(site.id[1:])
    told = {"loss": 1 / (number + int(request.config["round"])), "entropy": number / 40}
    return Reply({"w": request.arrays["w"] + number}, metrics=told, n=number + 1)


def rounds(path: Path, until: int, resume: bool = False) -> Run:
    with Folder.open(path) as folder:
        run = folder.resume("") if resume else Run({"w": np.zeros(3)})
        assert run is not None
        if not resume:
            folder.begin(run, "")
        fleet = LocalFleet(move, dict.fromkeys(NAMES))
        for done in train(run, fleet, rounds=until, select=AoIU(4), aggregate=FedAvg()):
            folder.commit(run, done)
        return run


def test_a_run_of_many_clients_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = rounds(tmp_path / "whole", 12)
    rounds(tmp_path / "parts", 7)
    parts = rounds(tmp_path / "parts", 12, resume=True)
    assert digest(parts.arrays) == digest(whole.arrays)
    assert digest(parts.roster.to_arrays()) == digest(whole.roster.to_arrays())
    files = [tmp_path / name / "checkpoints/roster.journal" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    for number in (0, 2, 3, 7, 12):  # whole in the state file, and in the journal
        one, two = (Folder(tmp_path / name).load(number)[0].roster.to_arrays() for name in ("whole", "parts"))
        assert digest(one) == digest(two)
    assert verify(tmp_path / "parts")[1] == []


def test_a_round_writes_no_more_than_it_changed(tmp_path: Path) -> None:
    rounds(tmp_path, 12)
    sizes = [Folder(tmp_path).examine(n)[2].get("roster", [0])[0] for n in range(13)]
    steps = np.diff(sizes)
    assert steps[:2].tolist() == [0, 0]
    assert (steps[2:] > 0).all()
    assert steps[3:].max() < steps[2]  # the first has all that came before
    states = [(tmp_path / f"checkpoints/state_{n:03d}.safetensors").stat().st_size for n in (2, 3, 12)]
    assert states[0] > states[1]
    assert abs(states[2] - states[1]) < 64
    assert not any(k.startswith("roster/") for k in Folder(tmp_path).examine(12)[1])


def test_what_was_written_after_the_last_round_is_dropped(tmp_path: Path) -> None:
    rounds(tmp_path / "whole", 9)
    rounds(tmp_path / "cut", 8)
    journal = tmp_path / "cut/checkpoints/roster.journal"
    with journal.open("ab") as file:
        file.write(b"\x10\0\0\0\0\0\0\0half a bl")
    rounds(tmp_path / "cut", 9, resume=True)
    assert journal.read_bytes() == (tmp_path / "whole/checkpoints/roster.journal").read_bytes()


def test_an_altered_journal_is_named_and_rounds_before_it_stand(tmp_path: Path) -> None:
    rounds(tmp_path, 8)
    journal = tmp_path / "checkpoints/roster.journal"
    content = bytearray(journal.read_bytes())
    content[-5] ^= 1
    journal.write_bytes(content)
    assert verify(tmp_path)[1] == ["checkpoints/roster.journal: was altered or cut off"]
    with pytest.raises(Damaged, match=r"roster\.journal was altered or cut off"):
        Folder(tmp_path).load(8)
    assert Folder(tmp_path).newest().round == 7
    assert rounds(tmp_path, 8, resume=True).round == 8
    assert verify(tmp_path)[1] == []
    journal.unlink()
    assert verify(tmp_path)[1] == ["checkpoints/roster.journal: was altered or cut off"]


def test_any_column_that_anybody_writes_is_kept_also_of_newcomers(tmp_path: Path) -> None:
    journal, roster = RosterJournal(tmp_path / "roster.journal"), Roster()
    roster.meet(NAMES[1::2])
    roster.figures["speed"] = np.arange(20.0)
    journal.save(roster)
    first = journal.mark
    journal.save(roster)
    assert journal.mark == first  # nothing changed
    roster.meet(NAMES)
    roster.first_n[roster.row("c00")] = 7
    roster.note("c01", {"odd": -0.0})
    roster.figures["speed"] = np.where(np.arange(40) == 5, np.nan, roster.figures["speed"])
    journal.save(roster)
    again = RosterJournal(journal.path).read(journal.mark)
    for name in again.ids:
        for column in ("speed", "odd"):
            assert repr(again.figure_of(name, column)) == repr(roster.figure_of(name, column))
    assert again.first_n[again.row("c00")] == 7
    assert set(again.ids) == {"c00", *NAMES[1::2]}
    assert RosterJournal(journal.path).read(first).figure_of("c05", "speed") == 2.0


def test_small_rosters_lie_in_the_state_file_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FEW", 10_000)
    rounds(tmp_path, 3)
    _, rest, facts = Folder(tmp_path).examine(3)
    assert len(json.loads(rest["roster/ids"].tobytes())) == 12
    assert "roster" not in facts
    assert not (tmp_path / "checkpoints/roster.journal").exists()
