"""A real SuperLink behind its door, and one who holds an admitted key or none: what each of them gets by asking."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.state.schema.corestate_models import ObjectPushSession
from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from starlette.middleware import Middleware

from impostor import Impostor, Letter, forwarder, letters_in, message_of, register, server_node
from mutirao.deploy import processes
from mutirao.deploy.keys import key_fingerprint, public_key_pem, read_secret
from mutirao.deploy.layout import Server, free_port
from mutirao.deploy.provisioning import create_server, create_site, store_key
from mutirao.deploy.server.access_control import SECRET_HEADER
from mutirao.deploy.server.control_calls import admit, node_id_of, server_info
from mutirao.deploy.server.ownership import IDLE_LIMIT
from mutirao.deploy.server.superlink import add_middleware

NOBODY = "0" * 64


@dataclass
class Federation:
    server: Server
    state: Any  # Flower's own, of the SuperLink that runs
    run: int
    victim: Impostor
    liar: Impostor
    grpc: int  # a port that Flower would open besides, were it allowed to

    def ask(self, who: Impostor, number: float) -> Letter:
        """A request of the server to a site, as its own process would leave it with the SuperLink."""
        content = RecordDict({"arrays": ArrayRecord({}), "config": ConfigRecord({"number": number})})
        message = message_of(content, self.run, server_node(), who.node, ttl=300.0)
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self.state.start_session(self.run)
        parts = get_all_nested_objects(message)
        bare, tree = remove_content_from_message(message), get_object_tree(message)
        for name in self.state.store_message_and_object_tree(bare, tree, session)[1]:
            assert self.state.store_object(self.run, session, name, parts[name].deflate())
        return Letter(message.object_id, self.run, who.node)

    def answers_to(self, letter: Letter) -> list[Any]:
        return list(self.state.get_message_res({letter.message}, self.run))

    def things_of(self, letter: Letter) -> list[str]:
        tree = self.state.object_store.get_object_tree(letter.message)
        return [letter.message, *(child.object_id for child in tree.children)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    place = tmp_path_factory.mktemp("door")
    server = create_server(place / "server", ["localhost"], free_port(), host="127.0.0.1")
    processes.write_commands(server)
    # Its state is filled from here, so that no process of its own is to take the run for a real one.
    command, grpc = [*processes.superlink_command(server), "--isolation", "process"], free_port()
    command += ["--fleet-api-address", f"127.0.0.1:{grpc}"]
    other_ways = {"FLWR_INTERNAL_GRPC_FLEET_API": "1"}
    process = processes.launch(server, command, processes.environment(server) | other_ways)
    try:
        assert processes.wait_until(lambda: processes.is_answering(server), 60), process.text()
        speakers = []
        for name in ("victim", "liar"):
            site = create_site(place / name, name, server.here, server.ca)
            kept = store_key(server.folder, site.public_key)
            admit(server.folder, kept)
            node = node_id_of(server, kept)
            assert node is not None
            speaker = Impostor(server, site, node)
            hello = ActivateNodeRequest(public_key=public_key_pem(kept), heartbeat_interval=60)
            assert speaker.call("activate-node", hello)[0] == 200
            speakers.append(speaker)
        database = str(server.folder / "state.db")
        state = get_objectstore_linkstate_factories(database, get_federation_manager(is_simulation=False))[1].state()
        run = state.create_run("a/b", "1", NOBODY, {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP)
        task = state.get_tasks(run_ids=[run])[0].task_id
        assert state.claim_task(task)
        assert state.activate_task(task)
        yield Federation(server, state, run, *speakers, grpc)
    finally:
        process.stop()


def pulled(who: Impostor) -> list[Any]:
    status, body = who.call("pull-messages", PullMessagesRequest(node=who.me))
    assert status == 200
    answer = PullMessagesResponse()
    answer.ParseFromString(body)
    return list(answer.messages_list)


@pytest.mark.slow
def test_a_site_answers_what_it_was_asked_and_fetches_what_it_was_sent(federation: Federation) -> None:
    letter = federation.ask(federation.victim, 1.0)
    assert [m.metadata.message_id for m in pulled(federation.victim)] == [letter.message]
    for thing in federation.things_of(letter):
        status, content = federation.victim.fetch(letter.run, thing)
        assert (status, bool(content)) == (200, True)
    assert federation.victim.confirm(letter) == 200
    assert federation.victim.reply(letter) == 200
    answers = federation.answers_to(letter)
    assert [(a.metadata.src_node_id, a.has_error()) for a in answers] == [(federation.victim.node, False)]


def test_a_reply_in_the_name_of_another_site_is_refused(federation: Federation) -> None:
    letter = federation.ask(federation.victim, 2.0)
    assert letter in letters_in(federation.server)
    assert federation.liar.reply(letter) == 403
    assert federation.liar.reply(letter, source=federation.liar.node) == 403
    assert federation.answers_to(letter) == []


def test_a_request_in_the_name_of_the_server_is_refused(federation: Federation) -> None:
    before = letters_in(federation.server)
    assert federation.liar.order(federation.victim.node, federation.run) == 403
    assert letters_in(federation.server) == before
    asked = [m.metadata.src_node_id for m in pulled(federation.victim)]
    assert len(asked) <= 1  # what an earlier test left, and nothing of the liar's


def test_a_reply_must_go_to_the_server_for_the_run_and_kind_that_was_asked(federation: Federation) -> None:
    letter, liar = federation.ask(federation.liar, 3.0), federation.liar
    assert liar.reply(letter) == 403  # it was not even fetched
    assert letter.message in [m.metadata.message_id for m in pulled(liar)]
    assert liar.reply(letter, target=federation.victim.node) == 403
    assert liar.reply(letter, run=letter.run + 1) == 403
    assert liar.reply(Letter(NOBODY, letter.run, liar.node)) == 403
    assert liar.reply(letter, kind="query") == 403
    assert federation.answers_to(letter) == []
    assert liar.reply(letter) == 200
    assert liar.reply(letter) in (200, 403)  # once more changes nothing
    assert len(federation.answers_to(letter)) == 1


def test_messages_and_objects_of_another_site_are_neither_fetched_nor_deleted(federation: Federation) -> None:
    letter = federation.ask(federation.victim, 4.0)
    for thing in federation.things_of(letter):
        shared = thing in federation.things_of(federation.ask(federation.liar, 5.0))
        status, content = federation.liar.fetch(letter.run, thing)
        assert (status, content) == (403, b"") or shared
    assert federation.liar.confirm(letter) == 403
    assert federation.victim.fetch(letter.run, letter.message)[0] == 200


def test_a_reply_on_its_way_is_fetched_by_no_site(federation: Federation) -> None:
    letter = federation.ask(federation.victim, 6.0)
    while letter.message not in [m.metadata.message_id for m in pulled(federation.victim)]:
        pass
    assert federation.victim.reply(letter) == 200
    reply = federation.answers_to(letter)[0].metadata.message_id
    assert federation.liar.fetch(letter.run, reply) == (403, b"")


def test_a_reply_that_the_server_asked_for_already_is_uploaded_by_its_site_and_nobody_else(
    federation: Federation,
) -> None:
    letter, stolen = federation.ask(federation.victim, 7.0), []
    while letter.message not in [m.metadata.message_id for m in pulled(federation.victim)]:
        pass

    def strike_out(upload: str) -> None:
        """As the SuperLink does when the server pulls a reply whose objects are still on their way."""
        federation.state.delete_messages({letter.message})
        thing = ConfigRecord({"x": 1.0})
        stolen.extend(federation.liar.upload(letter.run, name, thing.object_id, thing) for name in (upload, ""))

    assert federation.victim.reply(letter, strike_out) == 200
    assert stolen == [403, 403]


def test_a_lie_about_an_object_that_others_will_send_does_not_keep_their_replies_out(federation: Federation) -> None:
    letter, liar = federation.ask(federation.liar, 9.0), federation.liar
    while letter.message not in [m.metadata.message_id for m in pulled(liar)]:
        pass
    common = ConfigRecord({"common": 1.0})  # as an empty record of arrays is, which each reply has
    message = message_of(RecordDict({"x": common}), letter.run, liar.node, server_node(), letter.message)
    message.metadata.__dict__["_message_id"] = message.object_id
    lie = ObjectTree(object_id=common.object_id, children=[ObjectTree(object_id="f" * 64)])
    request = PushMessagesRequest(
        node=liar.me,
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[ObjectTree(object_id=message.object_id, children=[lie])],
        clientapp_runtime_list=[1.0],
    )
    status, body = liar.call("push-messages", request)
    assert status == 200
    upload = PushMessagesResponse.FromString(body).session_id
    assert liar.upload(letter.run, upload, common.object_id, common) == 403  # it has no such part
    asked = federation.ask(federation.victim, 10.0)
    while asked.message not in [m.metadata.message_id for m in pulled(federation.victim)]:
        pass
    assert federation.victim.reply(asked, content=RecordDict({"y": common})) == 503  # a SuperNode tries again
    with federation.state.session() as session:  # and nothing comes of the liar's upload meanwhile
        session.get(ObjectPushSession, upload).expires_at -= IDLE_LIMIT
    assert federation.victim.reply(asked, content=RecordDict({"y": common})) == 200
    assert [a.has_error() for a in federation.answers_to(asked)] == [False]


def test_no_other_port_leads_around_the_door(federation: Federation) -> None:
    with socket.socket() as line:
        assert line.connect_ex(("127.0.0.1", federation.grpc)) != 0


def test_a_flower_that_checks_keys_in_another_way_is_not_started() -> None:
    for layers, keys_asked in (([], True), ([Middleware(NodeAuthMiddleware)], False)):
        state = SimpleNamespace(enable_supernode_auth=keys_asked)
        with pytest.raises(SystemExit, match="authenticates sites in another way; mutirao was checked with flwr"):
            add_middleware(SimpleNamespace(user_middleware=layers, state=state), "0" * 64)


def test_what_is_refused_is_in_the_server_log_by_key_and_without_numbers(federation: Federation) -> None:
    letter = federation.ask(federation.victim, 8.0)
    assert federation.liar.confirm(letter) == 403
    log = (federation.server.logs / "superlink.log").read_text()
    said = [line for line in log.splitlines() if line.startswith("refused: confirm-message-received")][-1]
    assert key_fingerprint(federation.liar.site.public_key) in said
    assert not any(str(number) in said for number in (letter.message, letter.node, letter.run, federation.liar.node))


def test_a_stranger_behind_a_forwarder_registers_no_key(federation: Federation, tmp_path: Path) -> None:
    stranger = create_site(tmp_path / "stranger", "stranger", federation.server.here, federation.server.ca)
    key = public_key_pem(stranger.public_key)
    with forwarder(federation.server.port) as port:
        for guess in ({}, {SECRET_HEADER: ""}, {SECRET_HEADER: "0" * 64}, {"x-forwarded-for": "127.0.0.1"}):
            assert register(federation.server, key, port, **guess) == 403
        assert "node" not in server_info(f"127.0.0.1:{port}", federation.server.ca, key, direct=True)
    assert register(federation.server, key) == 403  # from loopback itself
    assert node_id_of(federation.server, stranger.public_key) is None
    secret = {SECRET_HEADER: read_secret(federation.server.secret)}
    assert register(federation.server, key, **secret) == 200
    assert node_id_of(federation.server, stranger.public_key) is not None
