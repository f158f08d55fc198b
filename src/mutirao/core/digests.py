"""Digests of values and replies, the same on both sides."""

import hashlib
import json
from typing import Any

from mutirao.core.arrays import digest
from mutirao.core.fleet import Reply


def fingerprint(value: Any) -> str:
    """sha256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def reply_fingerprint(reply: Reply) -> str:
    """sha256 over the arrays, extras, metrics and sample count of a reply."""
    metrics = {k: float(v) for k, v in reply.metrics.items()}
    parts = {"arrays": digest(reply.arrays), "extras": digest(reply.extras), "metrics": metrics, "n": int(reply.n)}
    return fingerprint(parts)
