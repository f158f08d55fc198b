"""A policy in words, with what was spent of its privacy budget."""

import math

from mutirao.accounting import epsilon
from mutirao.deploy.ledger import Ledger
from mutirao.deploy.policy import Policy


def describe_policy(policy: Policy) -> dict[str, str]:
    """What a policy allows, in words, and what was spent."""
    faults = {name: policy.fault_of(name) for name in policy.recipes}
    out = {f"recipe {name}": f"REFUSED: {fault}" if fault else "allowed" for name, fault in faults.items()}
    cover, reply = policy.privacy, policy.reply
    parts = {"arrays": reply.arrays, "extras": reply.extras, "metrics": reply.metrics}
    out |= {"may be asked": ", ".join(policy.asked.requests) or "nothing"}
    out["extras coming in"] = ", ".join(policy.asked.extras) or "none"
    out |= {f"{kind} that leave": ", ".join(names) or "none" for kind, names in parts.items()}
    out["fewest samples"] = str(policy.asked.min_samples)
    out["largest reply"] = f"{reply.largest} bytes"
    out["clip, noise"] = f"{cover.clip:g}, {cover.noise:g}" if cover.clip else "none"
    if cover.budget or cover.run_budget:
        spent = epsilon(Ledger(policy.ledger).total(), cover.delta, cover.accountant)
        most, in_run = cover.budget or math.inf, cover.run_budget or math.inf
        out["epsilon spent"] = f"{spent:.4g} of {most:g}, at most {in_run:g} a run"
    return out
