"""What a reproduction comes to: published values beside ours, and a verdict on each claim."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutirao.studies.claims import RULES, EvaluatedClaim, evaluate_claims
from mutirao.studies.comparison import MethodResult
from mutirao.studies.reproduction import System
from mutirao.studies.study import Study

BESIDE = ("metric", "method", "published", "ours", "runs", "published rounds", "our rounds")


def outcome_of(
    system: System, study: Study, size: str, label: str, cuts: Sequence[str], out: Path, *, stand_in: bool
) -> dict[str, Any]:
    """What `reproduction.json` says; a claim is asked where all of its methods are run, in the form it is for."""
    asked = [c for c in system.claims if c.methods <= {*study.methods} and c.only in ("", size)]
    unasked = [c.says for c in system.claims if c not in asked]
    facts = {"schema": 1, "system": system.name, "title": system.title, "paper": system.paper, "page": system.page}
    claims = [claim_row(judged, stand_in) for judged in evaluate_claims(study, asked, out)]
    more = [*cuts, *(f"claim not asked in this size: {says}" for says in unasked)]
    return {**facts, "size": size, "data": label, "stand_in": stand_in, "cuts": more, "claims": claims}


def claim_row(judged: EvaluatedClaim, stand_in: bool) -> dict[str, Any]:
    """A claim for tables: on data that stand in for the paper's nothing is shown of it, whatever the figures are."""
    claim, verdict, ours = judged.claim, judged.verdict, judged.ours
    if stand_in:
        verdict, ours = "not shown", f"stand-in data, on which: {judged.verdict}; {ours}"
    published = f" (published: {claim.published})" if claim.published else ""
    return {
        "says": claim.says,
        "published": claim.published,
        "ours": ours,
        "verdict": verdict,
        "rule": RULES[claim.rule],
        "line": f"{claim.says}{published}: {ours}",
    }


def beside_rows(lines: Sequence[MethodResult]) -> list[tuple[str, ...]]:
    """All methods by all metrics: what is published, nothing where nothing is, and ours."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        half = "" if math.isnan(line.final.half) else f" ± {line.final.half:.4f}"
        told = line.claim
        rounds = "" if told is None or math.isnan(told.rounds) else f"{told.rounds:g}"
        published = str(told) if told else ""
        ours = f"{line.final.mean:.4f}{half}"
        rows.append((line.metric, line.method, published, ours, str(len(line.values)), rounds, line.reached))
    return rows
