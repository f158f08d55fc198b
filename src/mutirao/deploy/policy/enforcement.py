"""A site's policy enforced around any handler: requests are checked before the work, replies before they leave.

A handler is `(request, site) -> reply`, and so is `PolicyHandler(handler, policy)`. It runs in the site's
own process with the site's installed code; a refusal is raised as `Refused`, which every fleet reports as a failure of
kind `refused` that names the rule. `deploy/flower/client.py` calls `approve` before a task is made and puts a
`PolicyHandler` around its handler, if the node has a policy; other ways to run a site do the same with these two.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mutirao.compression import Compression, NoCompression
from mutirao.core.agreement import AGREE
from mutirao.core.arrays import Arrays, digest, nbytes
from mutirao.core.fleet import Reply, Request, Scalar, Site, failure_of, reply_fingerprint
from mutirao.core.hyperparameters import BY_METHODS, HYPERPARAMETERS
from mutirao.core.parts import AnyHandler
from mutirao.core.sparse_rows import ROWS, to_dense
from mutirao.deploy.policy.pins import check_architecture, check_pins
from mutirao.deploy.policy.privacy_ledger import Ledger, append_event, exclusive, new_releases, without_noise
from mutirao.deploy.policy.rules import Policy, assignments, is_allowed, repeatable_settings
from mutirao.deploy.site.pause import refuse_if_paused
from mutirao.errors import MutiraoError, Refused
from mutirao.privacy import RELEASES, add_noise, clip_update
from mutirao.privacy.accounting import Releases, add_releases
from mutirao.privacy.secure_aggregation import NoSecureAggregation, Secure
from mutirao.privacy.secure_aggregation.settings import KEYS, SHARES, UNMASK
from mutirao.randomness import Secret
from mutirao.selection import PROBE_SAMPLES

Facts = dict[str, Any]
VALIDATED = "val_"  # how the names of metrics begin that a client finds on samples it has kept back while it trains
WITHOUT_DATA = {KEYS, SHARES, UNMASK, AGREE}  # nothing leaves that depends on data: stages of a sum, an agreement
UNCOUNTED = "this site has a privacy budget, and this reply has no noise that could be counted"


@dataclass(frozen=True)
class Requester:
    """The origin of a request, as far as a site can know it: run, recipe, and the head of the server's audit trail."""

    run: str = ""
    recipe: str = ""
    site: str = ""  # the name under which the site was asked
    server: Mapping[str, Scalar] = field(default_factory=dict)  # what `Audit.where` says on its side
    repeatable: bool = False  # whether the noise of this run comes from its seed

    def facts(self) -> Facts:
        """The facts for the audit trail."""
        facts = {"site": self.site, "run": self.run, "recipe": self.recipe, "server": dict(self.server)}
        return {k: v for k, v in facts.items() if v}


def approve(
    policy: Policy,
    asker: Requester,
    run_config: Mapping[str, Scalar],
    settle: Callable[[], Mapping[str, Scalar]] | None = None,
) -> Requester:
    """Check a recipe and its settings; a refusal is recorded and raised. Returns the completed requester.

    The server's settings are checked before the recipe is imported; then the result of `settle()`, which adds the
    recipe's defaults and the site's own settings. Without `settle`, the site's own code reads the server's settings.
    """
    with hide_errors(policy, asker.facts()):
        refuse_if_paused(policy)
        replaces = settle is not None
        policy.approve(asker.recipe, run_config, replaces)
        settings: Mapping[str, Scalar]
        if settle is not None:
            settings = settle()
        else:
            # Settings that the server leaves out are as agreed.
            settings = {**policy.pinned.get(asker.recipe, {}), **dict(assignments(run_config))}
        policy.hold(asker.recipe, settings, replaces)
    return replace(asker, repeatable=bool(repeatable_settings(settings)))


@contextlib.contextmanager
def hide_errors(policy: Policy, about: Facts) -> Iterator[None]:
    """Record errors; the server learns the rule or the type of an error, never its text."""
    try:
        yield
    except Refused as error:
        more = {"detail": error.detail} if error.detail else {}
        write_event(policy, "refused", rule=error.rule, reason=failure_of(error).reason, **more, **about)
        raise
    except Exception as error:
        write_event(policy, "raised", reason=failure_of(error).reason, **about)
        raise MutiraoError(f"{type(error).__name__} at the site; see the site's own records") from error


def write_event(policy: Policy, event: str, **facts: Any) -> None:
    """Write an event to the site's trail."""
    append_event(policy.audit, event, **facts)


@dataclass(frozen=True)
class SampleCounts:
    """Number of a site's training and test samples; None if they cannot be counted without being used."""

    train: int | None = None
    test: int | None = None

    @classmethod
    def of(cls, data: Any) -> "SampleCounts":
        """Count the samples in a site's data."""
        if isinstance(data, cls):
            return data
        if isinstance(data, tuple | list):
            # The length of a tuple or dict is its number of inputs, not of samples.
            counted = [part for part in data if not isinstance(part, tuple | dict)]
            sizes = {len(part) for part in counted if hasattr(part, "__len__")}
            if len(sizes) != 1:
                return cls()
            return cls(sizes.pop())
        return cls(number_of_samples(getattr(data, "train", data)), number_of_samples(getattr(data, "test", None)))

    def used_by(self, do: str) -> int | None:
        """Upper bound on the samples that a request uses."""
        if do in ("evaluate", "take"):
            return self.test
        return self.train


def number_of_samples(samples: Any) -> int | None:
    """Number of samples, if they can be counted: rows of batches or of a table."""
    countable = hasattr(samples, "__len__") and (hasattr(samples, "batch") or hasattr(samples, "columns"))
    if countable:
        return len(samples)
    return None


@dataclass(frozen=True)
class PolicyHandler:
    """A handler under a policy: it returns a reply that may leave, or raises `Refused` with the rule.

    >>> import numpy as np
    >>> from mutirao.deploy.policy.rules import Policy, ReplyRules, RequestRules
    >>> def answer(request, site):
    ...     return Reply({"w": np.zeros(1)}, metrics={"loss": 0.5, "patients": 3.0}, n=40)
    >>> policy = Policy(asked=RequestRules(requests=("train",)), reply=ReplyRules(arrays=("w",), metrics=("loss",)))
    >>> PolicyHandler(answer, policy)(Request("train", {"w": np.zeros(1)}, {"round": 1}), Site("ana", list(range(40))))
    Traceback (most recent call last):
        ...
    mutirao.errors.Refused: reply.metrics: one of the metrics of the reply may not leave
    """

    handler: AnyHandler
    policy: Policy
    asker: Requester = field(default_factory=Requester)
    secure: Secure = NoSecureAggregation()  # applied after the checks, which see plain arrays
    compress: Compression = NoCompression()  # applied last

    def __call__(self, request: Request, site: Site) -> Reply:
        """Check the request, do the work, and return the reply as it may leave."""
        about = self.asker.facts() | {"site": site.id, "do": str(request.do)[:40]}
        about["round"] = request.config.get("round", 0)
        came = {"bytes": nbytes(request.arrays) + nbytes(request.extras), "model": digest(request.arrays)}
        if request.extras:
            came["extras"] = sorted(name[:80] for name in request.extras)
        if hyperparameters := hyperparameters_in(request):
            came["told"] = [f"{k}={str(v)[:40]}" for k, v in sorted(hyperparameters.items())]
        write_event(self.policy, "asked", **came, **about)
        with hide_errors(self.policy, about):
            refuse_if_paused(self.policy)
            spent = site.state.get(RELEASES)
            leaving = self.compress.at_client(self.secure.at_client(self.checked_reply))(request, site)
            return self.let_go(leaving, new_releases(spent, site.state.get(RELEASES)), about)

    def checked_reply(self, request: Request, site: Site) -> Reply:
        """The handler's reply, checked before and after."""
        counts = self.before(request, site)
        spent = site.state.get(RELEASES)
        reply = self.handler(request, site)
        by_handler = new_releases(spent, site.state.get(RELEASES))
        return self.after(request, reply, counts, noised=len(by_handler) > 0)

    def before(self, request: Request, site: Site) -> SampleCounts:
        """Refuse a request that is not allowed; returns the sample counts."""
        asked = self.policy.asked
        counts = SampleCounts.of(site.data)
        if request.do not in asked.requests:
            remedy = ""
            if request.do == AGREE:
                remedy = f"; without it this site takes no part: add {AGREE!r} to requests"
            raise Refused("asked.requests", f"{str(request.do)[:40]!r} may not be asked here{remedy}")
        for name in sorted(request.extras):
            if not is_allowed(name, asked.extras):
                raise Refused("asked.extras", "one of the extras of the request may not come in", name[:80])
        pins = self.policy.pinned.get(self.asker.recipe, {})
        check_architecture(pins, request.do, request.arrays)
        hyperparameters = hyperparameters_in(request)
        for name in BY_METHODS:
            if name in hyperparameters and not is_allowed(f"{name}={hyperparameters[name]}", asked.told):
                raise Refused("asked.told", f"{name}={str(hyperparameters[name])[:40]} is not allowed here")
        agreed = {**pins, **self.policy.settings}
        check_pins({k: v for k, v in agreed.items() if k in hyperparameters}, hyperparameters)
        if counts.train is not None and counts.train < asked.min_samples:
            raise Refused("asked.min_samples", f"fewer than {asked.min_samples} samples are here")
        # Compared by repr: neither True nor 1.0 may pass for 1.
        probed = request.config.get("probe_samples", PROBE_SAMPLES)
        if (request.do == "probe" or "probe_samples" in request.config) and repr(probed) != repr(asked.probe_samples):
            raise Refused("asked.probe_samples", f"a model is probed on {asked.probe_samples} samples here, no others")
        wanted = {name.strip() for name in str(request.config.get("extras", "")).split(",")}
        if (request.do == "probe" or wanted - {"", "squared_errors"}) and asked.probe_samples < asked.min_samples:
            raise Refused("asked.min_samples", f"a probe uses {asked.probe_samples} samples, fewer than the least")
        return counts

    def after(self, request: Request, reply: Reply, counts: SampleCounts, noised: bool = False) -> Reply:
        """The reply as it may leave; Refused if it may not. `noised`: the handler added noise and accounted for it."""
        rules = self.policy.reply
        if not isinstance(reply, Reply):
            raise Refused("reply", "the handler returned no Reply")
        if request.do == AGREE:
            return self.agreement_only(reply)
        self.check_counts(request.do, reply, counts, noised)
        for name in sorted(reply.arrays):
            if not is_allowed(name, rules.arrays):
                raise Refused("reply.arrays", "an array of the reply may not leave", name[:80])
        extras = self.permit("extras", reply.extras, rules.extras)
        metrics = self.permit("metrics", reply.metrics, rules.metrics)
        if rules.decimals < 17:
            metrics = {k: round(float(v), rules.decimals) for k, v in metrics.items()}
        n = max(1, reply.n // rules.samples_step * rules.samples_step)
        arrays = reply.arrays
        if self.policy.privacy.clip and arrays:
            arrays = self.clip_and_noise(request, arrays)
            if self.policy.privacy.noise:
                n = 1  # the number of samples itself gets no noise
        out = Reply(arrays, extras, metrics, n)
        if (size := bytes_of(out)) > rules.largest:
            raise Refused("reply.largest", f"the reply has {size} bytes, {rules.largest} are the most")
        return out

    def agreement_only(self, reply: Reply) -> Reply:
        """An agreement without arrays and metrics; of its extras, what may leave."""
        extras = {k: v for k, v in reply.extras.items() if is_allowed(k, self.policy.reply.extras)}
        # Extras get no noise: what they reveal could not be counted.
        if self.policy.privacy.budget or self.policy.privacy.run_budget:
            extras = {}
        return Reply({}, extras, {}, 1)

    def check_counts(self, do: str, reply: Reply, counts: SampleCounts, noised: bool) -> None:
        """Refuse a reply from too few samples, or one that leaves out too few: differences of replies reveal those."""
        least = self.policy.asked.min_samples
        here = counts.used_by(do)
        # With noise the number of samples is hidden as 1; it was checked before the work.
        if noised and here is not None and reply.n == 1:
            return
        if reply.n < least:
            raise Refused("asked.min_samples", f"fewer than {least} samples were used")
        if here is not None and 0 < here - reply.n < least:
            raise Refused("asked.min_samples", f"fewer than {least} of the samples that are here were left out")
        if (
            counts.test is not None
            and counts.test < least
            and any(name.startswith(VALIDATED) for name in reply.metrics)
        ):
            raise Refused("asked.min_samples", f"fewer than {least} samples were kept back to validate on")

    def clip_and_noise(self, request: Request, arrays: Arrays) -> Arrays:
        """An update, clipped and noised as the policy requires; arrays that are not an update are refused."""
        privacy = self.policy.privacy
        model = request.arrays
        if request.do != "train" or {k.removesuffix(ROWS) for k in arrays} != model.keys():
            raise Refused("privacy.clip", "only an update of the model that was sent can be clipped")
        full = to_dense(model, arrays)
        for name, sent in model.items():
            same = full[name].shape == sent.shape and (full[name].dtype.kind == "f") == (sent.dtype.kind == "f")
            # Only floats are clipped: a server that sends the model as integers would get the update as it is.
            if not same:
                raise Refused("privacy.clip", "an array of the update is of another kind or shape than sent", name[:80])
        update, _ = clip_update(model, full, privacy.clip)
        return add_noise(model, update, Secret(), privacy.noise * privacy.clip)  # integers: as sent

    def permit(self, kind: str, values: dict[str, Any], patterns: tuple[str, ...]) -> dict[str, Any]:
        """The values that may leave, by name; others are removed, or refused, as the policy says."""
        for name in sorted(values):
            if not is_allowed(name, patterns) and not self.policy.reply.remove:
                raise Refused(f"reply.{kind}", f"one of the {kind} of the reply may not leave", name[:80])
        return {k: v for k, v in values.items() if is_allowed(k, patterns)}

    def let_go(self, reply: Reply, by_handler: Releases, about: Facts) -> Reply:
        """Charge the reply to the ledger and record it in the audit trail; only then it may leave."""
        refuse_if_paused(self.policy)  # it may have been paused during the work
        cover = self.policy.privacy
        spent = None
        if (cover.budget or cover.run_budget) and about["do"] not in WITHOUT_DATA:
            releases = self.noisy_releases(reply, by_handler)
            if not len(releases):
                raise Refused("privacy.budget", UNCOUNTED)
            with exclusive(self.policy.ledger):
                spent = Ledger(self.policy.ledger).charge(cover, self.asker.run, releases)
        gone: Facts = {"reply": reply_fingerprint(reply), "bytes": bytes_of(reply), "n": int(reply.n)}
        gone |= {kind: sorted(getattr(reply, kind)) for kind in ("arrays", "extras", "metrics")}
        if spent is not None:
            gone["epsilon"] = spent
        write_event(self.policy, "sent", **gone, **about)
        return reply

    def noisy_releases(self, reply: Reply, by_handler: Releases) -> Releases:
        """The releases in a reply: by the policy's own noise, else by the handler's, which the server may subtract."""
        noise = self.policy.privacy.noise
        if noise and reply.arrays:
            # Two clipped updates are up to twice the clip apart, so the noise counts half. Nothing is sampled: rate 1.
            return add_releases(None, noise / 2, 1.0, 1)
        if self.asker.repeatable:
            return without_noise(by_handler)
        return by_handler


def hyperparameters_in(request: Request) -> dict[str, Scalar]:
    """The training hyperparameters in a request."""
    return {name: request.config[name] for name in HYPERPARAMETERS if name in request.config}


def bytes_of(reply: Reply) -> int:
    """Size of a reply's numbers in bytes."""
    return nbytes(reply.arrays) + nbytes(reply.extras) + 8 * (len(reply.metrics) + 1)
