"""The ratio n_test/n_train of splits of one data set, which makes their runs dependent.

Runs over folds or splits of one set are not independent: any two were trained on mostly the same samples. Nadeau and
Bengio (Machine Learning 52, 2003) add n_test/n_train to 1/J in the variance of a mean over J splits; Bouckaert and
Frank (PAKDD 2004) do the same for folds repeated over seeds.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mutirao.config import Common
from mutirao.errors import ConfigError

FOLD = "fold"  # the axis of splits of one set


def shared_of(given: Any, axes: Mapping[str, Sequence[Any]], config: type[Common]) -> float:
    """n_test/n_train as given in the study file, a number or "1/4"; else that of its folds, or 0 without folds.

    Of k folds one tests and the others train, except another one for validation, if any: 1/(k-1) or 1/(k-2).
    """
    if given is not None:
        return ratio_of(given)
    if FOLD not in axes:
        return 0.0
    fold = {f.name: f for f in dataclasses.fields(config)}.get(FOLD)
    folds = len(axes[FOLD])
    if fold is not None and fold.metadata.get("high"):
        folds = fold.metadata["high"]
    held_out = 2 if has_validation(config) else 1
    return 1.0 / max(1, folds - held_out)


def ratio_of(given: Any) -> float:
    """A non-negative number, or a fraction as text."""
    ratio = math.nan
    if isinstance(given, str) and "/" in given:
        numerator, _, denominator = given.partition("/")
        with contextlib.suppress(ValueError, ZeroDivisionError):
            ratio = float(numerator) / float(denominator)
    elif isinstance(given, int | float) and not isinstance(given, bool):
        ratio = float(given)
    if not 0 <= ratio < math.inf:
        raise ConfigError(f'shared: {given!r} is not test samples for each training sample, such as 0.25 or "1/4"')
    return ratio


def has_validation(config: type[Common]) -> bool:
    """Whether a recipe can be evaluated on validation data: its setting `judge_by` accepts "vali"."""
    setting = {f.name: f for f in dataclasses.fields(config)}.get("judge_by")
    return setting is not None and "vali" in (setting.metadata.get("choices") or ())
