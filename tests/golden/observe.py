"""Names that are data, seen while golden runs are made. The one file here that knows Mutirão's modules.

Observed: `purposes` of randomness, and what requests and replies hold (`verbs`, `told`, `extras`, `metrics`), of
clients in this process. Read from the source: `written_purposes`, the purposes passed to `rng` or `derive_seed`.
All other names are read from run folders, by `outputs.py`. Import this before anything else of Mutirão.
"""

import ast
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import mutirao
from mutirao import randomness

seen: dict[str, set[str]] = defaultdict(set)
_derive_seed = randomness.derive_seed


def derive_seed(seed: int, round: int, purpose: str, client: str = "") -> int:
    seen["purposes"].add(purpose)
    return _derive_seed(seed, round, purpose, client)


randomness.derive_seed = derive_seed  # before others take it from there

from tests.golden.make import command  # noqa: E402

from mutirao.deploy.policy import policy_templates  # noqa: E402
from mutirao.deploy.policy.rules import Policy  # noqa: E402
from mutirao.simulation.local_fleet import LocalFleet  # noqa: E402

_ask = LocalFleet.ask


def ask(self: LocalFleet, requests: Mapping[str, Any]) -> Any:
    answers = _ask(self, requests)
    for request in requests.values():
        seen["verbs"].add(request.do)
        seen["told"] |= set(request.config)
        seen["extras"] |= {f"down {name}" for name in request.extras}
    for reply in answers.replies.values():
        seen["extras"] |= {f"up {name}" for name in reply.extras}
        seen["metrics"] |= set(reply.metrics)
    return answers


LocalFleet.ask = ask  # type: ignore[method-assign]


def command_json(*words: str) -> dict[str, Any]:
    return dict(json.loads(command(*words, "--json")))


def known_names() -> dict[str, Any]:
    """Names that can be listed without a run."""
    listed = command_json("list")
    return {
        "written purposes": written_purposes(),
        "parts": {kind: sorted(names) for kind, names in listed.items()},
        "settings": {recipe: sorted(*command_json("list", recipe).values()) for recipe in listed["recipes"]},
        "policy": keys_of(Policy),
        "requests": sorted(policy_templates.REQUESTS),
        "extras": sorted(policy_templates.EXTRAS),
        "metrics": sorted(policy_templates.METRICS),
    }


def keys_of(kind: type) -> list[str]:
    """The fields of a dataclass; those of a field that is one stand below its name."""
    keys = []
    for field in fields(kind):
        default = field.default_factory() if callable(field.default_factory) else field.default
        below = keys_of(type(default)) if is_dataclass(default) else []
        keys += [f"{field.name}.{key}" for key in below] or [field.name]
    return sorted(keys)


def written_purposes() -> list[str]:
    """Of an f-string the parts that are filled in are shown as {}."""
    found = set()
    for file in Path(mutirao.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name not in ("rng", "derive_seed"):
                continue
            # A method of that name hands its one argument on as the purpose.
            purposes = node.args[2:3] if len(node.args) > 2 else node.args[:1]
            found |= {text for text in map(text_of, purposes) if text}
    return sorted(found)


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""
