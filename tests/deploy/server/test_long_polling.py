"""Questions that are held until there is an answer: nothing is asked of Flower for one who is no longer there."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import Message, Metadata, PullObjectRequest, PullObjectResponse, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse, PushAppMessagesRequest

from mutirao.deploy.server.long_polling import LongPolling

PULL, PULL_OBJECT = "/v1/fleet/pull-messages", "/v1/fleet/pull-object"


class Flower:
    """What stands behind: messages by node, objects by name (empty: announced, and not there yet)."""

    def __init__(self) -> None:
        self.messages: dict[int, list[Message]] = {}
        self.objects = {"part": b""}
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        path, request = scope["path"], scope["state"]["protobuf_request"]
        self.asked.append(path)
        told: Any = None
        if path == PULL:
            told = PullMessagesResponse(messages_list=self.messages.pop(request.node.node_id, []))
        elif path == "/v1/runtime/push-messages":
            for message in request.messages_list:
                self.messages.setdefault(message.metadata.dst_node_id, []).append(message)
        elif path == "/v1/runtime/pull-messages":
            told = PullAppMessagesResponse()
        elif path.endswith("pull-object"):
            content = self.objects.get(request.object_id)
            told = PullObjectResponse(object_found=content is not None, object_available=bool(content))
        elif path.endswith("push-object"):
            self.objects[request.object_id] = request.object_content
        scope["state"]["protobuf_response"] = told
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Caller:
    """One who asks; `hang_up` ends the connection."""

    def __init__(self, polling: LongPolling, path: str, request: Any) -> None:
        self.gone, self.answers = asyncio.Event(), 0
        self.scope: dict[str, Any] = {"type": "http", "path": path, "state": {"protobuf_request": request}}
        self.task = asyncio.ensure_future(polling(self.scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.answers += message["type"] == "http.response.start"

    async def told(self) -> Any:
        await asyncio.wait_for(self.task, 60)
        assert self.answers == 1
        return self.scope["state"]["protobuf_response"]


def pull(node: int) -> PullMessagesRequest:
    return PullMessagesRequest(node=Node(node_id=node))


def push(node: int) -> PushAppMessagesRequest:
    return PushAppMessagesRequest(messages_list=[Message(metadata=Metadata(dst_node_id=node))])


async def a_while() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(scenario: Callable[[Flower, LongPolling], Awaitable[None]], seconds: float = 60.0) -> None:
    async def stage() -> None:
        flower = Flower()
        polling = LongPolling(flower, seconds)
        await scenario(flower, polling)
        assert not polling.pending  # nothing is left of a request that was answered

    asyncio.run(stage())


def test_a_site_hears_of_a_message_when_it_comes_and_no_other_site_is_woken() -> None:
    async def scenario(flower: Flower, polling: LongPolling) -> None:
        mine, other = Caller(polling, PULL, pull(1)), Caller(polling, PULL, pull(2))
        await a_while()
        assert not mine.task.done()
        await Caller(polling, "/v1/runtime/push-messages", push(1)).told()
        assert len((await mine.told()).messages_list) == 1
        await a_while()
        assert not other.task.done()
        assert flower.asked.count(PULL) == 3
        other.gone.set()
        assert not (await other.told()).messages_list

    play(scenario)


def test_what_is_there_is_answered_at_once() -> None:
    async def scenario(flower: Flower, polling: LongPolling) -> None:
        flower.messages[1] = [Message()]
        assert len((await Caller(polling, PULL, pull(1)).told()).messages_list) == 1
        assert flower.asked == [PULL]

    play(scenario)


@pytest.mark.parametrize("side", ["fleet", "runtime"])
def test_a_part_that_was_announced_is_waited_for_and_an_unknown_one_is_not(side: str) -> None:
    async def scenario(flower: Flower, polling: LongPolling) -> None:
        path = f"/v1/{side}/pull-object"
        both = [Caller(polling, path, PullObjectRequest(object_id="part")) for _ in range(2)]
        assert not (await Caller(polling, path, PullObjectRequest(object_id="other")).told()).object_found
        assert not any(one.task.done() for one in both)
        brought = PushObjectRequest(object_id="part", object_content=b"1")
        await Caller(polling, "/v1/fleet/push-object", brought).told()
        assert [(await one.told()).object_available for one in both] == [True, True]

    play(scenario)


def test_the_servers_own_process_is_not_held_when_it_asks_for_replies() -> None:
    async def scenario(flower: Flower, polling: LongPolling) -> None:
        assert not (await Caller(polling, "/v1/runtime/pull-messages", PullAppMessagesRequest()).told()).messages_list

    play(scenario)


def test_after_its_time_a_question_gets_the_answer_it_had() -> None:
    async def scenario(flower: Flower, polling: LongPolling) -> None:
        assert not (await Caller(polling, PULL, pull(1)).told()).messages_list
        assert flower.asked == [PULL]

    play(scenario, seconds=0.01)


def test_a_message_is_not_taken_for_one_who_hung_up() -> None:
    async def scenario(flower: Flower, polling: LongPolling) -> None:
        gone = Caller(polling, PULL, pull(1))
        await a_while()
        gone.gone.set()
        await Caller(polling, "/v1/runtime/push-messages", push(1)).told()
        await gone.told()
        assert flower.messages[1]

    play(scenario)


def test_of_two_questions_of_one_site_the_newer_one_waits_on() -> None:
    async def scenario(flower: Flower, polling: LongPolling) -> None:
        older = Caller(polling, PULL, pull(1))
        await a_while()
        newer = Caller(polling, PULL, pull(1))
        assert not (await older.told()).messages_list
        await Caller(polling, "/v1/runtime/push-messages", push(1)).told()
        assert len((await newer.told()).messages_list) == 1

    play(scenario)


def test_all_are_let_go_when_the_process_is_asked_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    async def scenario(flower: Flower, polling: LongPolling) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        await polling({"type": "lifespan"}, lambda: None, lambda message: None)  # type: ignore[arg-type, return-value]
        held = Caller(polling, PULL, pull(1))
        await a_while()
        signal.raise_signal(signal.SIGTERM)
        assert not (await held.told()).messages_list
        assert not (await Caller(polling, PULL, pull(2)).told()).messages_list

    try:
        play(scenario)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [signal.SIGTERM]
