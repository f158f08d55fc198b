"""Check one by one what a site or a server needs, with a remedy for each problem.

Each check is a small function that returns findings; none of them changes anything.

Digests of what all parties must agree on are short enough to be compared by telephone.
"""

import datetime
import importlib.metadata
import os
import shutil
import socket
import ssl
import stat
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mutirao.core.agreement import AGREE, versions
from mutirao.core.arrays import fingerprint
from mutirao.core.fleet import ClientId
from mutirao.deploy import flower_patches, keys
from mutirao.deploy.flower.run_tasks import recipe_from, settings_at_site
from mutirao.deploy.layout import FILE, Node, Server, load_place, split_address
from mutirao.deploy.policy.pins import ARCHITECTURE
from mutirao.deploy.policy.rules import Policy, load_policy
from mutirao.deploy.processes import has_current_commands, port_problem, running
from mutirao.deploy.server.control_calls import is_admitted, server_info
from mutirao.deploy.site.pause import paused_since
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.party_agreement import require_agreement
from mutirao.experiments.task import find

GIGABYTE = 2**30
Health = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: Health
    text: str
    remedy: str = ""


def check_result(check: str, trouble: str, remedy: str, good: str) -> Finding:
    """A failed check if there is a problem, else a passed one."""
    if trouble:
        return Finding(check, "fail", trouble, remedy)
    return Finding(check, "ok", good)


def check_amount(check: str, left: float, least: float, little: float, text: str, remedy: str) -> Finding:
    """Whether enough is left of something."""
    if left < least:
        return Finding(check, "fail", text, remedy)
    if left < little:
        return Finding(check, "warn", text, remedy)
    return Finding(check, "ok", text)


SOON = 30  # days before the end of a certificate at which to renew it
# seconds a site's clock may be ahead of the server's, and behind: Flower takes no more
AHEAD = 5.0
BEHIND = 300.0


def examine(folder: Path) -> list[Finding]:
    """All checks for the folder of a server or a site."""
    found = [*check_packages()]
    try:
        place = load_place(folder)
    except ConfigError as error:
        return [*found, Finding("folder", "fail", str(error), "make it with: mutirao site init")]
    found.append(Finding("folder", "ok", f"{place.role} {place.name!r} in {place.folder}"))
    found += [*check_private_keys(place), *check_authority(place)]
    if isinstance(place, Server):
        found += server_checks(place)
    else:
        found += [*check_policy_and_data(place), *server_seen(place)]
    return [*found, check_process(place), check_disk(place.folder), check_memory(), check_gpu()]


def is_healthy(findings: list[Finding]) -> bool:
    """Whether nothing failed; warnings do not count."""
    return all(f.state != "fail" for f in findings)


def check_packages() -> Iterator[Finding]:
    """Python, mutirao, torch, and Flower in the range that mutirao requires."""
    new = sys.version_info >= (3, 11)
    version = sys.version.split()[0]
    yield check_result("python", "" if new else version, "install Python 3.11 or newer", version)
    found = versions()
    missing = ", ".join(name for name, version in found.items() if not version)
    good = ", ".join(f"{k} {v}" for k, v in found.items() if k != "python")
    yield check_result(
        "packages", missing and f"{missing} not installed", "pip install 'mutirao[flower,privacy]'", good
    )
    if found["flwr"] and not flower_fits(found["flwr"]):
        remedy = "pip install 'mutirao[flower]' again: it brings the right one"
        yield Finding("flower", "fail", f"flwr {found['flwr']} is not a version mutirao works with", remedy)
    elif found["flwr"] and found["flwr"] not in flower_patches.CHECKED and (odd := flower_patches.unverified_changes()):
        # The version is in the declared range, but its functions differ from those that our patches were checked with.
        yield Finding("flower", "warn", odd, f"install flwr {flower_patches.CHECKED[-1]}")


def flower_fits(version: str) -> bool:
    """Whether this version of Flower is in the range that the installed mutirao declares."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("mutirao") or []
    except importlib.metadata.PackageNotFoundError:
        return True
    wanted = [r for text in declared if (r := Requirement(text)).name == "flwr"]
    return all(r.specifier.contains(version, prereleases=True) for r in wanted)


def check_private_keys(place: Server | Node) -> Iterator[Finding]:
    """Private keys are there, belong to their public halves, and are readable by their owner alone."""
    private = [place.key]
    # The authority's key may be kept elsewhere: it is needed only to sign.
    if isinstance(place, Server) and place.ca_key.exists():
        private.append(place.ca_key)
    for key in private:
        if not key.exists():
            remedy = "restore it from your backup, or make a new folder with: mutirao site init"
            yield Finding("private key", "fail", f"{key} is missing", remedy)
            continue
        mode = stat.S_IMODE(key.stat().st_mode)
        trouble = ""
        if mode & 0o077:
            trouble = f"{key} can be read by others (mode {mode:o})"
        yield check_result("private key", trouble, f"chmod 600 {key}", f"{key.name} is readable by its owner alone")
    if isinstance(place, Node) and place.key.exists():
        yield check_pair(place)


def check_secret(server: Server) -> Finding:
    """What opens Control and Runtime is known to the server's own user alone."""
    if not server.secret.exists():
        return Finding(
            "secret", "warn", f"{server.secret} is not there yet", f"mutirao site up {server.folder} makes it"
        )
    try:
        keys.read_secret(server.secret)
    except ConfigError as error:
        remedy = f"rm {server.secret}; mutirao site down {server.folder}, then up: it makes another"
        return Finding("secret", "fail", str(error), remedy)
    return Finding("secret", "ok", f"{server.secret.name} is readable by its owner alone")


def check_pair(node: Node) -> Finding:
    """The public key that was sent to the server is that of the private key."""
    from cryptography.hazmat.primitives import serialization as form

    try:
        private = form.load_ssh_private_key(node.key.read_bytes(), None)
        mine = private.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        if mine == keys.public_key_pem(node.public_key):
            return Finding("key pair", "ok", keys.key_fingerprint(node.public_key))
        text = f"{node.public_key.name} is another key's than {node.key.name}"
    except (OSError, ValueError, ConfigError) as error:
        text = f"cannot be read: {error}"
    return Finding("key pair", "fail", text, "restore both from one backup; never mix two folders")


def check_authority(place: Server | Node) -> Iterator[Finding]:
    """The certificate of the authority is there and in its time."""
    if not place.ca.exists():
        remedy = "ask for the server's ca.crt, compare its fingerprint, and put it there"
        yield Finding("authority", "fail", f"{place.ca} is missing", remedy)
        return
    try:
        yield check_dates(
            "authority", place.ca, "the server makes a new authority: mutirao site init server, a new folder"
        )
    except ConfigError as error:
        yield Finding("authority", "fail", str(error), "ask for the server's ca.crt again")


def check_dates(check: str, path: Path, remedy: str, now: datetime.datetime | None = None) -> Finding:
    """Whether a certificate is in its time, and for how long."""
    certificate = keys.read_certificate(path)
    moment = now or datetime.datetime.now(datetime.UTC)
    begin = certificate.not_valid_before_utc
    end = certificate.not_valid_after_utc
    left = (end - moment).days
    if moment < begin:
        return Finding(check, "fail", f"{path.name} begins only {begin:%Y-%m-%d %H:%M} UTC", "set the clock right")
    if moment > end:
        return Finding(check, "fail", f"{path.name} ended {end:%Y-%m-%d}", remedy)
    if left < SOON:
        return Finding(check, "warn", f"{path.name} ends in {left} days ({end:%Y-%m-%d})", remedy)
    return Finding(check, "ok", f"{path.name} is good until {end:%Y-%m-%d}")


def server_checks(server: Server) -> Iterator[Finding]:
    """Certificate, names, port, and the sites that were admitted."""
    renew = f"mutirao site renew {server.folder}, then down and up"
    try:
        certificate = keys.read_certificate(server.certificate)
        ca = keys.read_certificate(server.ca)
        yield check_dates("certificate", server.certificate, renew)
        yield check_signature(server, certificate, ca, renew)
        missing = ", ".join(sorted(set(server.hosts) - set(keys.hosts_of(certificate))))
        # Loopback is in every certificate, for the server's own processes; sites need another address.
        named = ", ".join(h for h in keys.hosts_of(certificate) if h not in keys.LOOPBACK)
        if named or missing:
            trouble = missing and f"the certificate is not for {missing}"
            yield check_result("names", trouble, renew, f"its address for sites is {named}")
        else:
            remedy = f"mutirao site renew {server.folder} --host NAME-OR-ADDRESS"
            yield Finding("names", "warn", "the certificate is for this machine alone: no site can connect", remedy)
    except ConfigError as error:
        yield Finding("certificate", "fail", str(error), renew)
    yield check_secret(server)
    yield check_port(server)
    yield check_sites(server)


def check_signature(server: Server, certificate: Any, ca: Any, renew: str) -> Finding:
    """The certificate is signed by the authority, and belongs to the server's key."""
    try:
        certificate.verify_directly_issued_by(ca)
        if server.key.exists() and keys.private_key(server.key).public_key() != certificate.public_key():
            return Finding("signature", "fail", "server.crt belongs to another key than server.key", renew)
    except Exception as error:
        # cryptography raises several types of errors for one fact: another authority has signed it.
        reason = str(error) or type(error).__name__
        return Finding("signature", "fail", f"server.crt is not signed by ca.crt ({reason})", renew)
    return Finding("signature", "ok", "server.crt is signed by ca.crt and belongs to server.key")


def check_port(server: Server) -> Finding:
    """The port is ours, or free."""
    if running(server.folder) is None:
        remedy = f"end the other program, or change port and host in {server.folder / FILE}"
        return check_result("port", port_problem(server), remedy, f"{server.port} is free")
    try:
        server_info(server.here, server.ca, direct=True)
    except (OSError, ValueError) as error:
        remedy = f"see {server.logs / 'superlink.log'}; mutirao site down, then up"
        return Finding("port", "fail", f"the SuperLink runs and does not answer at {server.here}: {error}", remedy)
    return Finding("port", "ok", f"the SuperLink answers at {server.here}")


def check_sites(server: Server) -> Finding:
    """Each key that was kept is known to the SuperLink."""
    known = sorted(server.sites.glob("*.pub"))
    if running(server.folder) is None:
        return Finding("sites", "skip", f"{len(known)} keys kept; the SuperLink does not run")
    try:
        strangers = ", ".join(key.stem for key in known if not is_admitted(server, key))
    except MutiraoError as error:
        return Finding("sites", "fail", str(error), f"mutirao site down {server.folder}, then up")
    if not known:
        return Finding("sites", "warn", "0 admitted", "admit a site")
    remedy = f"mutirao site admit {server.folder} {server.sites}/NAME.pub"
    return check_result("sites", strangers and f"not admitted: {strangers}", remedy, f"{len(known)} admitted")


def check_policy_and_data(node: Node) -> Iterator[Finding]:
    """The policy can be read and allows something; the data it names are there."""
    edit = f"edit {node.policy_file}"
    try:
        policy = load_policy(node.policy_file)
    except ConfigError as error:
        yield Finding("policy", "fail", str(error), edit)
        return
    if changed := [name for name in policy.recipes if policy.fault_of(name)]:
        remedy = f"look at what changed, then put the hash from 'mutirao site hash NAME' into {node.policy_file}"
        yield Finding("policy", "fail", f"installed with other content than allowed: {', '.join(changed)}", remedy)
    elif not policy.recipes or not policy.asked.requests or not policy.reply.arrays:
        yield Finding("policy", "warn", "lets nothing leave yet: every request is refused", edit)
    else:
        yield Finding("policy", "ok", f"allows {', '.join(policy.recipes)}")
    if since := paused_since(policy):
        remedy = f"when it shall answer again: mutirao site pause {node.folder} --off"
        yield Finding("pause", "warn", f"paused since {since}: every request is refused", remedy)
    data = policy.settings.get("data")
    if data is None:
        yield Finding("data", "skip", "the policy names no data folder (settings.data)")
        return
    place = Path(str(data)).expanduser()
    try:
        wrong = ""
        if not place.exists():
            wrong = "is not there"
        elif place.is_dir() and next(place.iterdir(), None) is None:
            wrong = "is empty"
        elif not os.access(place, os.R_OK):
            wrong = "cannot be read by this user"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}"
    yield check_result("data", wrong and f"{place} {wrong}", f"mount or correct it, or {edit}", f"{place} can be read")
    if not wrong:
        yield from agreed_on(node, policy)


def agreed_on(node: Node, policy: Policy) -> Iterator[Finding]:
    """What this site has of what all agree on, by digest: two sites, or the server and a site, compare these lines."""

    if policy.recipes and AGREE not in policy.asked.requests:
        remedy = f"add {AGREE!r} to requests in [asked] of {node.policy_file}"
        yield Finding("agree", "warn", "the policy does not let this site agree: it takes no part in any run", remedy)
    for held in agreed_digests_of(policy, node.client or node.name):
        if isinstance(held, tuple):
            recipe, why = held
            yield Finding("agree", "warn", f"{recipe}: {why}", "correct the data, or the settings in the policy")
        else:
            yield Finding("agree", "ok", held.words())


def server_seen(node: Node) -> Iterator[Finding]:
    """What this site sees of the server: reachable, proven by its certificate, same versions and time, key known."""
    if not node.ca.exists():
        yield Finding("server", "skip", "not asked without ca.crt")
        return
    public = keys.public_key_pem(node.public_key) if node.public_key.exists() else None
    before = time.time()
    try:
        facts = server_info(node.superlink, node.ca, public)
    except (OSError, ValueError) as error:
        yield unreachable(error, node)
        return
    # The server read its clock at some moment of this call; the middle of the call is off by at most half of it.
    clock = (before + time.time()) / 2
    yield Finding("server", "ok", f"{node.superlink} answers, and is who its certificate says")
    yield check_versions(facts["versions"], versions())
    yield check_clock(clock - float(facts.get("time", clock)))
    stranger = "" if facts.get("admitted") else "the server does not know this site's key"
    taken = f"mutirao site admit FOLDER {node.name}.pub"
    remedy = f"send {node.public_key} to the server, where it is taken with: {taken}"
    yield check_result("admitted", stranger, remedy, "the server has this site's key")


OTHER_HOST = "the server's certificate is not for {host}"
# By OpenSSL's code of a failed verification: not valid yet, expired, another host name, another IP address.
CERTIFICATE_TROUBLES: Mapping[int, tuple[str, str]] = {
    9: ("the server's certificate has not begun", "compare the clocks of both machines"),
    10: ("the server's certificate has ended", "the server renews it: mutirao site renew FOLDER"),
    62: (OTHER_HOST, "the server adds the name: mutirao site renew FOLDER --host {host}"),
    64: (OTHER_HOST, "the server adds it: mutirao site renew FOLDER --host {host}"),
}


def unreachable(error: Exception, node: Node) -> Finding:
    """What a failed connection means, and what to do."""
    host, port = split_address(node.superlink)
    # By type, not by attribute: the `reason` of an SSLError is only a word, that of a URLError is the error itself.
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = f"{node.superlink} cannot be reached: {reason}"
    remedy = f"let this machine open connections to {host}, TCP port {port} (firewall, proxy: HTTPS_PROXY)"
    if isinstance(error, urllib.error.HTTPError):
        text = f"{node.superlink} answers {error.code}: not a server of ours"
        remedy = "check the address, and that the server was started with: mutirao site up"
    elif isinstance(reason, ssl.SSLCertVerificationError):
        other = ("the server's certificate is signed by another authority", "ask for the server's ca.crt again")
        text, remedy = (t.format(host=host) for t in CERTIFICATE_TROUBLES.get(reason.verify_code, other))
    elif isinstance(reason, ssl.SSLError):
        text = f"{node.superlink} does not speak TLS ({reason.reason or reason})"
        remedy = "check the port; the server must be one started with: mutirao site up"
    elif isinstance(reason, socket.gaierror):
        text = f"{host} is not known to the name service"
        remedy = "check the name, or use the server's IP address"
    elif isinstance(reason, ConnectionRefusedError):
        text = f"no server listens at {node.superlink}"
        remedy = f"on the server: mutirao site status FOLDER; is {port} its port?"
    return Finding("server", "fail", text, remedy)


def check_versions(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> Finding:
    """mutirao and Flower must be the same on both sides; others only for results that repeat bit for bit."""
    pairs = {k: (ours.get(k, ""), str(v)) for k, v in theirs.items() if ours.get(k, "") != str(v)}
    hard = {"mutirao", "flwr"} & pairs.keys()
    if not pairs:
        return Finding("versions", "ok", "the same as the server's")
    text = ", ".join(f"{k} {here or 'missing'} here, {there or 'missing'} there" for k, (here, there) in pairs.items())
    wanted = " ".join(f"{k}=={there}" for k, (_, there) in pairs.items() if there and k != "python")
    remedy = f"pip install {wanted}" if wanted else "the same Python makes results repeat bit for bit"
    return Finding("versions", "fail" if hard else "warn", text, remedy)


def check_clock(ahead: float) -> Finding:
    """Flower refuses signed requests from the future (more than 5 s) and from the past (more than 305 s)."""
    text = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if ahead > AHEAD or ahead < -BEHIND:
        return Finding("clock", "fail", f"{text}: its requests are refused", "switch on time synchronisation (NTP)")
    if ahead > AHEAD / 2 or ahead < -BEHIND / 5:
        return Finding("clock", "warn", text, "switch on time synchronisation (NTP)")
    return Finding("clock", "ok", text)


def check_process(place: Server | Node) -> Finding:
    """Whether it runs."""
    if (found := running(place.folder)) is None:
        return Finding("process", "skip", f"the {place.process} does not run", f"mutirao site up {place.folder}")
    if not has_current_commands(place):
        text = f"the {place.process} was started by another version of mutirao"
        return Finding("process", "fail", text, f"mutirao site down {place.folder}, then up")
    return Finding("process", "ok", f"the {place.process} runs (process {found.pid})")


def check_disk(folder: Path, free: Callable[[Path], int] | None = None) -> Finding:
    """Room for models, logs and trails."""
    left = free(folder) if free else shutil.disk_usage(folder).free
    text = f"{left / GIGABYTE:.1f} GB free"
    remedy = f"make room on the disk of {folder}"
    return check_amount("disk", left, GIGABYTE, 5 * GIGABYTE, text, remedy)


def check_memory(available: float | None = None) -> Finding:
    """Room for torch and the data."""
    left = available if available is not None else memory_left()
    if left is None:
        return Finding("memory", "skip", "not known on this system")
    remedy = "end other programs, or give the machine more; torch alone takes half a gigabyte"
    return check_amount("memory", left, 0.5 * GIGABYTE, 2 * GIGABYTE, f"{left / GIGABYTE:.1f} GB available", remedy)


def memory_left() -> float | None:
    """Bytes that programs can still get: of the machine, or of the container if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        left = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    # In a container /proc/meminfo is about the whole machine; the container's own limit is that of its cgroup.
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = float(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        if most == "max":
            return left
        return min(left, float(most) - used)
    except (OSError, ValueError):
        return left


def check_gpu() -> Finding:
    """Whether torch can use the graphics card, if there is one."""
    try:
        import torch
    except ImportError:
        return Finding("gpu", "skip", "torch is not installed")
    used = "used by runs with device=auto or cuda"
    if torch.cuda.is_available():
        return Finding("gpu", "ok", f"{torch.cuda.get_device_name(0)}: {used}")
    if torch.backends.mps.is_available():
        return Finding("gpu", "ok", f"Apple's: {used.replace('cuda', 'mps')}")
    if not shutil.which("nvidia-smi"):
        return Finding("gpu", "ok", "none: training uses the processor")
    remedy = "install the torch that fits the driver, or in a container give it the device"
    return Finding("gpu", "warn", "there is an NVIDIA driver, and torch does not see the card", remedy)


SHORT = 12  # characters of a digest that are shown


@dataclass(frozen=True)
class AgreedDigests:
    """A site's digests for a recipe by name, and its samples by class if they are known."""

    recipe: str
    digests: dict[str, str]
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def all(self) -> str:
        """One digest of all digests."""
        return fingerprint(self.digests)

    def words(self) -> str:
        """All of it in one line."""
        shown = [f"{name} {digest[:SHORT]}" for name, digest in sorted(self.digests.items())]
        classes = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        if classes:
            shown.append(f"{sum(self.counts.values())} pictures: {classes}")
        return "; ".join([f"{self.recipe} {self.all[:SHORT]}", *shown])


def agreed_digests_of(policy: Policy, client: ClientId) -> Iterator[AgreedDigests | tuple[str, str]]:
    """For each recipe that a policy allows its digests, or the recipe's name and why they are not available.

    Settings are those that the policy pins or sets; others have the recipe's defaults.
    """
    for recipe in policy.recipes:
        pinned = {k: v for k, v in policy.pinned.get(recipe, {}).items() if k != ARCHITECTURE}
        try:
            name, config = recipe_from(settings_at_site({"recipe": recipe, **pinned}, {}, policy.settings))
            task = require_agreement(find(name).prepare(config))
            count = getattr(task.population, "counts", None)
            counts: dict[str, int] = {}
            if callable(count):
                counts = count(client)
            yield AgreedDigests(recipe, {**task.basis(), **task.agreed}, counts)
        except Exception as error:  # reading a site's data may raise anything
            yield recipe, " ".join(str(error).split())[:300] or type(error).__name__
