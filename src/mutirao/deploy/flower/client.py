"""The Flower client of an institution: it works on its own part of a task, under its own policy if it has one.

Flower keeps the state of a node in memory, for one Flower run. A run of ours may take several Flower runs, and repeat a
round if a reply was lost. So states are stored on disk, by run (identified by the first hash of the server's audit
trail) and by round: they outlive the SuperNode, and a repeated round starts from the same state.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from mutirao.compression import NoCompression
from mutirao.config import coerce
from mutirao.core.agreement import agreed_of, own_digests
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import FLEETING, Failure, Scalar, failure_of
from mutirao.deploy.flower.run_tasks import TaskOf, client_data, client_name, recipe_task
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester, approve, hide_errors
from mutirao.deploy.policy.pins import settings_with_constants
from mutirao.deploy.policy.rules import Policy, assignments, load_policy
from mutirao.deploy.site.launcher import WORKER_OFF
from mutirao.deploy.site.task_stamp import TaskSpec
from mutirao.deploy.site.worker_client import WorkerClient
from mutirao.errors import ConfigError, Damaged, Refused
from mutirao.experiments.party_agreement import require_agreement
from mutirao.experiments.task import Task
from mutirao.flower.compat import flower_reply, flower_request_in, is_flower_message
from mutirao.flower.messages import (
    AGREED_RECORD,
    REFUSED,
    audit_head_in,
    pack,
    pack_together,
    reply_content,
    request_in,
    unpack,
    without_arrays,
)
from mutirao.io import load_arrays, save_arrays
from mutirao.privacy.secure_aggregation import NoSecureAggregation
from mutirao.privacy.secure_aggregation.settings import effective_request
from mutirao.runs.audit_trail import Audit
from mutirao.simulation.local_fleet import LocalFleet

ROUNDS = 5  # latest rounds of a run that are kept
RUNS = 8  # latest runs that are kept


class States:
    """The states of one run at this site, in `folder/<run>`."""

    def __init__(self, folder: Path, run: str) -> None:
        self.top = folder
        self.folder = folder / run[:32]
        self.now = self.folder / "now.safetensors"

    def before(self, do: str, number: int) -> tuple[int, Arrays]:
        """The round and the state with which a request begins.

        Training starts from the state after an earlier round; other requests see the latest state.
        """
        last = number - 1 if do == "train" else number
        for n in sorted(self.rounds(), reverse=True):
            if n <= last:
                try:
                    return n, load_arrays(self.file(n))[0]
                except Damaged as error:
                    log.warning("%s; going back to an earlier state", error)
        if self.rounds() and last > 0:
            log.warning("no state of a round before %d is kept here; beginning with none", number)
        return 0, {}

    def keep(self, number: int, state: Arrays) -> None:
        """Write the state after a round, and remove those of old rounds and runs."""
        # Secrets of the current round are in a file of their own, which goes when they are taken.
        now = {k: v for k, v in state.items() if k.startswith(FLEETING)}
        if now:
            save_arrays(self.now, now, {})
            self.now.chmod(0o600)
        else:
            self.now.unlink(missing_ok=True)
        if number or len(state) > len(now):
            save_arrays(self.file(number), {k: v for k, v in state.items() if k not in now}, {"round": number})
        for old in sorted(self.rounds())[:-ROUNDS]:
            self.file(old).unlink(missing_ok=True)
        runs = sorted((f for f in self.top.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime)
        for folder in runs[:-RUNS]:
            shutil.rmtree(folder, ignore_errors=True)

    def take_fleeting(self) -> Arrays:
        """Take the secrets of the current round's secure sum from disk.

        They are gone until they are saved again: of two concurrent processes only one gets them.
        """
        mine = self.now.with_name(f"taken.{os.getpid()}.safetensors")
        try:
            # Of several processes that rename one file, a single one succeeds.
            self.now.replace(mine)
            return load_arrays(mine)[0]
        except FileNotFoundError:
            return {}
        except Damaged as error:
            log.warning("%s; the sum goes on without this site", error)
            return {}
        finally:
            mine.unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """The rounds with a stored state."""
        found = (re.fullmatch(r"state_(\d+)\.safetensors", f.name) for f in self.folder.glob("state_*"))
        return [int(m[1]) for m in found if m]

    def file(self, number: int) -> Path:
        """The file of the state after a round."""
        return self.folder / f"state_{number:06d}.safetensors"


log = logging.getLogger("mutirao")

STATE = "mutirao.state"  # where Flower's context keeps what a site remembers


def client_app(task_of: TaskOf | None = None, warm: WorkerClient | None = None) -> ClientApp:
    """A Flower client that works on its own part of a task: by default of the recipe the run configuration names.

    It answers our FlowerFleet and Flower's own strategies, each in its own words.
    With `warm` the work is done by the site's resident worker; requests and replies are checked here.

    >>> app = client_app()  # in pyproject.toml: clientapp = "my_package.client:app"
    >>> type(app).__name__
    'ClientApp'
    """
    app = ClientApp()
    task_of = task_of or recipe_task

    def work(message: Message, context: Context) -> Message:
        def make() -> RecordDict | Failure:
            policy = policy_of(context)
            if policy is not None:
                return handle_under_policy(policy, message, context, task_of, warm)
            return handle_message(message, context, task_for(context, task_of, {}, warm))

        return reply_to(message, make)

    def send_name(message: Message, context: Context) -> Message:
        return reply_to(message, lambda: RecordDict({"name": ConfigRecord({"name": client_name(context, task_of)})}))

    for register in (app.train(), app.evaluate(), app.query()):
        register(work)
    app.query("name")(send_name)
    return app


def reply_to(message: Message, make: Callable[[], RecordDict | Failure]) -> Message:
    """The answer, or the error in one line: no traceback leaves a client."""
    try:
        made = make()
    except Exception as error:
        made = failure_of(error)
    if isinstance(made, RecordDict):
        return Message(made, reply_to=message)
    log.warning("a request failed: %s", made)
    code = REFUSED if made.kind == "refused" else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return Message(Error(code, made.reason), reply_to=message)


def handle_message(
    message: Message, context: Context, task: Task, states: States | None = None
) -> RecordDict | Failure:
    """The reply of the task's handler; the site's state stays on its disk (`states`) or in Flower's context."""
    name = client_name(context, lambda _: task)
    kept = context.state.get(STATE)
    stock = is_flower_message(message)
    check_stock(stock, task)
    request = flower_request_in(message, seed_in(context)) if stock else request_in(message)
    # Flower keeps the message in memory until the end, with a copy of the model.
    without_arrays(message)
    number = request.config.get("round")
    began = 0
    do = effective_request(request)
    handler = task.worker
    # A fleet of one client, so that results equal those in process; batching would only pay off for several.
    data = client_data(task, name)
    alone = LocalFleet(lambda request, site: handler(request, site), {name: data}, copies=False)
    if states is not None and isinstance(number, int):
        began, state = states.before(do, number)
        state |= states.take_fleeting()
        if state:
            alone.states[name] = state
    elif isinstance(kept, ArrayRecord):
        alone.states[name] = unpack(kept)
    answers = alone.ask({name: request})
    request = replace(request, arrays={})  # frees the model; the extras are still needed
    if name in answers.failures:
        return answers.failures[name]
    reply = answers.replies[name]
    content = flower_reply(reply, request) if stock else reply_content(reply)
    if found := own_digests({**task.basis(), **task.agreed, **agreed_of(data)}, request):
        content[AGREED_RECORD] = ConfigRecord({**found})
    if name in alone.states:
        if states is not None and isinstance(number, int):
            # Only training begins a new state; after other requests it still is that of the round they began with.
            if do != "train":
                number = began
            states.keep(number, alone.states[name])
        else:
            context.state[STATE] = pack_together(alone.states[name])
    return content


def check_stock(stock: bool, task: Task) -> None:
    """Refuse to compress for a strategy of Flower's own, which would take the encoding for a model."""
    if stock and not isinstance(task.compress, NoCompression):
        raise Refused("compress", "a strategy of Flower's own takes whole updates; use none")


def seed_in(context: Context) -> int:
    """The seed of a run with a strategy of Flower's own, which sends none: from the run configuration, or 0."""
    return coerce("seed", context.run_config.get("seed", 0), int, low=0)  # type: ignore[no-any-return]


def handle_under_policy(
    policy: Policy, message: Message, context: Context, task_of: TaskOf, warm: WorkerClient | None = None
) -> RecordDict | Failure:
    """Handle a message under a policy, which checks the recipe before it is imported and the reply before it leaves.

    A task that the site's own code makes (`task_of`) stands in the policy under that function's dotted path.
    """
    asked = context.run_config
    by_recipe = task_of is recipe_task
    recipe = dotted_path(task_of)
    if by_recipe:
        recipe = str(asked.get("recipe", "quickstart"))
    name = str(context.node_config.get("name", ""))
    asker = Requester(str(context.run_id), recipe, name, audit_head_in(message, "request"))

    def settle() -> Mapping[str, Scalar]:
        return settings_with_constants(recipe, [*assignments(asked), *policy.settings.items()])

    asker = approve(policy, asker, asked, settle if by_recipe else None)
    with hide_errors(policy, asker.facts()):
        task = task_for(context, task_of, policy.settings, warm)
        check_stock(is_flower_message(message), task)
        first = str(asker.server.get("first", ""))
        states = States(policy.audit.parent / "states", first) if first else None
        # The policy checks plain arrays: its handler encrypts and compresses afterwards, in place of the task.
        handler = PolicyHandler(task.handler, policy, asker, task.secure, task.compress)
        content = handle_message(
            message,
            context,
            replace(task, handler=handler, secure=NoSecureAggregation(), compress=NoCompression()),
            states,
        )
    if isinstance(content, RecordDict):
        content["audit"] = ConfigRecord(Audit(policy.audit).where())
    return content


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


def task_for(context: Context, task_of: TaskOf, instead: Mapping[str, Scalar], warm: WorkerClient | None) -> Task:
    """The task, made in this process or held by the site's worker; `instead` are settings the site insists on."""
    by_recipe = task_of is recipe_task

    def cold() -> Task:
        return require_agreement(recipe_task(context, instead) if by_recipe else task_of(context))

    switch = str(context.node_config.get("worker", os.environ.get("MUTIRAO_WORKER", "on"))).lower()
    if warm is None or switch in WORKER_OFF:
        return cold()
    name = client_name(context, lambda _: cold())
    asked = dict(context.run_config)
    node = dict(context.node_config)
    if by_recipe:
        return warm.task(TaskSpec(name, run_config=asked, node_config=node, instead=dict(instead)), cold)
    order = TaskSpec(name, dotted_path(task_of), str(context.run_id), context.node_id, asked, node)
    return warm.task(order, cold)


def initial_arrays(context: Context) -> ArrayRecord:
    """The first model of the recipe that the run configuration names, for a Strategy of Flower's own to begin with.

    >>> from flwr.app import Context, RecordDict
    >>> context = Context(0, 0, {}, RecordDict(), {"recipe": "quickstart"})
    >>> list(initial_arrays(context))
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    return pack(recipe_task(context).initial())


def dotted_path(task_of: TaskOf) -> str:
    """A function of the site by its dotted path."""
    return f"{task_of.__module__}:{task_of.__qualname__}"
