"""How stale a reply is: how many models were made since its client began."""

from mutirao.core.fleet import Reply


def staleness_of(reply: Reply) -> float:
    """As the fleet found it; 0 of a client that was waited for."""
    return max(0.0, float(reply.metrics.get("staleness", 0.0)))


def check_setting(name: str, right: bool, value: object, wanted: str) -> None:
    """Refuse a setting with a wrong value."""
    if not right:
        raise ValueError(f"{name} is {value!r}, but must be {wanted}")
