"""The warm-up: all clients train the same test model, whenever they come, and send a signature of it, not the model."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from mutirao.clustering.context import GroupContext
from mutirao.clustering.plan import Plan
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar
from mutirao.core.validation import fault_of_extras


def warm_up(context: GroupContext, clients: Sequence[ClientId], size: int = 0) -> dict[ClientId, Reply]:
    """The signatures of these clients, `size` numbers each, and which classes they hold if heads are cut to them."""
    run, plan, size = context.run, context.plan, size or context.plan.signature_size
    config: dict[str, Scalar] = {"seed": run.seed, "round": 0}
    if plan.reduced_heads:
        config["holdings"] = True
    common = Request("warm", plan.model(plan.classes), config)
    replies = context.ask(dict.fromkeys(clients, common), "warm-up", partial(fault_of_signature, plan, size))
    return replies if size else of_one_length(context, replies)


def fault_of_signature(plan: Plan, size: int, reply: Reply) -> Failure | None:
    """What is wrong with a reply to a warm-up, or None."""
    if (wrong := fault_of_extras(reply)) is not None:
        return wrong
    signature, holdings = reply.extras.get("signature"), reply.extras.get("holdings")
    if signature is None or (plan.reduced_heads and holdings is None):
        return Failure("missing_key", "sent no signature, or not which classes it holds")
    if signature.dtype != np.float32 or signature.ndim != 1 or (size and len(signature) != size):
        expected = f"{size or 'a row of'} float32"
        return Failure("shape", f"sent a signature of {signature.dtype} {signature.shape}, expected {expected}")
    if plan.reduced_heads and holdings is not None and holdings.shape != (plan.classes,):
        return Failure("shape", f"sent holdings of shape {holdings.shape}, expected {plan.classes}")
    return None


def of_one_length(context: GroupContext, replies: dict[ClientId, Reply]) -> dict[ClientId, Reply]:
    """Those whose signatures are as long as most are; where nobody knows beforehand, most are believed."""
    lengths = Counter(len(reply.extras["signature"]) for reply in replies.values())
    usual = max(lengths, key=lambda length: (lengths[length], -length), default=0)
    for client, reply in replies.items():
        if (length := len(reply.extras["signature"])) != usual:
            context.note(client, failure=str(Failure("shape", f"sent a signature of {length} numbers, others {usual}")))
    return {c: r for c, r in replies.items() if len(r.extras["signature"]) == usual}
