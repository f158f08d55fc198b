"""Authorization of site requests: a site sends, fetches and confirms its own messages, and no other's.

Flower checks that the node in a request matches the key that signed it, and nothing more. A node could therefore push a
reply of another site or a request of the server, and fetch or delete what was sent to others. This middleware stands
behind Flower's authentication and compares the rest of the request with the SuperLink's records. Unknown calls are
refused.

Announced uploads are checked, too. An object's id is the hash of its content, so two sites may announce the same one.
Flower keeps the first announcement of an object's children and answers a contradiction with an error: by announcing
false children of an object that all replies contain, one site could block all others for the rest of a run.
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

log = logging.getLogger("mutirao")

IDLE_LIMIT = datetime.timedelta(seconds=20)  # after which an upload without progress no longer blocks others
KEPT_SESSIONS = 8  # a SuperNode sends one reply after the other
UNKNOWN_CALL = "this is no call of a site's"
# Calls that name only the sender, which Flower has authenticated; its own pull returns messages to that node alone.
OWN_CALLS = {"activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages"}


class Ownership:
    """ASGI middleware around Flower's Fleet handlers; `state_of` returns the link state."""

    def __init__(self, app: App, state_of: Callable[[], Any]) -> None:
        self.app = app
        self.state_of = state_of
        self.objects: dict[int, set[str]] = {}  # by node, the objects of messages sent to it, as last seen
        self.sessions: dict[int, deque[str]] = {}  # by node, the push sessions of its latest replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        path = str(scope.get("path", ""))
        if scope["type"] == "http" and path.startswith(FLEET_PATH):
            request = scope.get("state", {}).get("protobuf_request")  # read and proven by Flower's own middleware
            if request is None or type(request) is not PROTOBUF_REQUEST_TYPES.get((scope["method"], path)):
                return await send_json(send, 403, {"error": UNKNOWN_CALL})
            call = path.removeprefix(FLEET_PATH)
            if reason := await asyncio.to_thread(self.reason_to_refuse, call, request):
                log.warning("refused: %s of the site with the key %s: %s", call, sender(scope), reason)
                return await send_json(send, 403, {"error": reason})
            if call == "push-messages" and await asyncio.to_thread(
                is_blocked, self.state_of(), request.message_object_trees[0]
            ):
                log.warning("blocked: a reply of the site with the key %s, by another upload", sender(scope))
                return await send_json(send, 503, {"error": "another upload blocks this one; try again"})
            if call in ("push-messages", "pull-messages"):
                return await self.app(scope, receive, self.recording(request.node.node_id, scope, send))
        return await self.app(scope, receive, send)

    def recording(self, node: int, scope: Scope, send: Send) -> Send:
        """A `send` that first records which objects the node may now fetch, or under which session it may upload.

        The SuperLink itself forgets an upload soon: a reply is deleted once the server has fetched it.
        """

        async def record_and_send(message: MutableMapping[str, Any]) -> None:
            # Recorded before the response is sent: the node may use it at once.
            response = scope["state"].get("protobuf_response")
            if message["type"] == "http.response.start" and isinstance(response, PushMessagesResponse):
                self.sessions.setdefault(node, deque(maxlen=KEPT_SESSIONS)).append(response.session_id)
            elif message["type"] == "http.response.start" and isinstance(response, PullMessagesResponse):
                for tree in response.message_object_trees:
                    self.objects[node] = objects_in(tree)
            await send(message)

        return record_and_send

    def reason_to_refuse(self, call: str, request: Any) -> str:
        """Why a site may not make this call; empty if it may."""
        if call in OWN_CALLS:
            return ""
        node = request.node.node_id
        state = self.state_of()
        match call:
            case "push-messages":
                return error_in_push(state, node, request)
            case "push-object":
                session = request.session_id
                if session not in self.sessions.get(node, ()) and not is_sending(state, node, session):
                    return "part of a message that is not its own"
                if not has_announced_children(state, request.object_id, request.object_content):
                    return "an object with other children than announced"
                return ""
            case "pull-object":
                if self.was_sent(state, node, request.object_id):
                    return ""
                return "part of no message to it"
            case "confirm-message-received":
                if sent_to(state, node, request.message_object_id):
                    return ""
                return "a message that was not sent to it"
            case "get-run" | "get-fab":
                if is_asked_by(state, node, request.run_id):
                    return ""
                return "a run without a request to it"
        return UNKNOWN_CALL

    def was_sent(self, state: Any, node: int, object_id: str) -> bool:
        """Whether an object belongs to a message to this node; it may fetch an object again."""
        if object_id in self.objects.get(node, ()):
            return True
        self.objects[node] = objects_sent_to(state, node)
        return object_id in self.objects[node]


def error_in_push(state: Any, node: int, request: Any) -> str:
    """Why a push is not a reply of this node to a request of the server; empty if it is."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return "not one message with its objects"
    reply = request.messages_list[0].metadata
    if reply.src_node_id != node:
        return "a message in the name of another"
    asked = sent_to(state, node, reply.reply_to_message_id) if reply.reply_to_message_id else None
    if asked is None or not asked.delivered_at:
        return "a reply to nothing that it was asked"
    if reply.dst_node_id != SUPERLINK_NODE_ID or int64_to_uint64(asked.src_node_id) != SUPERLINK_NODE_ID:
        return "a message to another than the server"
    if reply.run_id != int64_to_uint64(asked.run_id) or reply.message_type != asked.message_type:
        return "a reply for another run, or of another kind, than it was asked"
    if request.message_object_trees[0].object_id == reply.message_id:
        return ""
    return "objects of another message"


def sent_to(state: Any, node: int, message: str) -> Any:
    """The record of a message that was sent to this node; None without one."""
    columns = (MessageIns.run_id, MessageIns.src_node_id, MessageIns.message_type, MessageIns.delivered_at)
    wanted = select(*columns).where(MessageIns.message_id == message, MessageIns.dst_node_id == uint64_to_int64(node))
    with state.session() as session:
        return session.execute(wanted).first()


def is_sending(state: Any, node: int, upload: str) -> bool:
    """Whether a push session belongs to a reply of this node, by the records, which outlive a restart."""
    wanted = (
        select(MessageRes.message_id)
        .join(ObjectPushSessionRoot, ObjectPushSessionRoot.root_object_id == MessageRes.message_id)
        .where(ObjectPushSessionRoot.session_id == upload, MessageRes.src_node_id == uint64_to_int64(node))
    )
    with state.session() as session:
        return session.execute(wanted).first() is not None


def is_asked_by(state: Any, node: int, run: int) -> bool:
    """Whether a run has an open request to this node."""
    mine = (MessageIns.dst_node_id == uint64_to_int64(node), MessageIns.run_id == uint64_to_int64(run))
    with state.session() as session:
        return session.execute(select(MessageIns.message_id).where(*mine)).first() is not None


def objects_sent_to(state: Any, node: int) -> set[str]:
    """The ids of all objects of the messages to this node that have not been deleted."""
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
    """The ids of all objects in one of Flower's object trees."""
    return {part.object_id for part in iterate_object_tree(tree)}


def sender(scope: Scope) -> str:
    """The sender of a request for the log: the fingerprint of its key, as `ssh-keygen -lf` prints it."""
    key = dict(scope.get("headers", [])).get(FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode(), b"")
    return pem_fingerprint(base64.b64decode(key))


def has_announced_children(state: Any, object_id: str, content: bytes) -> bool:
    """Whether the content of an object has the children that were announced."""
    try:
        children = set(get_object_children_ids_from_object_content(content))
    except (ValueError, IndexError, UnicodeError):
        return False
    with state.session() as session:
        announced = session.scalars(select(ObjectChild.child_id).where(ObjectChild.parent_id == object_id))
        return children == set(announced)


def is_blocked(state: Any, tree: Any) -> bool:
    """Whether pending uploads contradict this object tree; one without progress for long is dropped."""
    with state.session() as session:
        idle_since = now() - IDLE_LIMIT + datetime.timedelta(seconds=OBJECT_PUSH_SESSION_TTL_SECONDS)
        for upload in conflicting_uploads(session, tree):
            found = session.get(ObjectPushSession, upload)
            if found is not None and found.expires_at < idle_since:
                state._cleanup_push_session(upload, cleanup_messages=True)  # as Flower does when a session expires
        return bool(conflicting_uploads(session, tree))


def conflicting_uploads(session: Any, tree: Any) -> set[str]:
    """The push sessions that announced other children of an object than this tree does, and have not sent it yet."""
    announced: dict[str, set[str]] = {}
    for part in iterate_object_tree(tree):
        announced[part.object_id] = {child.object_id for child in part.children}
    missing = select(StoredObject.object_id).where(
        StoredObject.object_id.in_(announced), StoredObject.is_available == 0
    )
    earlier: dict[str, set[str]] = {object_id: set() for object_id in session.scalars(missing)}
    rows = select(ObjectChild.parent_id, ObjectChild.child_id).where(ObjectChild.parent_id.in_(earlier))
    for parent, child in session.execute(rows):
        earlier[parent].add(child)
    contradicted = [object_id for object_id, children in earlier.items() if children != announced[object_id]]
    pending = select(ObjectPushSessionPending.session_id).where(ObjectPushSessionPending.object_id.in_(contradicted))
    return set(session.scalars(pending))
