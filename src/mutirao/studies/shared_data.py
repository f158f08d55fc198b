"""How much data the cells of a study have in common: test samples for each training sample, of splits of one set.

Over folds or splits of one set the runs are no independent witnesses: any two of them were trained on mostly the same
samples. Nadeau and Bengio (Machine Learning 52, 2003) add n_test/n_train to 1/J in the variance of a mean over J
splits; Bouckaert and Frank (PAKDD 2004) do the same for folds repeated over seeds.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mutirao.config import Common
from mutirao.errors import ConfigError

FOLD = "fold"  # the axis whose values are splits of one set


def shared_of(told: Any, axes: Mapping[str, Sequence[Any]], config: type[Common]) -> float:
    """n_test/n_train as the study file says it, a number or "1/4"; else that of its folds, or 0 without any.

    Of k folds one judges and the others train, or all but two where another one validates: 1/(k-1) or 1/(k-2).
    """
    if told is not None:
        return ratio_of(told)
    if FOLD not in axes:
        return 0.0
    fold = {f.name: f for f in dataclasses.fields(config)}.get(FOLD)
    parts = (fold.metadata.get("high") if fold is not None else None) or len(axes[FOLD])
    return 1.0 / max(1, parts - (2 if has_validation(config) else 1))


def ratio_of(told: Any) -> float:
    """A number or a fraction as text, from 0 on."""
    first, slash, second = told.partition("/") if isinstance(told, str) else (told, "", "1")
    try:
        if isinstance(told, bool) or (isinstance(told, str) and not slash):
            raise ValueError
        ratio = float(first) / float(second)
    except (TypeError, ValueError, ZeroDivisionError):
        ratio = math.nan
    if not 0 <= ratio < math.inf:
        right = 'test samples for each training sample, such as 0.25 or "1/4"'
        raise ConfigError(f"shared: {told!r} is not {right}")
    return ratio


def has_validation(config: type[Common]) -> bool:
    """Whether a recipe can be judged by data that neither train nor test: its `judge_by` may be "vali"."""
    judge_by = {f.name: f for f in dataclasses.fields(config)}.get("judge_by")
    return judge_by is not None and "vali" in (judge_by.metadata.get("choices") or ())
