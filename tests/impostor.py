"""Flower's protocol in the hands of an admitted site that speaks for another, or of a stranger behind a forwarder."""

import base64
import contextlib
import http.client
import socket
import sqlite3
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mutirao.deploy.layout import Node, Server

FORMAT = "application/protobuf"


@dataclass(frozen=True)
class Letter:
    """What identifies a message to somebody who wants to answer, fetch or end it."""

    message: str
    run: int
    node: int  # whom it was sent to


@dataclass(frozen=True)
class Impostor:
    """Flower's protocol in the hands of one who holds an admitted key, and says in it whatever it likes."""

    server: Server
    site: Node
    node: int  # its own, for which its key is good
    port: int = 0  # where to reach the server, if not at its own port

    def call(self, name: str, message: Any) -> tuple[int, bytes]:
        """One call of the Fleet interface, signed with the site's own key: the status, and what was answered."""
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.date import now
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

        key: Any = load_ssh_private_key(self.site.key.read_bytes(), None)
        moment = now().isoformat()
        signed = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public_key_to_bytes(key.public_key())).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(key, moment.encode())).decode(),
            TIMESTAMP_HEADER: moment,
        }
        return post(self.server, f"/v1/fleet/{name}", message.SerializeToString(), signed, self.port)

    def push(self, message: Any, meanwhile: Callable[[str], None] = lambda upload: None) -> int:
        """Push a message as it stands, then its objects; tells the status. `meanwhile` is called between the two."""
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        message.metadata.__dict__["_message_id"] = message.object_id
        tree, parts = get_object_tree(message), get_all_nested_objects(message)
        bare = message_to_proto(remove_content_from_message(message))
        request = PushMessagesRequest(
            node=self.me, messages_list=[bare], message_object_trees=[tree], clientapp_runtime_list=[1.0]
        )
        status, body = self.call("push-messages", request)
        answer = PushMessagesResponse()
        if status == 200:
            answer.ParseFromString(body)
            meanwhile(answer.session_id)
        sent = [self.upload(message.metadata.run_id, answer.session_id, i, parts[i]) for i in answer.objects_to_push]
        return max([status, *sent])

    def upload(self, run: int, session: str, name: str, thing: Any) -> int:
        """Push an object; tells the status."""
        from flwr.proto.message_pb2 import PushObjectRequest

        about = {"run_id": run, "session_id": session, "object_id": name, "object_content": thing.deflate()}
        return self.call("push-object", PushObjectRequest(node=self.me, **about))[0]

    def reply(self, letter: Letter, meanwhile: Callable[[str], None] = lambda upload: None, **instead: Any) -> int:
        """Push a reply to a message, in the name of whoever it was sent to unless told otherwise; the status."""
        from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

        content = RecordDict(
            {
                "arrays": ArrayRecord({}),
                "extras": ArrayRecord({}),
                "metrics": MetricRecord({"loss": 0.0}),
                "count": MetricRecord({"n": 10**6}),
                "audit": ConfigRecord({"seq": 1, "first": "0" * 64, "head": "0" * 64}),
            }
        )
        told: dict[str, Any] = {"content": content, "run": letter.run, "source": letter.node}
        told |= {"target": server_node(), "reply_to": letter.message}
        return self.push(message_of(**(told | instead)), meanwhile)

    def order(self, victim: int, run: int) -> int:
        """Push a request to train, in the server's name, to another site; tells the status."""
        from flwr.app import ArrayRecord, ConfigRecord, RecordDict

        content = RecordDict(
            {"arrays": ArrayRecord({}), "config": ConfigRecord({"round": 1}), "request": ConfigRecord({"do": "train"})}
        )
        return self.push(message_of(content, run, server_node(), victim))

    def fetch(self, run: int, thing: str) -> tuple[int, bytes]:
        """Pull an object by its number: the status, and its content."""
        from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

        status, body = self.call("pull-object", PullObjectRequest(node=self.me, run_id=run, object_id=thing))
        answer = PullObjectResponse()
        if status == 200:
            answer.ParseFromString(body)
        return status, answer.object_content

    def confirm(self, letter: Letter) -> int:
        """Say that a message was received, upon which the SuperLink deletes it; tells the status."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        request = ConfirmMessageReceivedRequest(node=self.me, run_id=letter.run, message_object_id=letter.message)
        return self.call("confirm-message-received", request)[0]

    @property
    def me(self) -> Any:
        """Its own node, as Flower writes it."""
        from flwr.proto.node_pb2 import Node as Mine

        return Mine(node_id=self.node)


def message_of(
    content: Any, run: int, source: int, target: int, reply_to: str = "", kind: str = "train", ttl: float = 30.0
) -> Any:
    """A message of Flower's with any metadata one likes."""
    from flwr.app.message import make_message
    from flwr.app.metadata import Metadata
    from flwr.supercore.date import now

    return make_message(Metadata(run, "", source, target, reply_to, "1", now().timestamp(), ttl, kind), content)


def server_node() -> int:
    """The number that Flower gives the server itself."""
    from flwr.common.constant import SUPERLINK_NODE_ID

    return int(SUPERLINK_NODE_ID)


def letters_in(server: Server) -> list[Letter]:
    """The messages that the SuperLink holds, from its own state: an impostor is given what it could only guess."""
    uri = f"{(server.folder / 'state.db').as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=60)) as state:
        rows = state.execute("select message_id, run_id, dst_node_id from message_ins").fetchall()
    return [Letter(str(message), run % 2**64, node % 2**64) for message, run, node in rows]


def post(server: Server, path: str, body: bytes, headers: dict[str, str], port: int = 0) -> tuple[int, bytes]:
    """One request to the server over TLS on this machine; the status, and what was answered."""
    context = ssl.create_default_context(cafile=str(server.ca))
    line = http.client.HTTPSConnection("127.0.0.1", port or server.port, context=context, timeout=60)
    with contextlib.closing(line):
        line.request("POST", path, body, {"Content-Type": FORMAT, "Accept": FORMAT, **headers})
        reply = line.getresponse()
        return reply.status, reply.read()


def register(server: Server, public_key: bytes, port: int = 0, **headers: str) -> int:
    """Try to have a key admitted by Flower's Control interface; the status."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    content = RegisterNodeRequest(public_key=public_key).SerializeToString()
    return post(server, "/v1/control/register-node", content, headers, port)[0]


@contextlib.contextmanager
def forwarder(port: int) -> Iterator[int]:
    """A TCP forwarder on this machine, as nginx (stream), HAProxy or a container's port is one; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    near = listener.accept()[0]
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:  # closed, here or there
                    return
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pass_on, args=ends, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Carry bytes one way until either end is closed."""
    with contextlib.suppress(OSError):
        while block := source.recv(65536):
            sink.sendall(block)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
