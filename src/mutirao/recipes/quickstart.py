"""Handwritten digits on fifty clients that hold different digits: the whole idea in under a minute."""

from dataclasses import dataclass

from mutirao.config import Common, Part, build, setting
from mutirao.datasets import digits
from mutirao.errors import ConfigError
from mutirao.partition import deal_tests, describe
from mutirao.randomness import number, rng
from mutirao.recipes.exhibits import Exhibits, partition_of
from mutirao.recipes.task import Recipe, Task


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the quickstart."""

    rounds: int = setting(40, "how many rounds", low=1)
    lr: float = setting(0.3, "learning rate of the clients", low=1e-12)
    epochs: int = setting(5, "passes over its data a client makes a round", low=1)
    batch_size: int = setting(16, "samples a step", low=1)
    data: str = setting("digits", "scikit-learn's handwritten digits, which are embedded")
    partition: Part = setting(Part("dirichlet", {"alpha": 0.3}), "how samples are dealt to clients")
    hidden: int = setting(64, "width of the hidden layer", low=1)


def task(config: Config) -> Task:
    """Digits dealt to the clients with skewed labels, a fifth of them kept as the common test set."""
    if config.data != "digits":
        raise ConfigError(f"data: the quickstart knows only 'digits', not {config.data!r}")
    from mutirao.images.networks import mlp  # late: a mistyped setting is told without torch
    from mutirao.training.samples import Samples, pool_clients, virtual_clients
    from mutirao.training.trainer import Trainer

    x, y, x_test, y_test = digits.read_digits(config.seed)
    test = Samples(x_test, y_test)

    parts = build("partition", config.partition)(y, clients=config.clients, rng=rng(config.seed, 0, "partition"))
    own = deal_tests(y, parts, y_test, config.seed)
    clients = virtual_clients(x, y, parts, config.samples, number(config.seed, 0, "samples"), test, own)
    trainer = Trainer.of(config, lambda: mlp(width=config.hidden))

    return Task(
        handler=trainer,
        population=pool_clients(clients) if config.centralised else clients,
        initial=lambda: trainer.initial(config.seed),
        evaluate=lambda arrays: trainer.evaluate(arrays, test),
        metrics=("accuracy", "loss"),
        exhibits=Exhibits() if config.centralised else partition_of(lambda: describe(y, parts)),
        classes=10,
    )


recipe = Recipe(Config, task)
