"""Federated online learning to rank: users search, click, and share a ranker that learns from the clicks (FPDGD)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from mutirao.config import Common, Part, setting
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Round, Run
from mutirao.datasets.labelled import digest_of_set
from mutirao.errors import ConfigError
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.metrics import mrr, ndcg
from mutirao.privacy import build_privacy
from mutirao.selection import how_many
from mutirao.systems.ranking.online.click_models import NAMES
from mutirao.systems.ranking.online.fpdgd_noise import Shares
from mutirao.systems.ranking.online.interaction_totals import add_up
from mutirao.systems.ranking.online.online_sources import load_users
from mutirao.systems.ranking.online.rankers import make_ranker
from mutirao.systems.ranking.online.users import Searching
from mutirao.training.lr_schedules import schedule_of

CUT = 10
# Settings of training on samples, of which there are none.
UNUSED = ("epochs", "batch_size", "momentum", "weight_decay", "optimizer", "clip", "samples", "device", "precision")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of online learning to rank; the defaults are FPDGD's, but for the number of users and of rounds."""

    rounds: int = setting(100, "how many rounds", low=1)
    clients: int = setting(100, "how many users (0: of a log, all)", low=0)
    per_round: int | float = setting(1.0, "users that take part in a round: a count, or a share", low=1e-9)
    lr: float = setting(0.1, "learning rate of the users", low=1e-12)
    data: str = setting(
        "generated", "'generated', a folder or file as `ranking` takes them, or a log as AOL4FOLTR has it"
    )
    fold: int = setting(0, "which of the five folds (0: the one that data names, or else the first)", low=0, high=5)
    qrels: str = setting("", "judgements in place of the file's grades: a TREC qrels file, or irds:NAME")
    queries: int = setting(400, "queries of generated data, all five parts together", low=50)
    scale: str = setting("query", "features brought to 0 .. 1 in each query, or as they are", choices=("query", "none"))
    partition: Part = setting(
        Part("shared", home="mutirao.systems.ranking.online.shown_lists"), "which queries a user may ask"
    )
    clicks: str = setting("perfect", "how users click: by grades, or as a log says", choices=NAMES)
    noise: float = setting(0.0, "how far click probabilities are moved towards a half, 0 to 1", low=0, high=1)
    interactions: int = setting(4, "queries of a user in a round", low=1)
    shown: int = setting(10, "documents that a user is shown", low=1, high=1000)
    hidden: int = setting(0, "hidden units of the ranker (0: it is linear)", low=0)
    discount: float = setting(0.9995, "discount of what users see, by round", low=1e-9, high=1)
    judge_by: str = setting("test", "which part judges the model", choices=("test", "vali"))
    privacy: Part = setting(
        Part("none", home="mutirao.systems.ranking.online.fpdgd_noise"), "differential privacy, or FPDGD's own"
    )


def task(config: Config) -> Task:
    """Users as clients; the ranker is judged by queries that nobody has asked."""
    for key in UNUSED:
        if getattr(config, key) != Config.__dataclass_fields__[key].default:
            raise ConfigError(f"{key}: a user takes one step a query here, at the rate lr; leave it as it is")
    users, judged = load_users(config)
    lists = next(iter(users.values())).lists
    ranker = make_ranker(judged.features, config.hidden)
    together = how_many(config.per_round, config.clients if config.centralised else len(users))
    each = config.interactions * (together if config.centralised else 1)  # as many interactions a round as users have
    shares = build_privacy(config)
    own = shares if isinstance(shares, Shares) else None
    handler = Searching(ranker, config.lr, each, config.shown, schedule_of(config), together, own)

    def evaluate(arrays: Arrays) -> dict[str, float]:
        scores = np.nan_to_num(ranker.score(arrays, judged.x.astype(np.float64)))
        of = scores, judged.grades, judged.queries, CUT
        return {f"ndcg@{CUT}": ndcg(*of), f"mrr@{CUT}": mrr(*of)}

    return Task(
        handler=handler,
        population=users,
        initial=lambda: ranker.initial(config.seed),
        evaluate=evaluate,
        judge=f"ndcg@{CUT}",
        metrics=(f"ndcg@{CUT}", f"mrr@{CUT}", "online_ndcg", "regret"),  # the latter two are added by the flow
        directions={"online_ndcg": "higher", "regret": "lower", "shown_ndcg": "higher", "shown_loss": "lower"},
        knows=each,
        basis=cache(lambda: {"features": digest_of_set([config.scale], lists.x, lists.grades)}),
    )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """The ordinary flow; what users saw is added up by interactions."""
    for done in federate(fleet, config, task, run):
        add_up(run, done, task.knows, config.discount)
        yield done


recipe = Recipe(Config, task, flow, heeds=frozenset({"privacy", "secure", "compress"}))
