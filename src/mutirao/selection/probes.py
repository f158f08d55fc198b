"""Probes: what clients measure before a selection, and on how many samples."""

from typing import Literal

from mutirao.selection.base import check_setting

Refresh = Literal["selected", "all", "share"]
PROBE_SAMPLES = 100


def limit(samples: int) -> str:
    """The need that a client measures its metrics on at most so many samples."""
    return f"config:probe_samples={samples}"


def check_probe(refresh: str, share: float, samples: int) -> None:
    """Refuse wrong settings of a probe."""
    check_setting("refresh", refresh in ("selected", "all", "share"), refresh, "one of selected, all, share")
    check_setting("share", 0 < share <= 1, share, "above 0 and at most 1")
    check_setting("samples", samples >= 1, samples, "at least 1")
