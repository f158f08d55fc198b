"""Secure aggregation by name: `none`, `secagg+`. The server sees sums of updates, never a single update.

`docs/secure.md` says against whom that protects, and against whom it does not.
"""

from mutirao.privacy.secure_aggregation.kinds import NoSecureAggregation, SecAggPlus, Secure

NAMES = {"none": NoSecureAggregation, "secagg+": SecAggPlus}

__all__ = ["NAMES", "NoSecureAggregation", "SecAggPlus", "Secure"]
