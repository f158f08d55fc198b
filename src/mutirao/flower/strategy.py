"""Our aggregators, selectors and filters as one of Flower's strategies: an existing Flower app changes one line.

The round is ours, cut in two at the place where Flower sends the messages: `configure_train` selects, `aggregate_train`
checks, filters and merges. Clients are known by the numbers of their nodes.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log as flower_log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from mutirao.config import Part, build, complete_part
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Fleet, collect
from mutirao.core.group import (
    Group,
    Run,
    aggregate,
    check_answers,
    client_figures,
    select_clients,
    store_vectors,
)
from mutirao.core.needs import USUAL
from mutirao.core.parts import AnyAggregator, AnyFilter, AnySelector
from mutirao.core.roster import Roster
from mutirao.core.rounds import Patience, client_rows, mean_metrics, round_failure, wait_for_clients
from mutirao.core.validation import SIZE_CAP, fault_of_extras, faults, set_aside, sift
from mutirao.errors import ConfigError, Diverged
from mutirao.flower.compat import COUNT, ERRORS, ROUND, config_for, errors_in, flower_reply_in
from mutirao.flower.messages import MalformedError, pack, unpack
from mutirao.selection import Uniform

log = logging.getLogger("mutirao")

Errors = Callable[[Arrays], npt.ArrayLike]  # the squared error of each sample of the server's, by a client's model
KINDS = {"aggregate": "aggregator", "select": "selector", "screen": "filter"}


@dataclass(frozen=True)
class NodeFraction:
    """A share of those present, but so many at least, each as likely as any other: as Flower's FedAvg selects."""

    share: float
    least: int

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        """The clients selected."""
        here = len(roster.here())
        return Uniform(min(here, max(int(here * self.share), self.least, 1)))(roster, round, rng)


class Nodes(Fleet):
    """The nodes of a grid by their ids: Flower has no names for them."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def clients(self) -> list[ClientId]:
        """The numbers of the nodes that are connected."""
        return sorted(map(str, set(self.grid.get_node_ids())))


class Strategy(FlowerStrategy):
    """A Flower strategy made of our parts, each an object or its name: `Strategy("fedadam")`, `Strategy(FedAdam(0.1))`.

    `select` says who trains (by name: `min_train_nodes` clients; None: a share `fraction_train` of those connected,
    sampled evenly, and so many at least), `filters` which replies are left out. `errors` gives the squared errors of a
    client's model on samples of the server's, for methods that need `squared_errors` and clients that send none. Every
    reply is checked: what is broken, not finite or too large is left out and named in the log. A round with too few
    usable replies keeps the model; the third such round in a row ends the run. The other settings are those of
    Flower's FedAvg.

    >>> strategy = Strategy("fedrisk", select="aoiu", min_train_nodes=2)
    >>> sorted(strategy.wanted)  # what each client's reply must hold besides its model
    ['entropy', 'squared_errors']
    """

    def __init__(
        self,
        aggregate: str | AnyAggregator = "fedavg",
        *,
        select: str | AnySelector | None = None,
        filters: Sequence[str | AnyFilter] = (),
        errors: Errors | None = None,
        seed: int = 0,
        size_cap: float = SIZE_CAP,
        min_replies: int | None = None,
        wait: float = 3600.0,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = COUNT,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        for name, share in {"fraction_train": fraction_train, "fraction_evaluate": fraction_evaluate}.items():
            if not 0 <= share <= 1:
                raise ConfigError(f"{name} is {share!r}, but must be from 0 to 1")
        selector: AnySelector = NodeFraction(fraction_train, min_train_nodes)
        if select is not None:
            selector = make_part("select", select, count=min_train_nodes)
        self.group = Group(
            selector,
            make_part("aggregate", aggregate),
            filters=[make_part("screen", one) for one in filters],
            size_cap=size_cap,
        )
        if asked := sorted(self.group.needs.probes):
            right = "take one that does not, or a FlowerFleet with client_app"
            raise ConfigError(
                f"{self.group.select!r} requests {asked[0]!r} before it selects, which Flower's own apps "
                f"cannot answer; {right}"
            )
        if "staleness" in self.group.needs.server:
            right = "take a FlowerFleet with server_app and client_app"
            raise ConfigError(f"{self.group.aggregate!r} does not wait for all, as Flower's strategies do; {right}")
        self.errors = errors
        self.seed = seed
        self.patience = Patience(min_replies, wait=wait)
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_train_nodes = min_train_nodes
        self.min_evaluate_nodes = min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.count_key = weighted_by_key
        self.keys = (arrayrecord_key, configrecord_key)
        self.chosen: list[ClientId] = []
        self.evaluating: list[ClientId] = []
        self.run = Run({}, seed)
        self.lost = 0

    @property
    def wanted(self) -> set[str]:
        """What each reply must hold besides a model and the number of samples."""
        needs = self.group.needs
        needed = {*needs.metrics, *needs.extras}
        if self.errors:
            return needed - {ERRORS}
        return needed

    def summary(self) -> None:
        """Log what the strategy is made of."""
        flower_log(INFO, "\t├──> Aggregate: %r", self.group.aggregate)
        flower_log(INFO, "\t├──> Select: %r", self.group.select)
        flower_log(INFO, "\t├──> Filters: %r", self.group.filters)
        flower_log(INFO, "\t└──> Asked of each reply: %s", ", ".join([self.count_key, *sorted(self.wanted)]))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Select the clients of a round and write to them."""
        if self.fraction_train == 0:
            return []
        if server_round == 1:
            self.run = Run({}, self.seed)
            self.lost = 0
        run = self.run
        run.arrays = model_in(arrays)
        run.round = server_round - 1
        wait_for_clients(run.roster, Nodes(grid), max(1, self.min_available_nodes, self.min_train_nodes), self.patience)
        self.chosen = select_clients(run, self.group, 1)
        run.roster.sent(server_round, self.chosen)
        # After the app's own settings, which must not change what the parts need.
        method = config_for({"round": server_round, **self.group.needs.request_config()})
        asked: dict[str, Any] = {}
        if wanted := sorted(self.wanted - USUAL):
            asked["extras"] = ",".join(wanted)
        settings = {"seed": self.seed, **config, **method, **asked}
        return self.write(arrays, ConfigRecord(settings), self.chosen, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check, screen and merge the replies of a round; no model if too few of them can be used."""
        if not self.chosen:
            return None, None
        run = self.run
        cohort = self.group
        answers = self.read(self.chosen, replies, self.wanted)
        self.refuse_if_no_client_sends(answers)
        # Broken models are set aside first: `errors` is the user's code, and expects whole ones.
        if self.errors is not None:
            answers = with_errors(set_aside(answers, faults(run.arrays, answers.replies)), self.errors)
        result = check_answers(run, cohort, 1, self.chosen, answers, self.patience.min_replies)
        rows = client_rows(run, result, is_single=True)  # this also logs clients without a usable reply
        if not result.is_enough:
            run.roster.mark(server_round, result.selected, {})
            self.lost += 1
            why = round_failure(server_round, Patience(tries=self.lost), [result], rows)
            if self.lost >= self.patience.tries or isinstance(why, Diverged):
                raise why
            log.warning("round %d: the model stays as it is: %s", server_round, why)
            return None, None
        # A copy: if the merge fails, the run keeps the memory of the last round.
        memory = dict(run.memory)
        merged = aggregate(run, result, memory)
        found = client_figures(run, result, merged)
        run.roster.mark(server_round, result.selected, {c: r.n for c, r in result.replies.items()})
        for client, figures in found.items():
            run.roster.hear(server_round, client, figures)
        store_vectors(run, result)
        run.arrays = merged.arrays
        run.memory = memory
        run.round = server_round
        self.lost = 0
        return pack(merged.arrays), MetricRecord({**mean_metrics(result.replies)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask a share of the clients how good the model is."""
        if self.fraction_evaluate == 0:
            return []
        wait_for_clients(
            self.run.roster, Nodes(grid), max(1, self.min_available_nodes, self.min_evaluate_nodes), self.patience
        )
        ask = NodeFraction(self.fraction_evaluate, self.min_evaluate_nodes)
        self.evaluating = ask(self.run.roster, server_round, self.run.rng("evaluate"))
        return self.write(arrays, ConfigRecord({**config, ROUND: server_round}), self.evaluating, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """What the clients say, weighted by their samples."""
        if self.fraction_evaluate == 0:
            return None
        answers = sift(self.read(self.evaluating, replies, ()), fault_of_extras)
        for client, why in answers.failures.items():
            log.warning("round %d: %s does not evaluate: %s", server_round, client, why)
        if answers.replies:
            return MetricRecord({**mean_metrics(answers.replies)})
        return None

    def write(self, arrays: ArrayRecord, config: ConfigRecord, clients: Iterable[ClientId], kind: str) -> list[Message]:
        """The same message to each of these clients."""
        content = RecordDict({self.keys[0]: arrays, self.keys[1]: config})
        return [Message(content, int(client), kind) for client in clients]

    def read(self, asked: Iterable[ClientId], replies: Iterable[Message], wanted: Collection[str]) -> Answers:
        """The answers of those who were asked."""
        nodes = [(message, message.metadata.src_node_id) for message in replies]
        return collect(asked, ((str(n), flower_reply_in(m, n, wanted, self.count_key)) for m, n in nodes))

    def refuse_if_no_client_sends(self, answers: Answers) -> None:
        """ConfigError if no client sends what a part needs: then it is the app that does not fit, and no client."""
        lacking = [why for why in answers.failures.values() if why.kind == "missing_key"]
        if answers.replies or not lacking or not self.wanted:
            return
        part = next(p for p in self.group.parts if p.needs.metrics or p.needs.extras)
        also = ""
        if ERRORS in self.wanted:
            also = ", or give the strategy errors="
        raise ConfigError(
            f"{part!r} needs {', '.join(sorted(self.wanted))} from the clients, who send none: "
            f"add it to the MetricRecord of the ClientApp{also}"
        )


def make_part(kind: str, given: Any, **offers: Any) -> Any:
    """A part by its name, with settings that it takes if it has them, or the part itself."""
    if not isinstance(given, str):
        if not callable(given):
            raise ConfigError(f"{given!r} is neither {KINDS[kind]} nor the name of one")
        return given
    return build(kind, complete_part(kind, Part(given)), **offers)


def model_in(arrays: ArrayRecord) -> Arrays:
    """The model that an app begins with."""
    try:
        return unpack(arrays)
    except MalformedError as error:
        raise ConfigError(f"initial_arrays: {error}") from error


def with_errors(answers: Answers, errors: Errors) -> Answers:
    """The replies with the errors that their models make on the server's samples."""
    try:
        found = {c: errors_in({ERRORS: np.asarray(errors(r.arrays))}) for c, r in answers.replies.items()}
    except MalformedError as error:
        raise ConfigError(f"errors: {error}") from error
    return replace(answers, replies={c: replace(r, extras=r.extras | found[c]) for c, r in answers.replies.items()})


def errors_on(module: Any, batches: Iterable[Any]) -> Errors:
    """For `errors=`: (predicted class - class)^2 of each sample in `batches`, by the torch `module` with those arrays.

    A batch is a pair of inputs and classes, or a dict with the inputs first and the classes last.

    >>> import torch
    >>> module = torch.nn.Linear(1, 2, bias=False)
    >>> errors = errors_on(module, [(torch.tensor([[1.0], [1.0]]), torch.tensor([0, 1]))])
    >>> errors({"weight": np.array([[0.0], [1.0]], np.float32)})  # it says class 1 of both samples
    array([1, 0])
    """
    import torch

    def errors(arrays: Arrays) -> npt.ArrayLike:
        state = {k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}
        module.load_state_dict(state)
        module.eval()
        found = []
        with torch.no_grad():
            for batch in batches:
                x, *_, y = batch.values() if isinstance(batch, Mapping) else batch
                found.append((module(x).argmax(-1) - y).square())
        return torch.cat(found).numpy()

    return errors
