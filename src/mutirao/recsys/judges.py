"""Who judges an item matrix, and by which ratings, as the settings of the recipe say."""

from collections.abc import Collection
from typing import Any

from mutirao.errors import ConfigError
from mutirao.recsys.consent import without
from mutirao.recsys.fedrecon import FedRecon
from mutirao.recsys.held_out import HeldOutJudge, hold_out
from mutirao.recsys.judging import Judge
from mutirao.recsys.methods.client import Examination, KeptUsers, metrics_of
from mutirao.recsys.ratings import Ratings, join
from mutirao.recsys.split import all_but_last, deal, supports


def judged(
    config: Any, method: FedRecon | KeptUsers, ratings: Ratings, withdrawn: Collection[str] = ()
) -> tuple[Ratings, Judge | HeldOutJudge | Examination, tuple[str, ...]]:
    """What is trained on, the judge, and who it is made of; those who withdrew take no part in it, and are named."""
    if config.fold and config.judge_by == "vali":
        raise ConfigError("judge_by=vali: of folds nobody is kept to validate; use judge_by=test, or fold=0")
    if config.split == "leave_one_out" and not method.implicit:
        raise ConfigError("split=leave_one_out ranks items for implicit feedback; set loss=weighted or loss=bpr")
    parts = deal(ratings, config.split, config.fold, config.seed)
    train, names = parts[0], parts[2 if config.judge_by == "test" else 1].users
    if gone := {*names}.intersection(withdrawn):
        parts = without(parts[0], gone), without(parts[1], gone), without(parts[2], gone)
    if isinstance(method, KeptUsers):
        held = hold_out(parts, config.judge_by, config.candidates, config.seed) if method.implicit else None
        sought = parts[2 if config.judge_by == "test" else 1]
        return train, Examination(sought, held, metrics_of(method.method, config.candidates)), names
    if config.split == "leave_one_out":
        held = hold_out(parts, config.judge_by, config.candidates, config.seed)
        return train, HeldOutJudge(method, parts[0], held, config.seed), names
    test = parts[2 if config.judge_by == "test" else 1]
    if config.split == "time":
        test, known = join(parts[0], test)
    elif method.implicit:
        known = all_but_last(test)
    else:
        known = supports(test, config.support, config.support_by, config.seed)
    return train, Judge(method, test, known, config.seed), names
