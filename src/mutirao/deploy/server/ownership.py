"""A site sends, fetches and confirms what is its own, and nothing of another's.

Flower compares the node that a request names with the key that signed it, and looks no further: in that node's name one
could push a reply of another site, or a request of the server's, and fetch or delete what was sent to others. This
stands behind Flower's own check, where the node is proven, and compares the rest of the request with what the SuperLink
has on record. What is not known here is refused.
"""

import asyncio
import base64
import datetime
import logging
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesResponse
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, OBJECT_PUSH_SESSION_TTL_SECONDS
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_children_ids_from_object_content, iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.state.schema.corestate_models import (
    ObjectPushSession,
    ObjectPushSessionPending,
    ObjectPushSessionRoot,
)
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
from sqlalchemy import select

from mutirao.deploy.keys import pem_fingerprint
from mutirao.deploy.server.access_control import FLEET_PATH, App, Receive, Scope, Send, send_json

IDLE_LIMIT = datetime.timedelta(seconds=20)  # in which something must come of an upload that stands in another's way


def has_announced_children(state: Any, thing: str, content: bytes) -> bool:
    """Whether the content of an object has the parts that were announced of it."""
    try:
        parts = set(get_object_children_ids_from_object_content(content))
    except (ValueError, IndexError, UnicodeError):
        return False
    with state.session() as session:
        return parts == set(session.scalars(select(ObjectChild.child_id).where(ObjectChild.parent_id == thing)))


def is_blocked(state: Any, tree: Any) -> bool:
    """Whether uploads under way contradict this tree of objects; one of which nothing came for long is given up."""
    with state.session() as session:
        others = conflicting_uploads(session, tree)
        idle_since = now() - IDLE_LIMIT + datetime.timedelta(seconds=OBJECT_PUSH_SESSION_TTL_SECONDS)
        for upload in others:
            found = session.get(ObjectPushSession, upload)
            if found is not None and found.expires_at < idle_since:
                state._cleanup_push_session(upload, cleanup_messages=True)  # as Flower does when its time is over
        return bool(conflicting_uploads(session, tree))


def conflicting_uploads(session: Any, tree: Any) -> set[str]:
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


log = logging.getLogger("mutirao")

KEPT_SESSIONS = 8  # a SuperNode sends one reply after the other
UNKNOWN_CALL = "this is no call of a site's"
# Calls that name nobody but the sender, whom Flower has proven; its own pull looks for messages to that node alone.
OWN_CALLS = {"activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages"}


class Ownership:
    """Around Flower's Fleet handlers: passes on what concerns the sender itself; `state_of` gives the link state."""

    def __init__(self, app: App, state_of: Callable[[], Any]) -> None:
        self.app, self.state_of = app, state_of
        self.things: dict[int, set[str]] = {}  # by node, the objects of messages sent to it, as far as was last seen
        self.uploads: dict[int, deque[str]] = {}  # by node, what it was told to send the objects of its replies under

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        path = str(scope.get("path", ""))
        if scope["type"] == "http" and path.startswith(FLEET_PATH):
            request = scope.get("state", {}).get("protobuf_request")  # read and proven by Flower's own middleware
            if request is None or type(request) is not PROTOBUF_REQUEST_TYPES.get((scope["method"], path)):
                return await send_json(send, 403, {"error": UNKNOWN_CALL})
            call = path.removeprefix(FLEET_PATH)
            if fault := await asyncio.to_thread(self.fault_in, call, request):
                log.warning("refused: %s of the site with the key %s: %s", call, sender(scope), fault)
                return await send_json(send, 403, {"error": fault})
            if call == "push-messages" and await asyncio.to_thread(
                is_blocked, self.state_of(), request.message_object_trees[0]
            ):
                log.warning("held up: a reply of the site with the key %s, by what another announced", sender(scope))
                return await send_json(send, 503, {"error": "another upload stands in the way; try again"})
            if call in ("push-messages", "pull-messages"):
                return await self.app(scope, receive, self.noting(request.node.node_id, scope, send))
        return await self.app(scope, receive, send)

    def noting(self, node: int, scope: Scope, send: Send) -> Send:
        """A way to answer that first writes down what the node may now do: fetch the objects of the message it pulls,
        or upload those of the one it pushes.

        The SuperLink has no record of an upload for long: a reply is struck out once the server has asked for it.
        """

        async def note(message: MutableMapping[str, Any]) -> None:
            told = scope["state"].get("protobuf_response")
            if message["type"] == "http.response.start" and isinstance(told, PushMessagesResponse):
                self.uploads.setdefault(node, deque(maxlen=KEPT_SESSIONS)).append(told.session_id)
            elif message["type"] == "http.response.start" and isinstance(told, PullMessagesResponse):
                for tree in told.message_object_trees:
                    self.things[node] = objects_in(tree)
            await send(message)

        return note

    def fault_in(self, call: str, request: Any) -> str:
        """Why a site may not ask for this; empty if it may."""
        if call in OWN_CALLS:
            return ""
        node, state = request.node.node_id, self.state_of()
        match call:
            case "push-messages":
                return error_in_push(state, node, request)
            case "push-object":
                mine = request.session_id in self.uploads.get(node, ()) or is_sending(state, node, request.session_id)
                if not mine:
                    return "part of a message that is not its own"
                true = has_announced_children(state, request.object_id, request.object_content)
                return "" if true else "an object with other parts than announced"
            case "pull-object":
                return "" if self.was_sent(state, node, request.object_id) else "part of no message to it"
            case "confirm-message-received":
                return "" if sent_to(state, node, request.message_object_id) else "a message that was not sent to it"
            case "get-run" | "get-fab":
                return "" if is_asked_by(state, node, request.run_id) else "a run that asked it nothing"
        return UNKNOWN_CALL

    def was_sent(self, state: Any, node: int, thing: str) -> bool:
        """Whether an object belongs to a message to this node; what was sent once it may have again."""
        if thing in self.things.get(node, ()):
            return True
        self.things[node] = found = objects_sent_to(state, node)
        return thing in found


def error_in_push(state: Any, node: int, request: Any) -> str:
    """Why a push is no reply of this node to a request of the server's; empty if it is one."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return "not one message with its objects"
    told = request.messages_list[0].metadata
    if told.src_node_id != node:
        return "a message in the name of another"
    asked = sent_to(state, node, told.reply_to_message_id) if told.reply_to_message_id else None
    if asked is None or not asked.delivered_at:
        return "a reply to nothing that it was asked"
    if told.dst_node_id != SUPERLINK_NODE_ID or int64_to_uint64(asked.src_node_id) != SUPERLINK_NODE_ID:
        return "a message to another than the server"
    if told.run_id != int64_to_uint64(asked.run_id) or told.message_type != asked.message_type:
        return "a reply for another run, or of another kind, than it was asked"
    return "" if request.message_object_trees[0].object_id == told.message_id else "objects of another message"


def sent_to(state: Any, node: int, message: str) -> Any:
    """What is on record of a message that was sent to this node; None if there was none."""
    columns = (MessageIns.run_id, MessageIns.src_node_id, MessageIns.message_type, MessageIns.delivered_at)
    wanted = select(*columns).where(MessageIns.message_id == message, MessageIns.dst_node_id == uint64_to_int64(node))
    with state.session() as session:
        return session.execute(wanted).first()


def is_sending(state: Any, node: int, upload: str) -> bool:
    """Whether an upload belongs to a reply of this node, by the record: after a restart it is all there is."""
    wanted = (
        select(MessageRes.message_id)
        .join(ObjectPushSessionRoot, ObjectPushSessionRoot.root_object_id == MessageRes.message_id)
        .where(ObjectPushSessionRoot.session_id == upload, MessageRes.src_node_id == uint64_to_int64(node))
    )
    with state.session() as session:
        return session.execute(wanted).first() is not None


def is_asked_by(state: Any, node: int, run: int) -> bool:
    """Whether a run has asked this node anything that it has not answered yet."""
    mine = (MessageIns.dst_node_id == uint64_to_int64(node), MessageIns.run_id == uint64_to_int64(run))
    with state.session() as session:
        return session.execute(select(MessageIns.message_id).where(*mine)).first() is not None


def objects_sent_to(state: Any, node: int) -> set[str]:
    """The numbers of all objects of the messages to this node that are still there."""
    with state.session() as session:
        wanted = select(MessageIns.message_id).where(MessageIns.dst_node_id == uint64_to_int64(node))
        messages = list(session.scalars(wanted))
    found: set[str] = set()
    for message in messages:
        try:
            found |= objects_in(state.object_store.get_object_tree(message))
        except NoObjectInStoreError:  # received and deleted
            continue
    return found


def objects_in(tree: Any) -> set[str]:
    """The numbers of all objects in a tree of Flower's."""
    return {part.object_id for part in iterate_object_tree(tree)}


def sender(scope: Scope) -> str:
    """Who signed a request, as the server's log names it: by the key, whose holder `ssh-keygen -lf` tells."""
    key = dict(scope.get("headers", [])).get(FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode(), b"")
    return pem_fingerprint(base64.b64decode(key))
