"""The SuperNode as a site runs it: while it is not admitted it waits and tries again, instead of exiting.

Flower's own exits at once if the server does not know its key yet. It also does if it restarts soon after it was
killed: for about a minute the server takes the old process for alive, and admits no second one with that key. And it
exits for good on an invalid certificate, such as an expired one.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutirao.deploy import flower_patches

log = logging.getLogger("mutirao")

NOT_ADMITTED = "not let in yet"
SKEWED = "the clocks differ too much, or the key is damaged"
UNKNOWN = "the server does not know this site's key, or still has a connection of its former process"
UNPROVEN = "the server's certificate is invalid"
EXPIRED = "it has expired: the server renews it with: mutirao site renew"
PAUSE = 3.0


def retry_until_admitted(activate: Callable[[Any, Any], Any], pause: float = PAUSE) -> Callable[[Any, Any], Any]:
    """Repeat Flower's activation request until the server admits the site; network errors are left to Flower."""

    def until_let_in(client: Any, request: Any) -> Any:
        logged = None
        while True:
            try:
                return activate(client, request)
            except Exception as error:
                # Of httpx: without a response, or with one of a proxy (502 to 504), it is an error of the network.
                status = getattr(getattr(error, "response", None), "status_code", None)
                if status is None or status in (502, 503, 504):
                    raise
                if status != logged:
                    log.warning("%s (%s): %s; trying again", NOT_ADMITTED, status, SKEWED if status == 401 else UNKNOWN)
                    logged = status
                time.sleep(pause)

    return until_let_in


def retry_on_bad_certificate(make: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap Flower's factory of retry policies: they also retry if the server's certificate is invalid.

    Nothing is sent to such a server, so waiting is safe; once the certificate is renewed, the site connects again.
    """

    def make_patient() -> Any:
        retry = make()
        gives_up = retry.should_giveup
        logged: set[str] = set()

        def is_over(error: Exception) -> bool:
            why = str(error)
            if "certificate verify failed" not in why.lower():
                return bool(gives_up is not None and gives_up(error))
            if why not in logged:
                log.warning("%s: %s; %s", NOT_ADMITTED, UNPROVEN, EXPIRED if "expired" in why else why)
                logged.add(why)
            return False

        retry.should_giveup = is_over
        return retry

    return make_patient


def main() -> None:
    """`flower-supernode` that waits for admission; it takes the same options."""
    from flwr.supernode.cli import flower_supernode

    log.addHandler(logging.StreamHandler(sys.stderr))
    at_sites = (
        flower_patches.ACTIVATE,
        flower_patches.RETRY,
        flower_patches.UNPACK,
        flower_patches.FOLDER,
        flower_patches.LOAD,
    )
    if changes := flower_patches.unverified_changes(*at_sites):
        log.warning(changes)
    flower_patches.patch(flower_patches.ACTIVATE, retry_until_admitted)
    flower_patches.patch(flower_patches.RETRY, retry_on_bad_certificate)
    # It returns only after an error: a deliberate stop ends the whole process.
    flower_supernode()
    restart()


def restart(pause: float = 4 * PAUSE) -> None:
    """Restart in place, as the same process.

    On an unexpected answer of the server, Flower closes the connection and hangs: a thread keeps the process alive.
    """
    log.warning("Flower closed the connection; restarting in %g s", pause)
    for child in children():
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGTERM)
    time.sleep(pause)
    os.execv(sys.executable, [sys.executable, "-m", "mutirao.deploy.site.supernode", *sys.argv[1:]])


def children() -> list[int]:
    """The child processes of this one, where the system lists them."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return []


if __name__ == "__main__":
    main()
