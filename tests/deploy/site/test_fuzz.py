"""A few seconds of `fuzzing.py`, which runs for as long as you like: nothing that comes from the network is a crash."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fuzzing


@pytest.fixture(scope="module")
def targets() -> fuzzing.Targets:
    return fuzzing.targets()


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_damaged_input_is_refused_in_the_way_it_should(targets: fuzzing.Targets, name: str) -> None:
    for seed in range(40):
        targets[name](fuzzing.Draw(seed))


def test_the_fuzzer_does_damage() -> None:
    sound = bytes(range(200))
    changed = [fuzzing.damaged(fuzzing.Draw(seed), sound) for seed in range(100)]
    assert sum(content != sound for content in changed) > 90
    assert len(set(changed)) > 80
