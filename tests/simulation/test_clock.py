"""Simulated time and energy add up by hand, and who is too slow or drops out is lost."""

from pathlib import Path

import numpy as np
import pytest

from mutirao.aggregation import FedAvg
from mutirao.config import Part, build, resolve
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.needs import Needs
from mutirao.core.rounds import Group, Patience, Run, step
from mutirao.errors import ConfigError
from mutirao.experiments.simulated_parts import build_select
from mutirao.report import execute
from mutirao.selection import FedCS, Uniform, everyone
from mutirao.simulation.clock import TimedFleet
from mutirao.simulation.devices import MBIT, Devices, DeviceTable, FedCSDevices, TiFLDevices, none
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.quickstart import Config

NAMES = [f"c{i:04d}" for i in range(5000)]


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def test_the_published_ranges_are_kept() -> None:
    found = FedCSDevices()(NAMES, draw())
    assert 10 <= found.speed.min() < 10.2
    assert 99.8 < found.speed.max() <= 100
    assert found.up.max() == pytest.approx(8.6 * MBIT)
    assert found.up.mean() / MBIT == pytest.approx(1.4, abs=0.06)
    tiers, counts = np.unique(TiFLDevices(speed=1.0)(NAMES, draw()).speed, return_counts=True)
    assert tiers.tolist() == [0.1, 0.5, 1.0, 2.0, 4.0]
    assert counts.tolist() == [1000] * 5


def test_without_a_model_devices_cost_nothing() -> None:
    run = Run({"w": np.zeros(25)})
    fleet = TimedFleet(LocalFleet(twenty, {"ana": None, "bia": None}), none, run, epochs=3)
    done = step(run, fleet, [Group(everyone, FedAvg())])
    fleet.record(done)
    assert (done.row["sim_seconds"], done.row["sim_joules"], done.row["failed"]) == (0.0, 0.0, 0)


def model(deadline: float = 0.0, dropout: float = 0.0) -> object:
    """Two clients: ana trains 10 samples a second, bia 2; links of 100 and 10 bytes a second down, half of it up."""

    class Two:
        jitter = 0.0

        def __call__(self, names: list[str], rng: np.random.Generator) -> Devices:
            down = np.array([100.0, 10.0])
            watts, radio = np.array([2.0, 4.0]), np.array([1.0, 0.5])
            return Devices(np.array([10.0, 2.0]), down, down / 2, watts, radio, np.array([0.0, dropout]))

    two = Two()
    two.deadline = deadline  # type: ignore[attr-defined]
    return two


def twenty(request: Request, site: Site) -> Reply:
    return Reply({"w": request.arrays["w"] + 1}, metrics={"loss": 1.0}, n=20)


def timed(**settings: float) -> tuple[TimedFleet, Run]:
    run = Run({"w": np.zeros(25)})  # 200 bytes
    return TimedFleet(LocalFleet(twenty, {"ana": None, "bia": None}), model(**settings), run, epochs=3), run  # type: ignore[arg-type]


def one_round(fleet: TimedFleet, run: Run, select: object = everyone) -> object:
    done = step(run, fleet, [Group(select, FedAvg())], patience=Patience(min_replies=1, wait=0))  # type: ignore[arg-type]
    fleet.record(done)
    return done


def test_time_and_energy_by_hand() -> None:
    """Up: 200 bytes, a loss and a count are 216. ana: 2 + 6 + 4.32 s; bia: 20 + 30 + 43.2 s."""
    fleet, run = timed()
    done = one_round(fleet, run)
    ana, bia = done.clients  # type: ignore[attr-defined]
    assert ana["sim_seconds"] == pytest.approx(200 / 100 + 3 * 20 / 10 + 216 / 50)
    assert bia["sim_seconds"] == pytest.approx(200 / 10 + 3 * 20 / 2 + 216 / 5)
    assert ana["sim_joules"] == pytest.approx(2 * 6 + 1 * (2 + 4.32))
    assert bia["sim_joules"] == pytest.approx(4 * 30 + 0.5 * (20 + 43.2))
    row = done.row  # type: ignore[attr-defined]
    assert row["sim_seconds"] == pytest.approx(93.2)  # the slower one
    assert row["sim_joules"] == pytest.approx(ana["sim_joules"] + bia["sim_joules"])
    again = one_round(fleet, run)
    assert again.row["sim_seconds"] == pytest.approx(93.2)  # type: ignore[attr-defined]  # each round by itself


def test_who_misses_the_deadline_is_late_and_the_round_ends_then() -> None:
    fleet, run = timed(deadline=50.0)
    done = one_round(fleet, run)
    ana, bia = done.clients  # type: ignore[attr-defined]
    assert ana["replied"] == 1
    assert bia["failure"] == "late: would take 93.2 s, the deadline is 50 s"
    assert bia["sim_seconds"] == 50
    assert bia["sim_joules"] == pytest.approx((4 * 30 + 0.5 * 63.2) * 50 / 93.2)
    assert done.row["sim_seconds"] == 50  # type: ignore[attr-defined]


def test_who_drops_out_is_gone_and_holds_up_the_round_only_if_there_is_a_deadline() -> None:
    for deadline, seconds in ((0.0, 12.32), (50.0, 50.0)):
        fleet, run = timed(dropout=0.999999, deadline=deadline)
        done = one_round(fleet, run)
        assert done.clients[1]["failure"] == "gone: dropped out (simulated)"  # type: ignore[attr-defined]
        assert done.row["sim_seconds"] == pytest.approx(seconds)  # type: ignore[attr-defined]


def test_probes_take_time_too_a_forward_pass_a_third() -> None:
    fleet, run = timed()

    class Probing:
        needs = Needs(config={"probe_samples": 6})

        def probes(self, roster: object, round: int, rng: object) -> list[str]:
            return ["ana"]

        def __call__(self, roster: object, round: int, rng: object) -> list[str]:
            return ["ana"]

    done = one_round(fleet, run, Probing())
    probe = 200 / 100 + 6 / 3 / 10 + 216 / 50  # the stand-in sends its arrays with a probe as well
    assert done.row["sim_seconds"] == pytest.approx(probe + 12.32)  # type: ignore[attr-defined]


def test_clients_declare_what_they_need_and_fedcs_goes_by_it() -> None:
    fleet, run = timed()
    one_round(fleet, run)
    done = one_round(fleet, run, FedCS(2, deadline=20.0))
    assert run.roster.figure("ready_seconds").tolist() == pytest.approx([2 + 6, 20 + 30])
    assert run.roster.figure("upload_seconds").tolist() == pytest.approx([4, 40])
    assert [row["client"] for row in done.clients] == ["ana"]  # type: ignore[attr-defined]


def test_a_table_of_devices(tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_text("client,speed,down,up,watts\nana,5,8,4,2\nbia,50,80,40,\n")
    found = DeviceTable(str(file))(["ana", "bia", "zoe"], draw())
    assert found.speed[:2].tolist() == [5, 50]
    assert (found.down[:2] / MBIT).tolist() == [8, 80]
    assert found.watts[:2].tolist() == [2, 3]
    assert found.speed[2] in (5, 50)  # a stranger gets one of the lines
    for text in ("client,speed\nana,5\n", "client,speed,down,up\nana,0,1,1\n", "client,speed,down,up\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"^devices.file: [^\n]+ must have"):
            DeviceTable(str(file))(["ana"], draw())
    with pytest.raises(ConfigError, match="cannot read"):
        DeviceTable(str(tmp_path / "nowhere.csv"))(["ana"], draw())


@pytest.mark.parametrize("wrong", [{"dropout": 1.0}, {"speed": 0.0}, {"deadline": -1.0}, {"watts": float("inf")}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"devices=tifl: {next(iter(wrong))} is"):
        build("devices", Part("tifl", wrong))


def test_any_recipe_can_have_devices_and_an_interruption_changes_nothing(tmp_path: Path) -> None:
    settings = {"clients": 8, "per_round": 4, "epochs": 1, "rounds": 4, "devices": "fedcs", "devices.dropout": 0.2}
    config = resolve(Config, settings)
    whole = execute("quickstart", config, tmp_path / "whole", pictures=False)
    execute("quickstart", resolve(Config, settings | {"rounds": 2}), tmp_path / "parts", pictures=False)
    parts = execute("quickstart", config, tmp_path / "parts", resume=True, pictures=False)
    assert parts["digest"] == whole["digest"]
    tables = [(tmp_path / name / "clients.csv").read_text() for name in ("whole", "parts")]
    assert tables[0] == tables[1]
    assert "sim_seconds" not in whole["final"]  # a cost is no metric


def many(overcommit: float, deadline: float = 0.0, dropout: float = 0.0) -> object:
    """Ten clients, the i-th of which needs i + 1 seconds for its 20 samples, with links that take no time; 2 W each."""

    class Ten:
        jitter = 0.0

        def __call__(self, names: list[str], rng: np.random.Generator) -> Devices:
            fast, lost = np.full(10, 1e12), np.zeros(10)
            lost[0] = dropout
            return Devices(20 / np.arange(1.0, 11.0), fast, fast, np.full(10, 2.0), np.zeros(10), lost)

    ten = Ten()
    ten.deadline, ten.overcommit = deadline, overcommit  # type: ignore[attr-defined]
    return ten


def crowd(select: object, wanted: int, **settings: float) -> object:
    run = Run({"w": np.zeros(25)})
    fleet = LocalFleet(twenty, {f"c{i}": None for i in range(10)})
    return one_round(TimedFleet(fleet, many(**settings), run, 1, wanted), run, select)  # type: ignore[arg-type]


def test_of_more_than_are_wanted_the_first_replies_are_taken_and_the_others_stop() -> None:
    """All ten are asked and five are wanted: the round lasts five seconds, and the other five cost five each."""
    done = crowd(everyone, 5, overcommit=2.0)
    assert [r["replied"] for r in done.clients] == [1] * 5 + [0] * 5  # type: ignore[attr-defined]
    assert {r["failure"] for r in done.clients[5:]} == {"late: not needed: 5 others had replied after 5 s"}  # type: ignore[attr-defined]
    assert [r["sim_seconds"] for r in done.clients] == pytest.approx([1, 2, 3, 4, 5, 5, 5, 5, 5, 5], rel=1e-6)  # type: ignore[attr-defined]
    assert done.row["sim_seconds"] == pytest.approx(5, rel=1e-6)  # type: ignore[attr-defined]
    assert done.row["sim_joules"] == pytest.approx(2 * (15 + 25), rel=1e-6)  # type: ignore[attr-defined]
    assert (done.row["replied"], done.row["failed"]) == (5, 5)  # type: ignore[attr-defined]


def test_who_drops_out_is_made_up_for_by_the_spare_ones_and_not_waited_for() -> None:
    done = crowd(everyone, 5, overcommit=2.0, dropout=0.999999, deadline=50.0)
    assert [r["replied"] for r in done.clients] == [0] + [1] * 5 + [0] * 4  # type: ignore[attr-defined]
    assert done.row["sim_seconds"] == pytest.approx(6, rel=1e-6)  # type: ignore[attr-defined]
    few = crowd(everyone, 5, overcommit=2.0, deadline=3.5)  # only three can: the round waits until its deadline
    assert few.row["replied"] == 3  # type: ignore[attr-defined]
    assert few.row["sim_seconds"] == 3.5  # type: ignore[attr-defined]


def test_a_run_asks_so_many_more_and_merges_as_many_as_were_wanted(tmp_path: Path) -> None:
    more = {"clients": 20, "rounds": 2, "devices": "tifl", "devices.overcommit": 1.3, "per_round": 5}
    config = resolve(Config, more)
    assert build_select(config, None) == Uniform(7)  # 6.5, rounded up
    assert build_select(resolve(Config, {**more, "per_round": 0.5}), None) == Uniform(0.65)
    assert build_select(resolve(Config, {**more, "per_round": 30, "devices.overcommit": 1.1}), None) == Uniform(33)
    summary = execute("quickstart", config, tmp_path / "run")
    assert summary["rounds"] == 2
    rows = [line.split(",") for line in (tmp_path / "run" / "history.csv").read_text().splitlines()]
    table = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [(r["selected"], r["replied"], r["failed"]) for r in table] == [("7", "5", "2")] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices.overcommit": 1.3}, "overcommit"),  # without devices there is no clock
        ({"devices": "tifl", "devices.overcommit": 3.0}, "overcommit is 3.0, but must be between 1 and 2"),
        ({"devices": "tifl", "devices.overcommit": 1.3, "select.count": 3}, "select.count cannot be set"),
        ({"devices": "tifl", "devices.overcommit": 1.3, "aggregate": "fedbuff"}, "already takes the first replies"),
        (
            {"devices": "tifl", "devices.overcommit": 1.3, "cluster": "kmeans"},
            "the first replies could all be of one group",
        ),
    ],
)
def test_overcommitment_where_there_is_no_first_is_refused(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        execute("quickstart", resolve(Config, {"clients": 8, "rounds": 1, **settings}), tmp_path / "run")
