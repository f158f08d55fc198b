"""The pause switch of a site: a small file beside its policy. While it is there, every request is refused."""

import datetime
import os
from pathlib import Path

from mutirao.core.agreement import PAUSED
from mutirao.deploy.layout import load_node
from mutirao.deploy.policy.privacy_ledger import append_event
from mutirao.deploy.policy.rules import Policy, load_policy
from mutirao.errors import Refused
from mutirao.io import write_whole


def refuse_if_paused(policy: Policy) -> None:
    """Raise Refused while the site is paused; the file is checked each time, so that no process has to restart."""
    if is_paused(policy):
        raise Refused(PAUSED, "this site is paused by those who run it")


def is_paused(policy: Policy) -> bool:
    """Whether the file exists, whatever it contains: even a broken link counts."""
    return os.path.lexists(policy.paused)


def paused_since(policy: Policy) -> str:
    """When the site was paused (UTC); empty if it is not."""
    if not is_paused(policy):
        return ""
    return datetime.datetime.fromtimestamp(policy.paused.lstat().st_mtime, datetime.UTC).isoformat(timespec="seconds")


def set_pause(folder: Path, on: bool = True) -> bool:
    """Pause or resume the site in this folder and record it in the audit trail; whether anything changed."""
    policy = load_policy(load_node(folder).policy_file)
    if is_paused(policy) == on:
        return False
    if on:  # pause first, then record it: the trail never claims a pause that is not there
        write_whole(policy.paused, "while this file is here, the site answers nothing\n")
        append_event(policy.audit, "paused")
    else:
        append_event(policy.audit, "resumed")
        policy.paused.unlink()
    return True
