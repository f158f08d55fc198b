"""FedScale's traces: what they say is what happens, and a pickle that is more than data does nothing."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mutirao.config import Part, build, resolve
from mutirao.errors import ConfigError
from mutirao.fleets.churn import FedScaleTrace
from mutirao.fleets.devices import FedScaleDevices
from mutirao.recipes.quickstart import Config
from mutirao.report import execute

CAPACITY = {1: {"computation": 153.0, "communication": 2209.61}, 2: {"computation": 20, "communication": 512.0}}
BEHAVIOUR = {  # the first is that of FedScale's own test
    1: {"duration": 10, "active": [1, 3, 6, 9], "inactive": [1, 4, 7, 10], "finish_time": 10, "model": "a phone"},
    2: {"duration": 10, "active": [0], "inactive": [10], "finish_time": 10, "model": "always there"},
}


@pytest.fixture(params=["pickle", "json"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    def write(held: Any) -> str:
        path = tmp_path / f"trace{len(list(tmp_path.iterdir()))}"
        path.write_bytes(pickle.dumps(held) if request.param == "pickle" else json.dumps(held).encode())
        return str(path)

    return write


def test_speeds_and_links_are_those_of_fedscale(written: Any) -> None:
    """FedScale: 3 x 153 ms a sample in training; a model of 1 MB is 8192 kbit, up or down in 8192 / 2209.61 s."""
    found = FedScaleDevices(file=written(CAPACITY))(["1", "2", "ana"], np.random.default_rng(0))
    assert 10 / found.speed[0] == pytest.approx(3.0 * 10 * 153.0 / 1000)
    assert 2**20 / found.up[0] == pytest.approx(8192 / 2209.61)
    assert found.down.tolist() == found.up.tolist()
    assert found.speed[2] in found.speed[:2]  # by lot
    pairs = FedScaleDevices(file=written({1: [153.0, 2209.61]}))(["x"], np.random.default_rng(0))
    assert pairs.speed[0] == found.speed[0]


def test_who_is_there_is_as_in_fedscales_own_test(written: Any) -> None:
    trace = FedScaleTrace(file=written(BEHAVIOUR), seconds=1.0)
    at = {time: bool(trace(["1"], time + 1, None, 0)[0]) for time in (2, 6, 8, 9, 10, 15)}
    assert at == {2: False, 6: True, 8: False, 9: True, 10: False, 15: False}
    many = trace([f"c{i}" for i in range(40)], 3, None, 0)  # at 2 s, when the first is away
    assert 5 < many.sum() < 35
    assert (many == trace([f"c{i}" for i in range(40)], 3, None, 0)).all()


def test_a_run_goes_by_both(written: Any, tmp_path: Path) -> None:
    settings = {"devices": "fedscale", "devices.file": written(CAPACITY), "available": "fedscale"}
    settings |= {"available.file": written(BEHAVIOUR), "available.seconds": 1.0, "clients": 8, "per_round": 2}
    summary = execute("quickstart", resolve(Config, {**settings, "rounds": 2}), tmp_path / "run", pictures=False)
    assert summary["rounds"] == 2
    assert "sim_seconds" in (tmp_path / "run" / "history.csv").read_text()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TRACE_EVIL"],)


def test_a_pickle_that_would_do_something_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_EVIL", str(tmp_path / "done"))
    (tmp_path / "evil").write_bytes(pickle.dumps({1: Evil()}))
    with pytest.raises(ConfigError, match=r"devices\.file: .* is no plain FedScale trace: it names posix\.mkdir"):
        FedScaleDevices(file=str(tmp_path / "evil"))(["a"], np.random.default_rng(0))
    assert not (tmp_path / "done").exists()
    (tmp_path / "numpy").write_bytes(pickle.dumps({1: {"computation": np.float64(3), "communication": 2.0}}))
    with pytest.raises(ConfigError, match="it names numpy"):
        FedScaleDevices(file=str(tmp_path / "numpy"))(["a"], np.random.default_rng(0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no plain FedScale trace"),
        (b"\x80\x04broken", "no plain FedScale trace"),
        (b"{broken", "cannot read"),
        (b"[" * 100_000, "no plain FedScale trace"),
        (b'{"a":' * 100_000, "no plain FedScale trace|cannot read"),
        (b"{}", "holds no dictionary with an entry a device"),
        (pickle.dumps([1, 2]), "holds no dictionary"),
        (b'{"1": {"computation": 0, "communication": 5}}', "device '1' must have numbers above 0"),
        (b'{"1": {"computation": NaN, "communication": 5}}', "device '1' must have numbers above 0"),
        (b'{"1": "ab"}', "device '1' must have numbers above 0"),
        (b'{"1": {"computation": true, "communication": 5}}', "device '1' must have numbers above 0"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(content)
    model = build("devices", Part("fedscale", {"file": str(tmp_path / "trace")}))
    with pytest.raises(ConfigError, match=message) as caught:
        model(["a"], np.random.default_rng(0))
    assert "\n" not in str(caught.value)


def test_a_behaviour_without_its_lists_or_a_step_without_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"7": {"active": [1], "inactive": "x", "finish_time": 9}}')
    with pytest.raises(ConfigError, match=r"available\.file: .*, device '7' must have lists of seconds"):
        FedScaleTrace(str(tmp_path / "trace"))(["a"], 1, None, 0)
    with pytest.raises(ConfigError, match=r"seconds is 0\.0, but must be above 0"):
        build("available", Part("fedscale", {"file": "x", "seconds": 0.0}))
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        FedScaleTrace(str(tmp_path / "nowhere"))(["a"], 1, None, 0)
