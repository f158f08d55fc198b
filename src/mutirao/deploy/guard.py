"""The site's policy around any handler: what is asked is judged before it is done, what came of it before it leaves.

The seam: a handler is `(request, site) -> reply`, and so is `guarded(handler, policy)`. It runs in the site's own
process with the site's installed code; a refusal is raised as `Refused`, which every fleet turns into a failure of
kind `refused` that names the rule. `deploy/flower/client.py` calls `approve` before a task is made and puts `guarded`
around its handler, if the node has a policy; whatever else a site is run by does the same with the same two calls.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mutirao.accounting import NOTHING, Releases, add_releases
from mutirao.core.arrays import Arrays, digest, nbytes
from mutirao.core.fingerprints import reply_fingerprint
from mutirao.core.fleet import Reply, Request, Scalar, Site, failure_of
from mutirao.core.parts import AnyHandler
from mutirao.core.rows import ROWS, whole
from mutirao.deploy.ledger import Ledger, alone, difference
from mutirao.deploy.policy import Policy, is_allowed
from mutirao.errors import MutiraoError, Refused
from mutirao.privacy import RELEASES, add_noise, clip_update
from mutirao.runs.audit import Audit
from mutirao.secure import Open, Secure
from mutirao.secure.settings import KEYS, SHARES, UNMASK

Facts = dict[str, Any]
WITHOUT_DATA = {KEYS, SHARES, UNMASK}  # stages of a sum in which nothing leaves that depends on data
UNCOUNTED = "a budget is kept here, and this reply has no noise that could be counted"


@dataclass(frozen=True)
class Asker:
    """Who asks, as far as a site can know: which run, for which recipe, and where the server's own trail stands."""

    run: str = ""
    recipe: str = ""
    site: str = ""  # the name under which the site was asked
    server: Mapping[str, Scalar] = field(default_factory=dict)  # what `Audit.where` says on its side

    def facts(self) -> Facts:
        """What the trail says of it."""
        facts = {"site": self.site, "run": self.run, "recipe": self.recipe, "server": dict(self.server)}
        return {k: v for k, v in facts.items() if v}


def approve(policy: Policy, asker: Asker, run_config: Mapping[str, Scalar]) -> None:
    """Judge a recipe and its settings before anything of it is imported; a refusal is written down and raised."""
    with discreet(policy, asker.facts()):
        policy.approve(asker.recipe, run_config)


@contextlib.contextmanager
def discreet(policy: Policy, about: Facts) -> Iterator[None]:
    """Write down what goes wrong; the server learns of a rule or of a kind of error, never an error's text."""
    try:
        yield
    except Refused as error:
        more = {"detail": error.detail} if error.detail else {}
        write_event(policy, "refused", rule=error.rule, reason=failure_of(error).reason, **more, **about)
        raise
    except Exception as error:
        write_event(policy, "raised", reason=failure_of(error).reason, **about)
        raise MutiraoError(f"{type(error).__name__} at the site, whose own records say more") from error


def write_event(policy: Policy, event: str, **facts: Any) -> None:
    """Write an event to the site's trail."""
    with alone(policy.audit):
        Audit(policy.audit).append(event, **facts)


@dataclass(frozen=True)
class guarded:  # noqa: N801  # it reads as what it does: guarded(handler, policy)
    """A handler under a policy: `(request, site) -> reply`, or `Refused` with the rule."""

    handler: AnyHandler
    policy: Policy
    asker: Asker = field(default_factory=Asker)
    secure: Secure = Open()  # what is judged in the clear leaves as this makes it

    def __call__(self, request: Request, site: Site) -> Reply:
        """The reply as the site lets it leave."""
        about = self.asker.facts() | {"site": site.id, "do": str(request.do)[:40]}
        about["round"] = request.config.get("round", 0)
        came = {"bytes": nbytes(request.arrays) + nbytes(request.extras), "model": digest(request.arrays)}
        if request.extras:
            came["extras"] = sorted(name[:80] for name in request.extras)
        write_event(self.policy, "asked", **came, **about)
        with discreet(self.policy, about):
            spent = site.state.get(RELEASES)
            leaving = self.secure.at_client(self.judge)(request, site)
            return self.let_go(leaving, difference(spent, site.state.get(RELEASES)), about)

    def judge(self, request: Request, site: Site) -> Reply:
        """What the handler does, if it may be asked, as far as it may leave."""
        n = self.before(request, site)
        return self.after(request, self.handler(request, site), n)

    def before(self, request: Request, site: Site) -> int | None:
        """Refuse what may not be asked, without doing it; how many samples are here, if that can be known."""
        asked, n = self.policy.asked, samples_in(site.data)
        if request.do not in asked.requests:
            raise Refused("asked.requests", f"{str(request.do)[:40]!r} may not be asked here")
        for name in sorted(request.extras):
            if not is_allowed(name, asked.extras):
                raise Refused("asked.extras", "one of the extras of the request may not come in", name[:80])
        if n is not None and n < asked.min_samples:
            raise Refused("asked.min_samples", f"fewer than {asked.min_samples} samples are here")
        return n

    def after(self, request: Request, reply: Reply, samples: int | None = None) -> Reply:
        """The reply as it may leave; Refused if it may not."""
        rules = self.policy.reply
        if not isinstance(reply, Reply):
            raise Refused("reply", "the handler gave no Reply")
        if samples is None and reply.n < self.policy.asked.min_samples:
            raise Refused("asked.min_samples", f"fewer than {self.policy.asked.min_samples} samples were used")
        for name in sorted(reply.arrays):
            if not is_allowed(name, rules.arrays):
                raise Refused("reply.arrays", "an array of the reply may not leave", name[:80])
        extras = self.permit("extras", reply.extras, rules.extras)
        metrics = self.permit("metrics", reply.metrics, rules.metrics)
        metrics = {k: round(float(v), rules.decimals) for k, v in metrics.items()} if rules.decimals < 17 else metrics
        n = max(1, reply.n // rules.samples_step * rules.samples_step)
        arrays = reply.arrays
        if self.policy.privacy.clip and arrays:
            arrays = self.cover(request, arrays)
            n = 1 if self.policy.privacy.noise else n  # there is no noise on the number of samples
        out = Reply(arrays, extras, metrics, n)
        if (size := bytes_of(out)) > rules.largest:
            raise Refused("reply.largest", f"the reply has {size} bytes, {rules.largest} are the most")
        return out

    def cover(self, request: Request, arrays: Arrays) -> Arrays:
        """An update clipped and noised as the policy asks for; what is no update cannot be, and is refused."""
        cover, model = self.policy.privacy, request.arrays
        if request.do != "train" or {k.removesuffix(ROWS) for k in arrays} != model.keys():
            raise Refused("privacy.clip", "only an update of the model that was sent can be clipped")
        full = whole(model, arrays)
        update, _ = clip_update(model, full, cover.clip)
        moved = add_noise(model, update, np.random.default_rng(), cover.noise * cover.clip)
        return moved if cover.noise else {k: moved[k] if v.dtype.kind == "f" else full[k] for k, v in model.items()}

    def permit(self, kind: str, values: dict[str, Any], patterns: tuple[str, ...]) -> dict[str, Any]:
        """The values whose names may leave; others are taken out or end it, as the policy says."""
        for name in sorted(values):
            if not is_allowed(name, patterns) and not self.policy.reply.remove:
                raise Refused(f"reply.{kind}", f"one of the {kind} of the reply may not leave", name[:80])
        return {k: v for k, v in values.items() if is_allowed(k, patterns)}

    def let_go(self, reply: Reply, by_handler: Releases, about: Facts) -> Reply:
        """Enter what the reply costs into the ledger, then into the trail; only then it may leave."""
        cover, spent = self.policy.privacy, None
        if (cover.budget or cover.run_budget) and about["do"] not in WITHOUT_DATA:
            own = add_releases(None, cover.noise / 2, 1.0, 1) if cover.noise and reply.arrays else NOTHING
            releases = own if len(own) else by_handler
            if not len(releases):
                raise Refused("privacy.budget", UNCOUNTED)
            with alone(self.policy.ledger):
                spent = Ledger(self.policy.ledger).charge(cover, self.asker.run, releases)
        gone: Facts = {"reply": reply_fingerprint(reply), "bytes": bytes_of(reply), "n": int(reply.n)}
        gone |= {kind: sorted(getattr(reply, kind)) for kind in ("arrays", "extras", "metrics")}
        write_event(self.policy, "sent", **gone, **({} if spent is None else {"epsilon": spent}), **about)
        return reply


def bytes_of(reply: Reply) -> int:
    """How many bytes of numbers a reply holds."""
    return nbytes(reply.arrays) + nbytes(reply.extras) + 8 * (len(reply.metrics) + 1)


def samples_in(data: Any) -> int | None:
    """How many samples a site holds, if its data can say so without being used."""
    if isinstance(data, tuple | list):
        sizes = {len(part) for part in data if hasattr(part, "__len__")}
        return sizes.pop() if len(sizes) == 1 else None
    data = getattr(data, "train", data)  # what a client only judges by does not count
    return len(data) if hasattr(data, "__len__") and hasattr(data, "batch") else None
