"""What a study allows to say, as rows for its page: the best method first, each with how it stands to the baseline."""

from pathlib import Path
from typing import Any

from mutirao.report.study_report import best_of, cell_states, tell_study, thresholds_of
from mutirao.runs.reader import clean, json_of

FIGURES = ("mean", "half_t", "best", "wobble", "difference", "difference_half", "p_t", "p_holm")


def study_of(folder: Path) -> dict[str, Any]:
    """The study's sentences, and a table for each of its metrics."""
    table, plan = json_of(folder / "table.json"), json_of(folder / "study.json")
    lines = [x for x in table.get("lines") or [] if isinstance(x, dict) and "metric" in x and "method" in x]
    metrics = dict.fromkeys(str(x["metric"]) for x in lines)
    tables = [table_of(table, [x for x in lines if str(x["metric"]) == metric], metric) for metric in metrics]
    goals = thresholds_of(plan)
    tables = [found | {"threshold": goals.get(found["metric"])} for found in tables]
    planned = plan.get("cells")
    cells = [str(c) for c in planned] if isinstance(planned, list) else []
    words = list(tell_study(table, lines, cell_states(folder, plan)))
    found: dict[str, Any] = {"words": words, "baseline": str(table.get("baseline", "")), "planned": cells}
    return found | {"tables": clean(tables)}


def table_of(table: dict[str, Any], lines: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The methods by one metric, the best first; if nobody says which way is better, in the order of the study."""
    known = [x for x in lines if isinstance(x.get("mean"), int | float)]
    top = best_of(known, metric, table)
    if top is not None:
        falling = all(top["mean"] >= x["mean"] for x in known)
        known = sorted(known, key=lambda x: -x["mean"] if falling else x["mean"])
    rows = [row_of(x, x is top, str(table.get("baseline", ""))) for x in known]
    return {"metric": metric, "rows": rows}


def row_of(line: dict[str, Any], top: bool, baseline: str) -> dict[str, Any]:
    """One method: its figures, and the comparison's verdict in a word."""
    numbers = {k: v for k in FIGURES if isinstance(v := line.get(k), int | float) and not isinstance(v, bool)}
    verdict = str(line.get("verdict", ""))
    word = "baseline" if str(line["method"]) == baseline else {"not shown": "undecided"}.get(verdict, verdict)
    values = line.get("values")
    runs = len(values) if isinstance(values, list) else 0
    reached = str(line.get("rounds_to") or "")
    return {"method": str(line["method"]), "top": top, "verdict": word, "runs": runs, "rounds_to": reached, **numbers}
