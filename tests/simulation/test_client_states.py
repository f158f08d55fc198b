"""Many states: as a dict for whoever uses them, whatever is in memory and whatever is in files."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import FLEETING, Reply, Request, Site
from mutirao.errors import Damaged
from mutirao.runs.journals import write_states
from mutirao.simulation.client_states import NOW, ClientStates
from mutirao.simulation.local_fleet import LocalFleet

CLIENTS = st.sampled_from(["ana", "bia", "caio", "duda", "../eva", "zoé"])


def state_of(number: int, size: int = 10) -> Arrays:
    return {"w": np.full(size, number, np.float64), "t": np.array(number)}


class AsADict(RuleBasedStateMachine):
    """The same calls on a dict and on ClientStates with room for two."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.home = Path(self.folder.name) / "sites"
        self.ours = ClientStates(self.home, most=200, few=0)
        self.plain: dict[str, Arrays] = {}
        self.kept: dict[str, Any] = {}
        self.number = 0

    @rule(client=CLIENTS, fleeting=st.booleans())
    def put(self, client: str, fleeting: bool) -> None:
        self.number += 1
        state = state_of(self.number) | ({FLEETING + "key": np.ones(2)} if fleeting else {})
        self.ours[client] = self.plain[client] = state

    @rule(client=CLIENTS)
    def look(self, client: str) -> None:
        found, wanted = self.ours.get(client), self.plain.get(client)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert digest(found) == digest(wanted)

    @rule(client=CLIENTS)
    def remove(self, client: str) -> None:
        assert (self.ours.pop(client, None) is None) == (self.plain.pop(client, None) is None)

    @precondition(lambda self: self.ours.changed)
    @rule()
    def file(self) -> None:
        """As at the end of a round."""
        self.number += 1
        gone = self.ours.changed - self.ours.keys()
        places = write_states(
            self.home / f"states_{self.number}", self.ours, sorted(self.ours.changed & self.ours.keys())
        )
        self.kept = {c: f for c, f in {**self.kept, **places}.items() if c not in gone}
        self.ours.settle(places)
        steady = {c: {k: v for k, v in s.items() if not k.startswith(FLEETING)} for c, s in self.plain.items()}
        assert {c: digest(f.load()) for c, f in self.kept.items()} == {c: digest(s) for c, s in steady.items()}
        assert not (self.home / NOW).exists()

    @precondition(lambda self: not self.ours.changed)
    @rule()
    def begin_anew(self) -> None:
        """As after a restart: what was of the round alone is gone."""
        self.ours = ClientStates(self.home, most=200, few=0)
        self.ours.adopt(self.kept)
        self.plain = {c: {k: v for k, v in s.items() if not k.startswith(FLEETING)} for c, s in self.plain.items()}

    @invariant()
    def within_bounds(self) -> None:
        assert sorted(self.ours) == sorted(self.plain)
        assert len(self.ours) == len(self.plain)
        assert all((c in self.ours) == (c in self.plain) for c in ("ana", "../eva", "nobody"))
        held = list(self.ours._loaded.values())
        assert sum(v.nbytes for s in held for v in s.values()) <= 200 or len(held) == 1

    def teardown(self) -> None:
        self.folder.cleanup()


AsADict.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAsADict = AsADict.TestCase


def test_few_states_stay_in_memory_and_touch_no_disk(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "sites", most=10, few=1000)
    for i in range(10):
        states[f"c{i}"] = state_of(i)  # 88 bytes each
    assert not states.many
    assert not (tmp_path / "sites").exists()
    states["c10"], states["c11"] = state_of(10), state_of(11)
    assert states.many
    assert (tmp_path / "sites" / NOW).stat().st_size > 11 * 88  # all but the last one


def test_a_file_that_is_not_what_was_written_is_damaged(tmp_path: Path) -> None:
    states = ClientStates(tmp_path, most=10, few=0)
    states["ana"], states["bia"], states["caio"] = state_of(1), state_of(2), state_of(3)
    file, place = tmp_path / NOW, states._stored["ana"]
    content = file.read_bytes()
    for harm in (content[: place.size - 5], content[place.size :], bytes([content[0] ^ 1]) + content[1:]):
        file.write_bytes(harm)
        with pytest.raises(Damaged, match="now was altered or cut off"):
            states["ana"]
    file.unlink()
    with pytest.raises(Damaged, match="now is missing"):
        states["ana"]
    file.write_bytes(content)
    assert states["ana"]["t"] == 1
    assert states["bia"]["t"] == 2


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_fleet_does_not_go_on_without_a_state(tmp_path: Path, timeout: float | None) -> None:
    def handler(request: Request, site: Site) -> Reply:
        site.state["t"] = site.state.get("t", np.zeros(100)) + 1
        return Reply({"w": site.state["t"][:1]}, n=1)

    class Both:
        def __call__(self, request: Request, site: Site) -> Reply:
            return handler(request, site)

        def many(self, requests: Any, sites: Any) -> Any:
            return {c: handler(requests[c], sites[c]) for c in requests}

    states = ClientStates(tmp_path, most=900, few=0)
    fleet = LocalFleet(Both(), dict.fromkeys(["ana", "bia", "caio"]), timeout)
    fleet.use_state_store(states)
    requests = {c: Request("train", {}) for c in fleet.clients()}
    for number in (1, 2, 3):
        replies = fleet.ask(requests).replies
        assert [float(r.arrays["w"][0]) for r in replies.values()] == [number] * 3
    assert fleet.snapshot() == {}
    (tmp_path / NOW).write_bytes(b"nothing")
    with pytest.raises(Damaged, match="altered or cut off"):
        fleet.ask(requests)


def test_what_a_fleet_knew_before_moves_with_it_unless_its_lodging_knows_better(tmp_path: Path) -> None:
    fleet = LocalFleet(lambda request, site: Reply({}, n=1), {"ana": 0, "bia": 0})
    fleet.restore({'["ana", "t"]': np.array(1), '["bia", "t"]': np.array(2)})
    states = ClientStates(tmp_path)
    states["bia"] = {"t": np.array(9)}
    fleet.use_state_store(states)
    assert {c: int(s["t"]) for c, s in states.items()} == {"ana": 1, "bia": 9}
    assert {k: int(v) for k, v in fleet.snapshot().items()} == {'["bia", "t"]': 9, '["ana", "t"]': 1}
