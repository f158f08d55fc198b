"""Vectors that the server finds in replies: whose they are, what is kept, and that a run goes on with them."""

from pathlib import Path

import numpy as np
import pytest

from mutirao.aggregation import FedAvg
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.needs import Needs
from mutirao.core.roster import Roster
from mutirao.core.rounds import Run, train
from mutirao.core.update_figures import WIDTH, bias_in, dissimilarities, sketch, vectors_of
from mutirao.errors import ConfigError
from mutirao.runs.journals import RosterJournal
from mutirao.selection import Mix
from mutirao.simulation.local_fleet import LocalFleet

MODEL = {"0.weight": np.zeros((4, 2)), "0.bias": np.zeros(4), "2.weight": np.zeros((3, 4)), "2.bias": np.ones(3)}


def test_the_output_layers_bias_is_found_by_its_length_or_by_name() -> None:
    assert bias_in(MODEL, "3") == "2.bias"
    assert bias_in(MODEL, "0.bias") == "0.bias"
    with pytest.raises(ConfigError, match=r"0 biases with 7 entries .* its biases are 0\.bias, 2\.bias"):
        bias_in(MODEL, "7")
    with pytest.raises(ConfigError, match="no layer of 0 classes"):
        bias_in(MODEL, "")
    with pytest.raises(ConfigError, match="2 biases with 3 entries"):
        bias_in({**MODEL, "1.bias": np.zeros(3)}, "3")


def test_updates_are_kept_whole_if_short_and_sketched_if_long() -> None:
    end = {k: v + 2.0 for k, v in MODEL.items()} | {"2.bias": np.array([1.0, 5.0, np.inf])}
    found = vectors_of(Needs(server={"sketch"}, biases={"3"}), MODEL, {"ana": Reply(end)}, seed=1)
    assert found["bias"]["ana"].tolist() == [0.0, 4.0, 1e100]  # what can be squared
    assert found["sketch"]["ana"].tolist() == [2.0] * 12 + [0.0, 4.0, 1e100] + [2.0] * 12  # by the names' order
    draw = np.random.default_rng(0)
    long = draw.normal(size=(6, 50_000)) * np.linspace(0.5, 2, 6)[:, None]
    short = np.array([sketch(row, 3) for row in long])
    assert short.shape == (6, WIDTH)
    for a in range(6):
        for b in range(a):
            true = np.linalg.norm(long[a] - long[b])
            assert np.linalg.norm(short[a] - short[b]) == pytest.approx(true, rel=0.15)


def test_vectors_follow_their_clients_and_are_saved() -> None:
    roster = Roster()
    roster.meet(["bia", "dora"])
    roster.mark(1, ["bia"], {"bia": 3})
    roster.keep("bias", {"bia": np.array([1.0, 2.0])})
    roster.meet(["ana", "bia", "caio", "dora"])  # a newcomer before her
    assert roster.vectors["bias"][1].tolist() == [1.0, 2.0]
    assert np.isnan(roster.vectors["bias"][[0, 2, 3]]).all()
    again = Roster.from_arrays(roster.to_arrays())
    assert again.ids == ["bia"]
    assert again.vectors["bias"].tolist() == [[1.0, 2.0]]


def test_a_large_roster_keeps_them_in_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutirao.runs.journals.FEW", 2)
    roster, journal = Roster(), RosterJournal(tmp_path / "roster.journal")
    names = [f"c{i}" for i in range(5)]
    roster.meet(names)
    for number, who in enumerate((names[:3], names[2:4], names[1:2]), 1):
        roster.mark(number, who, dict.fromkeys(who, 3))
        roster.keep("bias", {c: np.array([number, float(c[1:])]) for c in who})
        journal.save(roster)
    again = journal.read(journal.mark)
    assert again.ids == ["c0", "c1", "c2", "c3"]
    assert again.vectors["bias"].tolist() == [[1, 0], [3, 1], [2, 2], [2, 3]]


def test_a_model_without_such_a_layer_is_refused_before_anybody_is_asked() -> None:
    def never(request: Request, site: Site) -> Reply:
        raise AssertionError("was asked")

    class Odd:
        needs = Needs(biases={"9"})

        def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
            return ["ana"]

    with pytest.raises(ConfigError, match=r"select\.layer: the model has 0 biases with 9 entries"):
        next(train(Run(MODEL), LocalFleet(never, {"ana": None}), rounds=1, select=Odd(), aggregate=FedAvg()))


def test_dissimilarity_is_that_of_plain_loops_and_a_long_update_counts_as_a_short_one() -> None:
    moves = np.random.default_rng(5).normal(size=(5, 7)) * np.array([[1.0], [1.0], [1e6], [1.0], [1e-6]])
    wanted = []
    for k in range(5):
        units = [row / np.sqrt(sum(x * x for x in row)) for row in moves]
        mean = sum(units[i] for i in range(5) if i != k) / 4
        wanted.append(1 - float(np.dot(units[k], mean) / np.sqrt(np.dot(mean, mean))))
    np.testing.assert_allclose(dissimilarities(moves), wanted, rtol=1e-9)
    np.testing.assert_allclose(dissimilarities(np.array([[1.0, 0], [2, 0], [-3, 0]])), [1.0, 1.0, 2.0])
    assert dissimilarities(np.zeros((2, 3))).tolist() == [1.0, 1.0]
    assert dissimilarities(np.ones((1, 3))).tolist() == [1.0]  # nobody to compare it with


def test_the_server_measures_it_if_a_policy_goes_by_it() -> None:
    ways = {"ana": 1.0, "bia": 2.0, "caio": -1.0}

    def move(request: Request, site: Site) -> Reply:
        return Reply({"w": request.arrays["w"] + ways[site.id]}, metrics={"loss": 1.0}, n=5)

    run = Run({"w": np.zeros(4)})
    fleet, select = LocalFleet(move, dict.fromkeys(ways)), Mix(3, "dissimilarity")
    (done,) = train(run, fleet, rounds=1, select=select, aggregate=FedAvg())
    assert [r["dissimilarity"] for r in done.clients] == pytest.approx([1.0, 1.0, 2.0])
    assert Mix(1, "dissimilarity")(run.roster, 2, np.random.default_rng(0)) == ["caio"]
