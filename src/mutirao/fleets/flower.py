"""A fleet over Flower's messages: the same flow reaches real institutions, or Flower's own simulation engine.

Only this file and a few in `site` (`clientapp`, `superlink`, `supernode`) import flwr. Node ids are random, so a node
is known by the name it declares.
"""

import contextlib
import functools
import importlib.util
import io
import logging
import math
import os
import queue
import re
import shlex
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from mutirao import config as configuration
from mutirao.arrays import Array, Arrays
from mutirao.audit import Audit, reply_fingerprint
from mutirao.errors import ConfigError, MutiraoError, Refused
from mutirao.fleet import Answers, ClientId, Failure, Reply, Request, Scalar, collect, failure_of
from mutirao.fleets.local import LocalFleet
from mutirao.recipes import Task, find
from mutirao.site.caller import OFF
from mutirao.site.guard import Asker, admit, discreet, guarded
from mutirao.site.policy import Policy, load_policy
from mutirao.site.states import States
from mutirao.site.worker import Order, Warm

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # flwr reads it once, when it is imported
try:
    from flwr.app import Array as Parcel
    from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.constant import ErrorCode
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise ConfigError("the Flower fleet needs Flower: install mutirao[flower]") from error

log = logging.getLogger("mutirao")

TaskOf = Callable[[Context], Task]
Entitled = Callable[[ClientId, int], bool]  # whether the node of that number may have that name
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

CLOCKS = 600.0  # seconds by which the clocks of server and clients may differ before messages expire early
SILENCE = 120.0  # a node that has not told its name after so many seconds is asked again,
TROUBLE = 10.0  # and one that answered with an error after so many
LONGEST_NAME = 100
NUMBERS = "biufc"  # the kinds of NumPy types that may travel: no objects, no text, no structures
GONE = {ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE}
QUESTIONS = dict.fromkeys(("probe", "rows"), MessageType.QUERY)
KINDS = {"evaluate": MessageType.EVALUATE, **QUESTIONS}  # whatever else is done counts as training
REFUSED = 8001  # the code of an answer that a site's policy does not allow; Flower's own are below 1000
GREETING = "query.name"
STATE = "mutirao.state"
OURS = {"recipe", "set", "out", "resume", "timeout"}  # keys of a run configuration that are no settings of a recipe


class MalformedError(ValueError):
    """A message that does not hold what it should."""


class FlowerFleet:
    """The nodes of a Flower federation, by the names they declare.

    A request not answered after `timeout` seconds is late. A node seen for the first time is asked for its name,
    and `clients()` waits for it, once, for at most `greet` seconds. Two nodes may not have one name, and none may have
    one that `entitled` denies it.
    """

    def __init__(
        self, grid: Grid, timeout: float = 600.0, greet: float = 60.0, entitled: Entitled = lambda name, node: True
    ) -> None:
        self.grid, self.timeout, self.greet, self.entitled = grid, timeout, greet, entitled
        self._clients: list[ClientId] = []
        self._nodes: dict[ClientId, int] = {}  # who holds a name
        self._claims: dict[int, ClientId | None] = {}  # what each node declared; None: nothing usable
        self._asked: dict[str, int] = {}  # questions for names that are under way
        self._again: dict[int, float] = {}  # when a node may be asked for its name again
        self._warned: set[int] = set()
        self._closed = threading.Event()
        self.trail: Audit | None = None  # the server's audit trail: sites that keep one of their own note its head
        self._heads: dict[ClientId, dict[str, Scalar]] = {}

    def clients(self) -> list[ClientId]:
        """The names of the nodes that are connected; the same list while nothing changed."""
        here = set(self.grid.get_node_ids())
        self._forget_all_but(here)
        self._ask_names(here)
        self._settle_names()
        if (names := sorted(self._nodes)) != self._clients:
            self._clients = names
        return self._clients

    def keys(self) -> dict[ClientId, str]:
        """The node each client is: a SuperLink that authenticates its nodes gives one key one node, and no more."""
        return {name: str(node) for name, node in self._nodes.items()}

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each client its request and wait at most `timeout` seconds for the answers."""
        return collect(requests, self._outcomes(requests))

    def take_heads(self) -> dict[ClientId, dict[str, Scalar]]:
        """Where the sites' own audit trails stood when they last answered, of those who did since this was called."""
        heads, self._heads = self._heads, {}
        return heads

    def close(self) -> None:
        """Stop waiting: whoever listens for answers gets none any more."""
        self._closed.set()

    def _outcomes(self, requests: Mapping[ClientId, Request]) -> Iterator[tuple[ClientId, Reply | Failure]]:
        messages: dict[ClientId, Message] = {}
        models: dict[int, ArrayRecord] = {}  # a round sends one model to all: it is packed once
        for client, request in sorted(requests.items()):
            if client not in self._nodes:
                yield client, Failure("gone", "is not connected")
                continue
            if id(request.arrays) not in models:
                models[id(request.arrays)] = pack(request.arrays)
            model = models[id(request.arrays)]
            messages[client] = request_message(request, model, self._nodes[client], self.timeout, self.trail)
        taken = set(self.grid.push_messages(list(messages.values())))
        for client, message in messages.items():
            if message.metadata.message_id not in taken:
                yield client, Failure("gone", "the SuperLink did not take the message")
        sent = {m.metadata.message_id: c for c, m in messages.items() if m.metadata.message_id in taken}
        for message_id, answer in self._listen(sent, self.timeout):
            client = sent[message_id]
            outcome = answer if isinstance(answer, Failure) else reply_in(answer, self._nodes[client])
            if isinstance(answer, Message) and isinstance(outcome, Reply) and (head := head_in(answer, "audit")):
                self._heads[client] = head | {"reply": reply_fingerprint(outcome)}
            yield client, outcome

    def _listen(self, ids: Iterable[str], seconds: float) -> Iterator[tuple[str, Message | Failure]]:
        """Pass on the answers that come in time; one that is damaged or slow to arrive holds up no other."""
        waiting, deadline, pause = set(ids), time.monotonic() + seconds, 0.02
        pulls: dict[Future[list[Message | Failure]], str] = {}
        pool = ThreadPoolExecutor(32, "mutirao-answers")
        try:
            while waiting and not self._closed.is_set():
                pulls |= {pool.submit(self._pull, i): i for i in waiting.difference(pulls.values())}
                for pull in wait(pulls, timeout=1.0).done:
                    message_id, answers = pulls.pop(pull), pull.result()
                    if answers:
                        waiting.discard(message_id)
                    yield from ((message_id, answer) for answer in answers)
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._closed.wait(min(pause, left) if waiting else 0)
                pause = min(1.5 * pause, 0.5 + len(waiting) / 50)  # spare a SuperLink with many clients
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _pull(self, message_id: str) -> list[Message | Failure]:
        """The answers to one message: pulled together, a single undecodable one would cost all of them."""
        try:
            found = self.grid.pull_messages([message_id])
            return [m for m in found if m.metadata.reply_to_message_id == message_id]
        except Exception as error:  # whatever a client sent must stay that client's failure
            return [Failure("malformed", f"the answer cannot be read: {failure_of(error).reason}")]

    def _forget_all_but(self, here: set[int]) -> None:
        self._claims = {n: name for n, name in self._claims.items() if n in here}
        self._nodes = {name: n for name, n in self._nodes.items() if n in here}
        self._asked = {i: n for i, n in self._asked.items() if n in here}
        self._again = {n: when for n, when in self._again.items() if n in here}
        self._warned &= here

    def _ask_names(self, here: set[int]) -> None:
        now = time.monotonic()
        due = sorted(n for n in here - self._claims.keys() if self._again.get(n, now) <= now)
        earlier = {i: n for i, n in self._asked.items() if n not in due}
        first = [n for n in due if n not in self._again]
        questions = [Message(RecordDict(), n, GREETING, ttl=SILENCE + CLOCKS) for n in due]
        taken = set(self.grid.push_messages(questions)) if questions else set()
        self._again |= dict.fromkeys(due, now + SILENCE)
        new = {q.metadata.message_id: n for q, n in zip(questions, due, strict=True) if q.metadata.message_id in taken}
        self._asked = earlier | new
        self._hear_names([i for i, n in new.items() if n in first], self.greet)
        self._hear_names(list(self._asked), 0)  # those who took longer than a call of clients() may

    def _hear_names(self, ids: list[str], seconds: float) -> None:
        for message_id, answer in self._listen(ids, seconds):
            node = self._asked.pop(message_id, None)
            if node is None:
                continue
            name = answer if isinstance(answer, Failure) else name_in(answer, node)
            if isinstance(name, str):
                self._claims[node] = name
                continue
            self._again[node] = time.monotonic() + TROUBLE
            if name.kind == "malformed":
                self._claims[node] = None  # refused for as long as it stays; other troubles may pass
            self._warn([node], f"node {node} is no client until it tells its name: {name}")

    def _settle_names(self) -> None:
        """Give each free name to the one node that claims it; refuse all others."""
        claimants: dict[ClientId, list[int]] = {}
        for node, name in sorted(self._claims.items()):
            if name is None or self._nodes.get(name) == node:
                continue
            if self.entitled(name, node):
                claimants.setdefault(name, []).append(node)
            else:
                self._warn([node], f"node {node} calls itself {name!r}, and its key is another's: refused")
        for name, nodes in claimants.items():
            if name in self._nodes:
                self._warn(nodes, f"{name!r} is connected already: another node of that name is refused for now")
            elif len(nodes) > 1:
                self._warn(nodes, f"{len(nodes)} nodes call themselves {name!r}: refused until only one is left")
            else:
                self._nodes[name] = nodes[0]

    def _warn(self, nodes: list[int], text: str) -> None:
        if not self._warned.issuperset(nodes):
            log.warning(text)
        self._warned.update(nodes)


def pack(arrays: Arrays) -> ArrayRecord:
    """Arrays as Flower carries them, bit for bit."""
    whole = {k: np.asarray(v) if isinstance(v, np.generic) else v for k, v in arrays.items()}
    return ArrayRecord({k: Parcel.from_numpy_ndarray(v) for k, v in whole.items()})


def unpack(record: ArrayRecord) -> Arrays:
    """The arrays of a record; MalformedError if one is not what it says it is."""
    return {name: unpack_one(name[:80], parcel) for name, parcel in record.items()}


def unpack_one(name: str, parcel: Parcel) -> Array:
    """One array in NumPy's file format. The header is believed only after it was compared with the bytes that came."""
    if parcel.stype != "numpy.ndarray":
        raise MalformedError(f"{name!r} is serialised as {parcel.stype[:40]!r}, not as numpy.ndarray")
    stream = io.BytesIO(parcel.data)
    try:
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[np.lib.format.read_magic(stream)](stream)
        declared = np.dtype(parcel.dtype)
    except Exception as error:
        raise MalformedError(f"{name!r} cannot be decoded") from error
    if dtype.kind not in NUMBERS:
        raise MalformedError(f"{name!r} holds {dtype}, not numbers")
    if declared != dtype or tuple(parcel.shape) != shape:
        raise MalformedError(f"{name!r} declares {declared} {tuple(parcel.shape)} and holds {dtype} {shape}")
    size = len(parcel.data) - stream.tell()
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != size:
        raise MalformedError(f"{name!r} declares {dtype} {shape} and holds {size} bytes")
    flat = np.frombuffer(parcel.data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C").copy(order="K")  # handlers may write into it


def request_message(
    request: Request, model: ArrayRecord, node: int, timeout: float, trail: Audit | None = None
) -> Message:
    """A request on its way to a node; `model` is its arrays, packed, `trail` what the server has recorded so far."""
    config = ConfigRecord({k: v.item() if isinstance(v, np.generic) else v for k, v in request.config.items()})
    about: dict[str, Any] = {"do": request.do}
    if trail is not None:
        about |= trail.where()
    content = RecordDict({"arrays": model, "config": config, "request": ConfigRecord(about)})
    kind, group = KINDS.get(request.do, MessageType.TRAIN), str(request.config.get("round", ""))
    return Message(content, node, kind, ttl=timeout + CLOCKS, group_id=group)


def request_in(message: Message) -> Request:
    """The request a message carries."""
    content = message.content
    config: dict[str, Any] = dict(record_of(content, "config", ConfigRecord))
    do = str(record_of(content, "request", ConfigRecord)["do"])
    return Request(do, unpack(record_of(content, "arrays", ArrayRecord)), config)


def reply_content(reply: Reply) -> RecordDict:
    """All that leaves a client."""
    return RecordDict(
        {
            "arrays": pack(reply.arrays),
            "extras": pack(reply.extras),
            "metrics": MetricRecord({k: float(v) for k, v in reply.metrics.items()}),
            "count": MetricRecord({"n": int(reply.n)}),
        }
    )


def reply_in(message: Message, node: int) -> Reply | Failure:
    """The reply a message carries, or what is wrong with it; nothing a client sends makes this raise."""
    try:
        if (failure := failure_in(message, node)) is not None:
            return failure
        content = message.content
        metrics = record_of(content, "metrics", MetricRecord)
        n = record_of(content, "count", MetricRecord).get("n")
        if not isinstance(n, int):
            raise MalformedError("the number of samples is missing or no whole number")
        if any(isinstance(v, list) for v in metrics.values()):
            raise MalformedError("a metric is a list, not a number")
        return Reply(
            unpack(record_of(content, "arrays", ArrayRecord)),
            unpack(record_of(content, "extras", ArrayRecord)),
            {k: float(v) for k, v in metrics.items() if not isinstance(v, list)},
            n,
        )
    except MalformedError as error:
        return Failure("malformed", one_line(str(error)))
    except Exception as error:
        return Failure("malformed", failure_of(error).reason)


def name_in(message: Message, node: int) -> ClientId | Failure:
    """The name a node declares, or why it cannot be one: names end up in logs and tables."""
    if (failure := failure_in(message, node)) is not None:
        return failure
    record = message.content.get("name")
    name = record.get("name") if isinstance(record, ConfigRecord) else None
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        return Failure("malformed", f"a name is a text of 1 to {LONGEST_NAME} characters")
    if not name.isprintable() or "," in name or name != name.strip():
        return Failure("malformed", f"{name!r} has characters that a name may not have")
    return name


def failure_in(message: Message, node: int) -> Failure | None:
    """Why a message is not the answer of that node's client code, if so."""
    if message.has_error():  # first: what became of a lost node is told by the SuperLink, in its own name
        code = message.error.code
        kind = "gone" if code in GONE else "refused" if code == REFUSED else "raised"
        return Failure(kind, one_line(message.error.reason or f"Flower's error {message.error.code}"))
    if message.metadata.src_node_id != node:
        return Failure("malformed", "the answer comes from another node")
    if not message.has_content() or not message.content:
        return Failure("empty", "sent nothing")
    return None


def record_of(content: RecordDict, name: str, kind: type[Record]) -> Record:
    """The record of that name and kind; MalformedError without it."""
    record = content.get(name)
    if not isinstance(record, kind):
        raise MalformedError(f"the record {name!r} is missing or no {kind.__name__}")
    return record


def one_line(text: str) -> str:
    """Text of a stranger, fit for a log."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:1000]).split())[:200]


def client_app(task_of: TaskOf | None = None, warm: Warm | None = None) -> ClientApp:
    """A Flower client that works on its own part of a task: by default of the recipe the run configuration names.

    With `warm` the work is done by the site's resident worker; what is asked and what leaves is judged here.
    """
    app, task_of = ClientApp(), task_of or recipe_task

    def work(message: Message, context: Context) -> Message:
        def make() -> RecordDict | Failure:
            policy = policy_of(context)
            if policy is not None:
                return worked_under(policy, message, context, task_of, warm)
            return worked(message, context, task_for(context, task_of, {}, warm))

        return answer(message, make)

    def tell_name(message: Message, context: Context) -> Message:
        return answer(message, lambda: RecordDict({"name": ConfigRecord({"name": name_of(context, task_of)})}))

    for register in (app.train(), app.evaluate(), app.query()):
        register(work)
    app.query("name")(tell_name)
    return app


def answer(message: Message, make: Callable[[], RecordDict | Failure]) -> Message:
    """The answer made, or one line on why there is none: no traceback leaves a client."""
    try:
        made = make()
    except Exception as error:
        made = failure_of(error)
    if isinstance(made, RecordDict):
        return Message(made, reply_to=message)
    log.warning("a request failed: %s", made)
    code = REFUSED if made.kind == "refused" else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return Message(Error(code, made.reason), reply_to=message)


def worked(message: Message, context: Context, task: Task, states: States | None = None) -> RecordDict | Failure:
    """What the task's handler replies; the site's state stays on its disk (`states`) or in Flower's context."""
    name, kept = name_of(context, lambda _: task), context.state.get(STATE)
    request = request_in(message)
    number, began = request.config.get("round"), 0
    # A fleet of one, so that all is as in process; without `.many`, which is worth its preparation only for many.
    alone = LocalFleet(lambda request, site: task.handler(request, site), {name: data_of(task, name)})
    if states is not None and isinstance(number, int):
        began, state = states.before(request.do, number)
        alone.states |= {name: state} if state else {}
    elif isinstance(kept, ArrayRecord):
        alone.states[name] = unpack(kept)
    answers = alone.ask({name: request})
    if name in answers.failures:
        return answers.failures[name]
    content = reply_content(answers.replies[name])
    if name in alone.states:
        if states is not None and isinstance(number, int):
            states.keep(number if request.do == "train" else began, alone.states[name])
        else:
            context.state[STATE] = pack(alone.states[name])
    return content


def task_for(context: Context, task_of: TaskOf, instead: Mapping[str, Scalar], warm: Warm | None) -> Task:
    """The task, made in this process or held by the site's worker; `instead` are settings the site insists on."""
    by_recipe = task_of is recipe_task

    def cold() -> Task:
        return recipe_task(context, instead) if by_recipe else task_of(context)

    switch = str(context.node_config.get("worker", os.environ.get("MUTIRAO_WORKER", "on"))).lower()
    if warm is None or switch in OFF:
        return cold()
    name, asked, node = name_of(context, lambda _: cold()), dict(context.run_config), dict(context.node_config)
    if by_recipe:
        return warm.task(Order(name, run_config=asked, node_config=node, instead=dict(instead)), cold)
    order = Order(name, named(task_of), str(context.run_id), context.node_id, asked, node)
    return warm.task(order, cold)


def named(task_of: TaskOf) -> str:
    """A function of the site by its dotted path."""
    return f"{task_of.__module__}:{task_of.__qualname__}"


def policy_of(context: Context) -> Policy | None:
    """The policy of this site, from its node's configuration or its environment: never from a message."""
    path = str(context.node_config.get("policy", "")) or os.environ.get("MUTIRAO_POLICY", "")
    if not path:
        return None
    try:
        return load_policy(Path(path).expanduser())
    except ConfigError as error:
        log.error("nothing is answered without a policy: %s", error)
        raise Refused("policy", "the policy of this site cannot be read") from error


def worked_under(
    policy: Policy, message: Message, context: Context, task_of: TaskOf, warm: Warm | None = None
) -> RecordDict | Failure:
    """The same under a policy, which judges the recipe before it is imported and the reply before it leaves.

    A task that the site's own code makes (`task_of`) stands in the policy under that function's dotted path.
    """
    asked = context.run_config
    recipe = str(asked.get("recipe", "quickstart")) if task_of is recipe_task else named(task_of)
    name = str(context.node_config.get("name", ""))
    asker = Asker(str(context.run_id), recipe, name, head_in(message, "request"))
    admit(policy, asker, asked)
    with discreet(policy, asker.facts()):
        task = task_for(context, task_of, policy.settings, warm)
        first = str(asker.server.get("first", ""))
        states = States(policy.audit.parent / "states", first) if first else None
        content = worked(message, context, replace(task, handler=guarded(task.handler, policy, asker)), states)
    if isinstance(content, RecordDict):
        content["audit"] = ConfigRecord(Audit(policy.audit).where())
    return content


def head_in(message: Message, record: str) -> dict[str, Scalar]:
    """Where the other side's audit trail stands, as a message says; empty if it says nothing sound."""
    found = message.content.get(record) if message.has_content() else None
    if not isinstance(found, ConfigRecord):
        return {}
    seq, hashes = found.get("seq"), {k: found.get(k) for k in ("first", "head")}
    if not isinstance(seq, int) or not all(re.fullmatch("[0-9a-f]{64}", str(v)) for v in hashes.values()):
        return {}
    return {"seq": seq, **{k: str(v) for k, v in hashes.items()}}


def name_of(context: Context, task_of: TaskOf) -> ClientId:
    """The name in the node's configuration; in a simulation the client that has the partition's number."""
    if "name" in context.node_config:
        return str(context.node_config["name"])
    if "partition-id" not in context.node_config:
        raise ConfigError("this node has no name; start it with --node-config 'name=\"...\"'")
    names, i = sorted(task_of(context).population), int(context.node_config["partition-id"])
    if not 0 <= i < len(names):
        raise ConfigError(f"partition {i} has no client: the task has {len(names)}")
    return names[i]


def data_of(task: Task, name: ClientId) -> Any:
    """What the client of that name holds."""
    try:
        return task.population[name]
    except KeyError:
        if name in list(task.population):
            raise
        raise ConfigError(f"the task has no client {name!r}{configuration.nearest(name, task.population)}") from None


def recipe_task(context: Context, instead: Mapping[str, Scalar] | None = None) -> Task:
    """The task of the recipe that the run configuration names; a node may say where its own data lie, and more."""
    asked: dict[str, Any] = dict(context.run_config)
    if "data" in context.node_config:  # last of all, so that no setting of the run points a node elsewhere
        asked["set"] = " ".join([str(asked.get("set", "")), shlex.quote(f"data={context.node_config['data']}")])
    return task_from(settings_in(asked, instead))


@functools.lru_cache(maxsize=2)
def task_from(toml: str) -> Task:
    """The task of a full configuration; kept, because Flower's engine gives a process one message after another."""
    recipe, config = recipe_from(toml)
    return find(recipe).prepare(config)


def recipe_from(toml: str) -> tuple[str, Any]:
    """A recipe's name and its configuration, from the text `mutirao.config.dump` writes."""
    table = tomllib.loads(toml)
    name = table.pop("recipe")
    return name, configuration.resolve(find(name).config, table)


def settings_in(run_config: Mapping[str, Scalar], instead: Mapping[str, Scalar] | None = None) -> str:
    """The full configuration that a Flower run asks for: its settings, then those in `set`, then those `instead`."""
    name = str(run_config.get("recipe", "quickstart"))
    plain = sorted((pair for pair in run_config.items() if pair[0] not in OURS), key=lambda pair: "." in pair[0])
    try:
        words = shlex.split(str(run_config.get("set", "")))
    except ValueError as error:
        raise ConfigError(f"set={run_config['set']!r} is not a list of key=value: {error}") from error
    extra = [configuration.parse_assignment(text) for text in words]
    return configuration.dump(
        name, configuration.resolve(find(name).config, {}, [*plain, *extra, *(instead or {}).items()])
    )


def entitled_here() -> Entitled:
    """Who may have which name: on a server made by `mutirao site`, only the site whose key was admitted for it."""
    folder = os.environ.get("MUTIRAO_SITE", "")
    if not folder or not (Path(folder) / "sites").is_dir():
        return lambda name, node: True
    from mutirao.site.processes import entitled

    return functools.partial(entitled, Path(folder))


def server_app() -> ServerApp:
    """A Flower server that runs the recipe the run configuration names and writes its run folder."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from mutirao.running import continued, execute  # late: clients need no run folder
        from mutirao.terminal import Progress

        asked = context.run_config
        recipe, config = recipe_from(toml := settings_in(asked))
        out = Path(str(asked.get("out", "")) or f"runs/{re.sub(r'[^A-Za-z0-9_.]+', '-', recipe)}")
        resume = configuration.typed("resume", asked.get("resume", False), bool)
        timeout = configuration.typed("timeout", asked.get("timeout", 600.0), float, low=1e-9)
        if resume and (out / "config.toml").exists():
            table = {k: v for k, v in tomllib.loads(toml).items() if k != "recipe"}
            recipe, config = continued(recipe, out, configuration.flattened(table))  # refuses other settings
        fleet = FlowerFleet(grid, timeout, entitled=entitled_here())
        execute(recipe, config, out, fleet=fleet, resume=resume, watch=Progress(config.rounds))

    return app


class Simulation:
    """A fleet in Flower's own simulation engine; it starts when it is first needed, and ends with `close`."""

    def __init__(self, recipe: str, config: Any, timeout: float = 86400, cpus: float = 1, gpus: float = 0) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("Flower's simulation needs Ray: install mutirao[flower]")
        self.recipe, self.config, self.timeout, self.cpus, self.gpus = recipe, config, timeout, cpus, gpus
        self._over = threading.Event()
        self._problem: BaseException | None = None
        self._engine: threading.Thread | None = None

    @functools.cached_property
    def fleet(self) -> FlowerFleet:
        """The fleet inside the engine, which runs in a thread: its server does nothing but lend us its grid."""
        fleets: queue.SimpleQueue[FlowerFleet | None] = queue.SimpleQueue()
        app, nodes = ServerApp(), len(find(self.recipe).prepare(self.config).population)
        made: list[FlowerFleet] = []

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            while len(set(grid.get_node_ids())) < nodes and not self._over.wait(0.02):
                pass  # the engine is about to make its nodes
            made.append(FlowerFleet(grid, self.timeout, greet=600.0))  # Ray takes its time to start
            fleets.put(made[0])
            self._over.wait()

        def engine() -> None:
            try:
                run_engine(app, configuration.dump(self.recipe, self.config), nodes, self.cpus, self.gpus)
            except BaseException as error:  # flwr ends a process that it cannot help; here that is only this thread
                self._problem = error
            finally:
                self._over.set()
                fleets.put(None)
                for fleet in made:
                    fleet.close()  # nobody is left to answer

        self._engine = threading.Thread(target=engine, name="flower-engine", daemon=True)
        self._engine.start()
        fleet = fleets.get()
        self._check()
        return cast(FlowerFleet, fleet)

    def clients(self) -> list[ClientId]:
        """The simulated clients."""
        self._check()
        names = self.fleet.clients()
        self._check()  # it may have ended while we waited for names
        return names

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Send each client its request and wait for the answers."""
        return self.fleet.ask(requests)

    def close(self) -> None:
        """End the engine."""
        self._over.set()
        if self._engine is not None:
            self._engine.join(timeout=60)

    def _check(self) -> None:
        if (error := self._problem) is not None:
            while error.__cause__ is not None:  # the engine wraps what happened in two general errors
                error = error.__cause__
            raise MutiraoError(f"Flower's simulation ended: {failure_of(error).reason}") from error


def run_engine(app: ServerApp, toml: str, nodes: int, cpus: float, gpus: float) -> None:
    """Run Flower's simulation engine, silently, until its server app returns."""
    from flwr.simulation import run_simulation

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    settings: Any = {
        "init_args": {"logging_level": "error", "log_to_driver": False},
        "client_resources": {"num_cpus": cpus, "num_gpus": gpus},
    }
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # what matters of it comes as failures and errors
    try:
        run_simulation(app, client_app(lambda _: task_from(toml)), nodes, backend_config=settings)
    finally:
        logger.setLevel(before)


def simulate(
    recipe: str, config: Any, out: Path, resume: bool = False, watch: Any = None, **engine: float
) -> dict[str, Any]:
    """Run a recipe over Flower's simulation engine; `engine` may hold `timeout`, `cpus` and `gpus` (a worker)."""
    from mutirao.running import execute

    with contextlib.closing(Simulation(recipe, config, **engine)) as fleet:
        return execute(recipe, config, out, fleet=fleet, resume=resume, watch=watch)
