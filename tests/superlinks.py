"""What a SuperLink would say, at the one seam through which it is spoken to: for tests that need no processes."""

from typing import Any

import pytest
from flwr.proto.control_pb2 import ListNodesResponse, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo

from mutirao.deploy.keys import public_key_pem
from mutirao.deploy.layout import Node, Server
from mutirao.deploy.server import control_calls


class FakeLink:
    """Keeps nodes by their keys, in Flower's own messages; `away`: nobody answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: list[NodeInfo] = []
        self.away = False
        monkeypatch.setattr(control_calls, "control_call", self.control)
        monkeypatch.setattr(control_calls, "server_info", self.about)

    def connect(self, site: Node, since: str) -> None:
        """A site whose key was admitted comes."""
        node = self.of(public_key_pem(site.public_key))
        assert node is not None
        node.status, node.last_activated_at = "online", since

    def of(self, key: bytes) -> NodeInfo | None:
        return next((n for n in self.nodes if n.public_key == key and n.status != "unregistered"), None)

    def control(self, server: Server, call: str, content: bytes) -> bytes:
        if self.away:
            raise ConnectionRefusedError("nobody listens")
        if call == "register-node":
            key = RegisterNodeRequest.FromString(content).public_key
            self.nodes.append(NodeInfo(node_id=len(self.nodes) + 1, public_key=key, status="registered"))
        elif call == "unregister-node":
            number = UnregisterNodeRequest.FromString(content).node_id
            next(n for n in self.nodes if n.node_id == number).status = "unregistered"
        else:
            assert call == "list-nodes"
            return ListNodesResponse(nodes_info=self.nodes).SerializeToString()
        return b""

    def about(self, address: str, ca: Any, public_key: bytes, **more: Any) -> dict[str, Any]:
        if self.away:
            raise ConnectionRefusedError("nobody listens")
        node = self.of(public_key)
        return {"versions": {}, "node": node.node_id if node else None}
