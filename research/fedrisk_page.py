"""Fill docs/reproductions/fedrisk.md from study folders: `python -m research.fedrisk_page runs`.

For a SET among mq, mslr and lgb the folder holds what these leave (see the page for the commands): `tune-SET` and
`test-SET` (fedrisk-heldout), `table1-SET`, `factors-SET`. What is not there is left as it is on the page.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import read_toml
from mutirao.report.plots import draw_bands
from mutirao.runs.reader import Record
from mutirao.stats import holm, interval, paired
from mutirao.studies.claims import Figure, evaluate_claims, read_claims
from mutirao.studies.comparison import markdown_table as markdown
from mutirao.studies.reproduction import HOME
from mutirao.studies.study import read_study
from mutirao.systems.ranking.metrics import compare_rankers
from mutirao.systems.ranking.report import draw_wins, pair_queries, read_queries
from research.pages import fill_page

ROOT = Path(__file__).parent.parent
PAGE, IMAGES = ROOT / "docs/reproductions/fedrisk.md", ROOT / "docs/images"
SETS = {"mq": "MQ2008", "mslr": "MSLR sample", "lgb": "LightGBM's example"}
METRICS = ("ndcg@1", "ndcg@5", "ndcg@10", "mrr@1", "mrr@5", "mrr@10")
SHARED = 1 / 3  # a test query for three of training
# What differs within a pair, and nothing else but the settings that were tuned for each.
PAIRS = {
    ("fedrisk-momentum", "mean-momentum"): "risk weights, with momentum",
    ("fedrisk", "mean"): "risk weights, without",
    ("fedrisk-momentum-by-query", "mean-momentum-by-query"): "risk weights, whole queries a client",
    ("mean-momentum", "fedavgm"): "dropping n_k, with momentum",
    ("mean", "fedavg"): "dropping n_k, without",
}
BANDS = ("fedrisk", "fedrisk-momentum", "mean", "mean-momentum", "fedprox", "centralised")
NAMED = {"aggregate.lr": "server lr", "aggregate.tau": "tau", "aggregate.mu": "mu", "batch_size": "batch"}
Runs = Mapping[str, Mapping[str, Record]]


def runs_in(folder: Path) -> Runs:
    """The finished runs by method and place, methods in the order of the study."""
    plan = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Record]] = {}
    for cell in plan["cells"]:
        method, _, place = cell.rpartition("/")
        if (folder / "cells" / cell / "summary.json").exists():
            found.setdefault(method, {})[place] = Record.of(folder / "cells" / cell)
    return found


def shared_places(runs: Runs) -> Runs:
    """Only the places that all methods have: a study that was stopped has more of some."""
    common = set.intersection(*(set(cells) for cells in runs.values()))
    return {m: {place: record for place, record in cells.items() if place in common} for m, cells in runs.items()}


def final(record: Record, metric: str) -> float:
    """A metric after the last round."""
    return float(record.summary["final"][metric])


def table_1(folder: Path) -> str:
    """All methods by all metrics: ours with its interval, published in brackets."""
    lines = json.loads((folder / "table.json").read_text(encoding="utf-8"))["lines"]
    by: dict[str, dict[str, Any]] = {}
    for line in lines:
        by.setdefault(line["method"], {})[line["metric"]] = line
    rows: list[tuple[str, ...]] = [("method", *METRICS, "wobble")]
    for method, own in by.items():
        cells = []
        for metric in METRICS:
            told = own[metric]["published"]
            cells.append(
                f"{own[metric]['mean']:.3f} ± {own[metric]['half_t']:.3f}" + (f" [{told['value']:.3f}]" if told else "")
            )
        rows.append((method, *cells, f"{own['ndcg@5']['wobble']:.4f}"))
    return markdown(rows)


def claims(folder: Path) -> str:
    """What the paper says, held against the runs by the rules of `mutirao reproduce`."""
    system = read_toml(HOME / "fedrisk.toml")
    study = read_study(ROOT / "studies/fedrisk-table1.toml")
    asked = read_claims("fedrisk", system["claims"])
    rows: list[tuple[str, ...]] = [("claim", "published", "ours", "verdict")]
    rows += [
        (j.claim.says, j.claim.published, j.ours, f"**{j.verdict}**") for j in evaluate_claims(study, asked, folder)
    ]
    return markdown(rows)


def chosen(folder: Path) -> str:
    """What twelve settings came to on validation data, by rate, and which was chosen."""
    told = json.loads((folder / "trials.json").read_text(encoding="utf-8"))
    rates = sorted({trial["settings"]["lr"] for trial in told["trials"]})
    rows: list[tuple[str, ...]] = [("method", *(f"{rate:g}" for rate in rates), "chosen")]
    for method, best in told["chosen"].items():
        own = [trial for trial in told["trials"] if trial["method"] == method]
        by_rate = [[t["mean"] for t in own if t["settings"]["lr"] == rate and t["mean"] is not None] for rate in rates]
        texts = ", ".join(f"{NAMED.get(key, key)} {value:g}" for key, value in best.items())
        rows.append((method, *(f"{max(values):.3f}" if values else "" for values in by_rate), texts))
    return markdown(rows)


def heldout(runs: Runs) -> str:
    """All methods by all metrics on test data."""
    rows: list[tuple[str, ...]] = [("method", *METRICS, "runs")]
    for method, cells in runs.items():
        means = (np.mean([final(record, metric) for record in cells.values()]) for metric in METRICS)
        rows.append((method, *(f"{mean:.4f}" for mean in means), str(len(cells))))
    return markdown(rows)


def pairs(runs: Runs, metric: str = "ndcg@5") -> tuple[str, dict[str, Any]]:
    """Each pair over folds and over queries, both corrected, with what risk-sensitive measures say; and the gains."""
    names = [pair for pair in PAIRS if {*pair} <= runs.keys()]
    by_fold, by_query, gains = {}, {}, {}
    for pair in names:
        ours, theirs = (runs[method] for method in pair)
        common = [place for place in ours if place in theirs]
        ends = [[final(run[place], metric) for place in common] for run in (ours, theirs)]
        by_fold[pair] = paired(ends[0], ends[1], SHARED)
        values = [{p: read_queries(run[p].path / "queries.csv") for p in common} for run in (ours, theirs)]
        by_query[pair] = pair_queries(values[0], values[1], metric)
        gains[f"{pair[0]}\nagainst {pair[1]}"] = by_query[pair][0] - by_query[pair][1]
    tests = {pair: paired(*both) for pair, both in by_query.items()}
    holms = [holm({" - ".join(pair): test.p_t for pair, test in found.items()}) for found in (by_fold, tests)]
    head = ("what differs", "pair", "over folds", "p Holm", "over queries", "p Holm", "won", "lost", "URisk", "TRisk")
    rows: list[tuple[str, ...]] = [(*head, "GeoRisk")]
    for pair in names:
        risk = compare_rankers(*by_query[pair])
        cells = []
        for found, corrected in zip((by_fold, tests), holms, strict=True):
            cells += [
                f"{found[pair].difference.mean:+.4f} ± {found[pair].difference.half:.4f}",
                f"{corrected[' - '.join(pair)]:.2g}",
            ]
        cells += [str(risk.wins), str(risk.losses), f"{risk.u_risk:+.4f}", f"{risk.t_risk:+.1f}"]
        rows.append((PAIRS[pair], " - ".join(pair), *cells, f"{risk.geo_risk:.3f} against {risk.their_geo_risk:.3f}"))
    return markdown(rows), gains


def factors(runs: Runs, metric: str = "ndcg@5") -> str:
    """Means by rate, of the folds that all methods have, the best of each rate in bold."""
    rates = sorted({float(record.config["lr"]) for cells in runs.values() for record in cells.values()})
    runs = shared_places(runs)
    by = {
        m: {r: [final(x, metric) for p, x in c.items() if x.config["lr"] == r] for r in rates} for m, c in runs.items()
    }
    top = {r: max((np.mean(by[m][r]) for m in by if by[m][r]), default=np.nan) for r in rates}
    rows: list[tuple[str, ...]] = [("method", *(f"{rate:g} ({len(next(iter(by.values()))[rate])})" for rate in rates))]
    for method, own in by.items():
        texts = (f"{np.mean(own[r]):.3f}" if own[r] else "" for r in rates)
        rows.append((method, *(f"**{t}**" if t == f"{top[r]:.3f}" else t for r, t in zip(rates, texts, strict=True))))
    return markdown(rows)


def weights(runs: Runs) -> str:
    """What the weights of a round sum to, and how many clients weigh less than nothing."""
    rows: list[tuple[str, ...]] = [("method", "sum of a round's weights, mean", "least", "most", "weights below 0")]
    for method in (m for m in runs if m.startswith("fedrisk")):
        sums: list[float] = []
        below = all_of = 0
        for record in runs[method].values():
            by_round: dict[float, float] = {}
            for at, weight in zip(record.clients.numbers("round"), record.clients.numbers("weight"), strict=True):
                by_round[at] = by_round.get(at, 0.0) + weight
                below, all_of = below + (weight < 0), all_of + 1
            sums += by_round.values()
        rows.append((method, *(f"{f(sums):.3f}" for f in (np.mean, np.min, np.max)), f"{below} of {all_of}"))
    return markdown(rows)


def calm(runs: Runs, metric: str = "ndcg@5") -> str:
    """From which round on each method is stable, by the rule of `mutirao reproduce`, and how much it wobbles after."""
    rows: list[tuple[str, ...]] = [("method", "stable from round", "in fewer than 20", "wobble")]
    for method, cells in runs.items():
        first, still = (
            [Figure(of, metric, np.nan, 20, lower=False)(record) for record in cells.values()]
            for of in ("stable", "wobble")
        )
        found = interval(first, shared=SHARED)
        shown = "not shown" if found.holds(20) else "holds" if found.mean < 20 else "does not hold"
        rows.append((method, f"{found.mean:.0f} ± {found.half:.0f}", shown, f"{np.mean(still):.4f}"))
    return markdown(rows)


def bands(runs: Runs, path: Path) -> None:
    """The paper's figure 2: nDCG@10 by round, the mean over folds with its 95% interval."""
    curves = {
        m: [[(r["round"], r["ndcg@10"]) for r in x.rows if "ndcg@10" in r] for x in runs[m].values()]
        for m in BANDS
        if m in runs
    }
    draw_bands(curves, "ndcg@10", path)


def main(folder: Path) -> None:
    """Write the tables and pictures that there are runs for."""
    made: dict[str, str] = {}
    for key, name in SETS.items():
        if (table := folder / f"table1-{key}").joinpath("table.json").exists():
            made |= {f"table 1, {name}": table_1(table), f"claims, {name}": claims(table)}
            bands(runs_in(table), IMAGES / f"fedrisk-bands-{key}.png")
        if (trials := folder / f"tune-{key}").joinpath("trials.json").exists():
            made[f"chosen, {name}"] = chosen(trials)
        if (test := folder / f"test-{key}").joinpath("study.json").exists():
            runs = shared_places(runs_in(test))
            made |= {f"held out, {name}": heldout(runs), f"weights, {name}": weights(runs), f"calm, {name}": calm(runs)}
            made[f"pairs, {name}"], gains = pairs(runs)
            draw_wins(gains, "nDCG@5, difference", IMAGES / f"fedrisk-wins-{key}.png")
        if (several := folder / f"factors-{key}").joinpath("study.json").exists():
            made[f"factors, {name}"] = factors(runs_in(several))
    fill_page(PAGE, made)
    print(f"written: {PAGE}: {', '.join(made)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
