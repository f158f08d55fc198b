"""Describe a policy in words, with its privacy spending and its weak points."""

import math

from mutirao.deploy.policy.pins import ARCHITECTURE
from mutirao.deploy.policy.privacy_ledger import Ledger
from mutirao.deploy.policy.rules import Policy, is_allowed
from mutirao.privacy.accounting import epsilon

# An update from fewer samples or steps gets a warning.
FEW_SAMPLES = 50
FEW_STEPS = 10
UPDATE_PINS = (ARCHITECTURE, "batch_size", "epochs", "lr", "samples")  # pins without which a server shapes an update


def describe_policy(policy: Policy) -> dict[str, str]:
    """What a policy allows and has spent, by topic."""
    faults = {name: policy.fault_of(name) for name in policy.recipes}
    out = {f"recipe {name}": f"REFUSED: {fault}" if fault else "allowed" for name, fault in faults.items()}
    cover = policy.privacy
    reply = policy.reply
    parts = {"arrays": reply.arrays, "extras": reply.extras, "metrics": reply.metrics}
    out |= {"may be asked": ", ".join(policy.asked.requests) or "nothing"}
    out["extras coming in"] = ", ".join(policy.asked.extras) or "none"
    out["method settings"] = ", ".join(policy.asked.told) or "nothing"
    out |= {f"{kind} that leave": ", ".join(names) or "none" for kind, names in parts.items()}
    out |= {f"pinned {name}": f"{len(pins)} settings" for name, pins in policy.pinned.items()}
    out["fewest samples"] = str(policy.asked.min_samples)
    out["largest reply"] = f"{reply.largest} bytes"
    out["clip, noise"] = f"{cover.clip:g}, {cover.noise:g}" if cover.clip else "none"
    if cover.budget or cover.run_budget:
        spent = epsilon(Ledger(policy.ledger).total(), cover.delta, cover.accountant)
        most = cover.budget or math.inf
        in_run = cover.run_budget or math.inf
        out["epsilon spent"] = f"{spent:.4g} of {most:g}, at most {in_run:g} a run"
    return out | {f"warning {i}": text for i, text in enumerate(weaknesses(policy), 1)}


def weaknesses(policy: Policy) -> list[str]:
    """Warnings where an update may reveal few samples; empty if no update leaves, or only with noise."""
    asked = policy.asked
    reply = policy.reply
    found: list[str] = []
    if is_allowed("squared_errors", reply.extras):
        found.append("reply.extras: squared_errors reveals the error of each single sample")
    if "train" not in asked.requests or not reply.arrays or policy.privacy.noise:
        return found
    if asked.min_samples < FEW_SAMPLES:
        found.append(f"asked.min_samples: an update of {asked.min_samples} samples may leave")
    for name in policy.recipes:
        pins = policy.pinned.get(name, {})
        if missing := [key for key in UPDATE_PINS if key not in pins]:
            found.append(f"pinned.{name}: {', '.join(missing)} may be chosen so that an update shows single samples")
        batch = pins.get("batch_size")
        epochs = pins.get("epochs")
        if isinstance(batch, int) and isinstance(epochs, int) and not isinstance(batch, bool) and batch > 0:
            steps = epochs * -(-asked.min_samples // batch)
            if steps < FEW_STEPS:
                found.append(f"pinned.{name}: an update of {steps} steps may leave, which is nearly a plain gradient")
    found.append("privacy.noise: without noise an update can show single samples; try it: mutirao drill leak")
    return found
