"""Secure aggregation by name: `none`, `secagg+`. The server sees sums of updates, never a single update.

`docs/secure.md` lists the attackers against which that protects, and those against which it does not.
"""

from mutirao.privacy.secure_aggregation.kinds import NoSecureAggregation, SecAggPlus, Secure

NAMES = {"none": NoSecureAggregation, "secagg+": SecAggPlus}

__all__ = ["NAMES", "NoSecureAggregation", "SecAggPlus", "Secure"]
