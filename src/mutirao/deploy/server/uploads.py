"""What a site announces to upload must be true, and must come: else it would stand in the way of others.

An object's number is the hash of its content, so that two sites may well announce the same one. Flower keeps what was
said first of which parts it has, and answers whoever says otherwise with an error: with a lie about an object that all
replies have, such as a record without arrays, one site could hold up all others for the rest of a run.
"""

import datetime
from typing import Any

from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_children_ids_from_object_content, iterate_object_tree
from flwr.supercore.state.schema.corestate_models import ObjectPushSession, ObjectPushSessionPending
from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
from sqlalchemy import select

PATIENCE = datetime.timedelta(seconds=20)  # in which something must come of an upload that stands in another's way


def is_as_announced(state: Any, thing: str, content: bytes) -> bool:
    """Whether the content of an object has the parts that were announced of it."""
    try:
        parts = set(get_object_children_ids_from_object_content(content))
    except (ValueError, IndexError, UnicodeError):
        return False
    with state.session() as session:
        return parts == set(session.scalars(select(ObjectChild.child_id).where(ObjectChild.parent_id == thing)))


def is_held_up(state: Any, tree: Any) -> bool:
    """Whether uploads under way contradict this tree of objects; one of which nothing came for long is given up."""
    with state.session() as session:
        others = uploads_against(session, tree)
        idle_since = now() - PATIENCE + datetime.timedelta(seconds=OBJECT_PUSH_SESSION_TTL_SECONDS)
        for upload in others:
            found = session.get(ObjectPushSession, upload)
            if found is not None and found.expires_at < idle_since:
                state._cleanup_push_session(upload, cleanup_messages=True)  # as Flower does when its time is over
        return bool(uploads_against(session, tree))


def uploads_against(session: Any, tree: Any) -> set[str]:
    """The uploads that announced other parts of an object, which has not come yet, than this tree does."""
    told = {part.object_id: {child.object_id for child in part.children} for part in iterate_object_tree(tree)}
    awaited = select(StoredObject.object_id).where(StoredObject.object_id.in_(told), StoredObject.is_available == 0)
    before: dict[str, set[str]] = {thing: set() for thing in session.scalars(awaited)}
    parts = select(ObjectChild.parent_id, ObjectChild.child_id).where(ObjectChild.parent_id.in_(before))
    for parent, child in session.execute(parts):
        before[parent].add(child)
    contradicted = [thing for thing, children in before.items() if children != told[thing]]
    pending = select(ObjectPushSessionPending.session_id).where(ObjectPushSessionPending.object_id.in_(contradicted))
    return set(session.scalars(pending))
