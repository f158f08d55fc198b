"""The functions of Flower that we replace: where they are, what ours do, and the Flower versions that were checked.

Nothing else of this project writes into Flower. A replacement holds only as long as Flower's own code around it is what
it was, so that each internal has the digest of its source in every version checked. `python scripts/nightly.py` runs
the deployed tests with the newest Flower; a version that passes is entered here with `facts_of`, and in the pin of
`pyproject.toml`.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NoReturn

CHECKED = ("1.41.0", "1.42.0")


@dataclass(frozen=True)
class PatchedFunction:
    """A function of Flower's that we replace: where it is, what ours does, and what its own code was when we looked."""

    where: str  # module:name
    instead: str
    takes: str  # its parameters; ours must take them, too
    checked: Mapping[str, str]  # by version, the digest of its source


def same_digest(digest: str, *versions: str) -> dict[str, str]:
    """Versions in which the source is the same."""
    return dict.fromkeys(versions or CHECKED, digest)


UNPACK = PatchedFunction(
    "flwr.supernode.runtime.run_clientapp:install_from_fab",
    "the app that the server sent stays packed",
    "fab_file, install_dir, skip_prompt",
    same_digest("481bd04cde582322"),
)
FOLDER = PatchedFunction(
    "flwr.supernode.runtime.run_clientapp:get_project_dir",
    "the app that the server sent has no folder",
    "fab_id, fab_version, fab_hash",
    same_digest("155c70517e73e598"),
)
LOAD = PatchedFunction(
    "flwr.supernode.runtime.run_clientapp:get_load_client_app_fn",
    "the site's own code answers, under its policy",
    "default_app_ref, app_path, multi_app",
    same_digest("f7790dd641bafaff"),
)
SERVE = PatchedFunction(
    "flwr.superlink.main:create_app",
    "access control, ownership of messages and long polling",
    "config, superlink_lifespan_class",
    same_digest("ee966b630c8ba8b5"),
)
ACTIVATE = PatchedFunction(
    "flwr.supernode.fleet_http_client:FleetHttpClient.ActivateNode",
    "a SuperNode that is not admitted yet tries again",
    "self, request",
    same_digest("560fe67fc99714e1"),
)
RETRY = PatchedFunction(
    "flwr.supernode.fleet_http_connection:make_simple_http_retry_invoker",
    "a SuperNode tries again when the server's certificate is invalid",
    "",
    same_digest("49e12326a4b17e26"),
)
CALL = PatchedFunction(
    "flwr.supercore.protobuf.client:ProtobufClient.__init__",
    "the server's own commands send its secret",
    "self, base_url, *, interceptors, verify, timeout, retry_invoker",
    same_digest("ea57554c6ab40501"),
)
PATCHED = (UNPACK, FOLDER, LOAD, SERVE, ACTIVATE, RETRY, CALL)


def patch(internal: PatchedFunction, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of Flower's own function in its place; end with one line if there is no such function.

    Better no answer than one by foreign code, and no server than an open one.
    """
    place, name, found = find(internal)
    if found is None:
        exit_incompatible(f"has no {internal.where}, where mutirao sees to it that {internal.instead}")
    setattr(place, name, make(found))


def find(internal: PatchedFunction) -> tuple[Any, str, Any]:
    """What holds an internal, its name there, and Flower's function; None for a function that is not there."""
    module, _, path = internal.where.partition(":")
    *owners, name = path.split(".")
    try:
        place: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If another module is missing, the installation is incomplete, and Flower as such may fit.
        if not (error.name or "").startswith("flwr"):
            raise
        return None, name, None
    for owner in owners:
        place = getattr(place, owner, None)
    return place, name, getattr(place, name, None)


def signature_and_digest(internal: PatchedFunction) -> tuple[str, str]:
    """The parameters and the digest of the source that an internal has in the installed Flower; empty without it."""
    found = find(internal)[2]
    if found is None:
        return "", ""
    parameters = inspect.signature(found).parameters.values()
    # `inspect` has no entry for the bare `*` before keyword-only parameters.
    names = [p.name for p in parameters]
    if keywords := [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]:
        names.insert(names.index(keywords[0]), "*")
    return ", ".join(names), hashlib.sha256(inspect.getsource(found).encode()).hexdigest()[:16]


def unverified_changes(*internals: PatchedFunction) -> str:
    """In one line, what is not as it was checked in the installed Flower, before it is replaced; empty if all is."""
    odd = [one for one in internals or PATCHED if signature_and_digest(one)[1] not in one.checked.values()]
    if not odd:
        return ""
    found = ", ".join(one.where.partition(":")[2] for one in odd)
    return f"flwr {version('flwr')} differs from {' and '.join(CHECKED)}, with which mutirao was checked, in {found}"


def exit_incompatible(what: str) -> NoReturn:
    """End the process: this version of Flower cannot be made safe."""
    sys.exit(f"error: flwr {version('flwr')} {what}; mutirao was checked with flwr {' and '.join(CHECKED)}")
