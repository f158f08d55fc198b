"""Claims are held against runs by stated rules: figures of runs that are written here, with verdicts known by hand."""

import json
import math
from pathlib import Path

import pytest

from mutirao.errors import ConfigError
from mutirao.runs.reader import Record
from mutirao.studies.claims import Claim, Figure, check_pairs, check_value, evaluate_claims, parse_claim
from mutirao.studies.study import Cell, Study

PLACES = [(("seed", i),) for i in range(4)]


def of(*values: float) -> dict[tuple[object, ...], float]:
    return dict(zip(PLACES, values, strict=False))


PAIRS = [
    ("more", of(2, 3, 4), of(1, 2.1, 2.9), "holds"),
    ("less", of(2, 3, 4), of(1, 2.1, 2.9), "does not hold"),
    ("less", of(1, 2.1, 2.9), of(2, 3, 4), "holds"),
    ("more", of(2, 3, 4), of(1, 9, 1), "not shown"),  # the interval holds zero
    ("more", of(2), of(1), "not shown"),  # one pair
    ("more", of(2, 3), of(2, 3), "not shown"),  # no difference at all
    ("more", {}, of(1, 2), "not shown"),
]


@pytest.mark.parametrize(("rule", "ours", "theirs", "verdict"), PAIRS)
def test_a_difference_is_shown_only_beyond_its_interval(
    rule: str, ours: dict[tuple[object, ...], float], theirs: dict[tuple[object, ...], float], verdict: str
) -> None:
    claim = Claim("it is", "a", rule, than=("b",))
    assert check_pairs(claim, ours, [theirs], 0.0)[0] == verdict


def test_shared_data_widen_the_interval_and_several_rivals_count_by_their_mean() -> None:
    claim, ours, theirs = Claim("it is", "a", "more", than=("b",)), of(1.0, 1.2, 1.1, 1.3), of(0.8, 1.1, 1.0, 1.2)
    assert check_pairs(claim, ours, [theirs], 0.0)[0] == "holds"
    assert check_pairs(claim, ours, [theirs], 3.0)[0] == "not shown"
    low, high = of(0, 0, 0, 0), of(4, 4.1, 4.2, 4.3)
    assert check_pairs(claim, ours, [low], 0.0)[0] == "holds"
    assert check_pairs(claim, ours, [low, high], 0.0)[0] == "does not hold"  # whose mean is 2


def test_a_value_is_held_by_each_run_or_by_the_mean() -> None:
    each, mean = (Claim("it is", "a", rule, value=5, tolerance=0.1) for rule in ("each", "mean"))
    assert check_value(each, [5, 5.05])[0] == check_value(mean, [4, 6])[0] == "holds"
    assert check_value(each, [4, 6])[0] == check_value(mean, [5, 6])[0] == "does not hold"
    assert check_value(each, [])[0] == "not shown"


WRONG = [
    ({"rule": "moer", "method": "a"}, "rule 'moer' is not known"),
    ({"rule": "more", "method": "a"}, "compares with others"),
    ({"rule": "leads", "method": "a"}, "compares with others"),
    ({"rule": "mean", "method": "a"}, "compares with a value"),
    ({"rule": "more", "method": "a", "than": "b", "of": "end"}, "of 'end' is not known"),
    ({"rule": "more", "method": "a", "then": "b"}, "unknown key 'then'"),
]


@pytest.mark.parametrize(("table", "why"), WRONG)
def test_a_claim_that_cannot_be_judged_is_refused(table: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_claim("fedrisk: claim 1", {"says": "it is", **table})


def write_run(folder: Path, values: list[float], clients: list[str]) -> None:
    """A finished run of rounds with these accuracies, each with one client."""
    folder.mkdir(parents=True)
    rows = [f"{t},1,1,1,0,0,1,1,{v}" for t, v in enumerate(values, 1)]
    head = "round,seconds,selected,replied,failed,rejected,bytes_down,bytes_up,accuracy"
    (folder / "history.csv").write_text("\n".join([head, *rows]) + "\n")
    asked = [f"{t},{c},1,1,5,1.0" for t, c in enumerate(clients, 1)]
    (folder / "clients.csv").write_text("\n".join(["round,client,try,replied,n,weight", *asked]) + "\n")
    final = {"accuracy": values[-1]}
    summary = {"final": final, "directions": {"accuracy": "higher"}, "rounds": len(values), "clients": 2}
    (folder / "summary.json").write_text(json.dumps(summary | {"recipe": "quickstart", "judge": "accuracy"}))
    (folder / "config.toml").write_text('recipe = "quickstart"\n')


def test_figures_are_read_from_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.1, 0.5, 0.4, 0.6], ["c0", "c1", "c0", "c1"])
    record = Record.of(tmp_path / "run")
    figures = {
        name: Figure(name, "accuracy", 0.5, 2, lower=False) for name in ("final", "wobble", "rounds", "gini", "gap")
    }
    assert {name: figure(record) for name, figure in figures.items()} == pytest.approx(
        {"final": 0.6, "wobble": 0.1, "rounds": 2, "gini": 0.0, "gap": 0.0}
    )
    assert Figure("rounds", "accuracy", 0.9, 2, lower=False)(record) == 5  # never: one more than there were
    assert math.isnan(Figure("final", "auc", 0.9, 2, lower=False)(record))


def test_wobble_is_that_of_rounds_and_not_of_evaluations(tmp_path: Path) -> None:
    # An evaluation every tenth round: the last twenty rounds hold two of them, and not all ten.
    write_run(tmp_path / "run", [0.1, 0.2, 0.9, 0.1, 0.9, 0.1, 0.9, 0.5, 0.6, 0.8], ["c0"] * 10)
    history = tmp_path / "run" / "history.csv"
    lines = history.read_text().splitlines()
    later = [f"{10 * t},{line.partition(',')[2]}" for t, line in enumerate(lines[1:], 1)]
    history.write_text("\n".join([lines[0], *later]) + "\n")
    record = Record.of(tmp_path / "run")
    assert Figure("wobble", "accuracy", 0.5, 20, lower=False)(record) == pytest.approx(0.1)
    assert math.isnan(Figure("wobble", "accuracy", 0.5, 10, lower=False)(record))  # one value has no deviation


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ([0.1, 0.5, 0.5, 0.5], 2),
        ([0.5, 0.5, 0.5, 0.5], 1),
        ([0.5, 0.6, 0.51, 0.5], 3),  # it left once more
        ([0.5, 0.5, 0.7, 0.3], 5),  # never: one more than there were
    ],
)
def test_a_curve_is_stable_from_where_it_stays(tmp_path: Path, values: list[float], first: int) -> None:
    write_run(tmp_path / "run", values, ["c0"] * 4)
    assert Figure("stable", "accuracy", 0.5, 2, lower=False)(Record.of(tmp_path / "run")) == first


def test_equal_is_shown_by_an_interval_within_the_tolerance() -> None:
    claim = parse_claim("x", {"says": "", "method": "a", "than": "b", "rule": "equal", "tolerance": 0.02})
    places = [(("fold", i),) for i in range(5)]

    def verdict(*differences: float) -> str:
        ours = dict(zip(places, [0.5 + d for d in differences], strict=True))
        return check_pairs(claim, ours, [dict.fromkeys(places, 0.5)], shared=0.0)[0]

    assert verdict(0.0, 0.001, -0.001, 0.002, 0.0) == "holds"
    assert verdict(0.1, 0.101, 0.102, 0.1, 0.1) == "does not hold"
    assert verdict(0.1, -0.1, 0.05, -0.05, 0.0) == "not shown"  # no difference is not equality


def test_below_is_shown_by_the_interval_of_the_mean() -> None:
    claim = parse_claim("x", {"says": "", "method": "a", "rule": "below", "value": 20, "of": "stable"})
    assert check_value(claim, [10, 11, 12])[0] == "holds"
    assert check_value(claim, [30, 31, 32])[0] == "does not hold"
    assert check_value(claim, [10, 30, 20])[0] == "not shown"
    assert check_value(claim, [10])[0] == "not shown"
    assert check_value(claim, [12, 13, 14, 17])[0] == "holds"
    assert check_value(claim, [12, 13, 14, 17], shared=5.0)[0] == "not shown"  # runs that share data say less
    with pytest.raises(ConfigError, match="compares with a value"):
        parse_claim("x", {"says": "", "method": "a", "rule": "below"})


def test_claims_are_judged_by_the_runs_of_a_folder(tmp_path: Path) -> None:
    cells = []
    for method, ends in {"a": [0.6, 0.8], "b": [0.5, 0.69]}.items():
        for (seed, end), place in zip(enumerate(ends), PLACES, strict=False):
            cells.append(Cell(method, place, (("seed", seed),)))
            write_run(tmp_path / "cells" / cells[-1].name, [0.2, end], ["c0", "c1"])
    study = Study("quickstart", tuple(cells), ("a", "b"), "b", ("accuracy",), {"accuracy": 0.55})
    claims = [
        Claim("a is above b", "a", "more", metric="accuracy", than=("b",)),
        Claim("a is there sooner", "a", "less", of="rounds", metric="accuracy", than=("b",)),
        Claim("c is 1", "c", "each", metric="accuracy", value=1.0),
    ]
    judged = evaluate_claims(study, claims, tmp_path)
    assert [j.verdict for j in judged] == ["holds", "not shown", "not shown"]
    assert judged[0].ours.startswith("0.7 against 0.595; difference +0.105")
    assert judged[2].ours == "no finished run of c"


def curves(folder: Path, seeds: int, **by_method: list[float]) -> tuple[Study, Path]:
    """A study whose methods have these accuracies by round, with every seed."""
    cells = [Cell(m, PLACES[seed], (("seed", seed),)) for m in by_method for seed in range(seeds)]
    for cell in cells:
        write_run(folder / "cells" / cell.name, by_method[cell.method], ["c0"] * len(by_method[cell.method]))
    return Study("quickstart", tuple(cells), tuple(by_method), "b", ("accuracy",)), folder


LEADS = [
    (2, [0.1, 0.3, 0.2, 0.4], [0.2, 0.2, 0.2, 0.2], "holds", "leads 75% ± 0% of the rounds, 2 places"),
    (2, [0.1, 0.1, 0.1, 0.4], [0.2, 0.2, 0.2, 0.2], "does not hold", "leads 25% ± 0% of the rounds, 2 places"),
    (2, [0.1, 0.1, 0.3, 0.4], [0.2, 0.2, 0.2, 0.2], "not shown", "leads 50% ± 0% of the rounds, 2 places"),
    (1, [0.3, 0.3, 0.3, 0.4], [0.2, 0.2, 0.2, 0.2], "not shown", "1 place has runs of all 2, and two are needed"),
]


@pytest.mark.parametrize(("seeds", "ours", "theirs", "verdict", "told"), LEADS)
def test_to_lead_most_rounds_is_to_be_best_so_far_in_more_than_half_of_them(
    tmp_path: Path, seeds: int, ours: list[float], theirs: list[float], verdict: str, told: str
) -> None:
    study, out = curves(tmp_path, seeds, a=ours, b=theirs)
    (judged,) = evaluate_claims(study, [Claim("a leads", "a", "leads", metric="accuracy", than=("b",))], out)
    assert (judged.verdict, judged.ours) == (verdict, told)
