"""Only the cores left to this process count."""

import os

import pytest

from mutirao.core.cpu_threads import core_count


def test_cores_are_those_the_system_leaves_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 5, 7}, raising=False)
    assert core_count() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert core_count() == 1
