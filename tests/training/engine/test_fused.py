"""The kernel for dense networks: what it takes, what it leaves to others, and that it does what torch does."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mutirao.core.arrays import Arrays, digest, flat
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.training.engine import dropout, fused
from mutirao.training.engine.dispatch import train_many
from mutirao.training.engine.jobs import plan_jobs
from mutirao.training.engine.tracer import Unsupported
from mutirao.training.optimizers import seeded
from mutirao.training.samples import VirtualClients, virtual_clients
from mutirao.training.trainer import Trainer

FEATURES, CLASSES = 12, 4
here = pytest.mark.usefixtures("kernel")


@pytest.fixture
def kernel() -> None:
    assert fused.kernel is not None, "install the package where a C compiler is at hand"


class Written(nn.Module):
    """The usual network, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, CLASSES, bias=False)
        self.first = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.first(x.view(x.size(0), -1))))


class Skipping(Written):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden + x[:, :8])


class Hooked(Written):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, args, output: 2 * output)


class Branching(Written):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean() > -100 else -x)


class Dropping(Written):
    """Dropout written as a function."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, training=False)
        hidden = functional.dropout(self.first(x), p=0.3, training=self.training)
        return self.last(hidden.relu())


class Noisy(Written):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(FEATURES))


def dropping(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.ReLU(), *layers, nn.Linear(40, CLASSES))


DROPOUT: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: dropping(nn.Dropout(0.4)),
    "dropout as a function": Dropping,
    "dropout of inputs": lambda: nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Flatten(), *dropping(nn.Dropout(0.5))),
    "dropout in several places": lambda: nn.Sequential(
        nn.Linear(FEATURES, 33), nn.ReLU(), nn.Dropout(0.1), nn.Linear(33, 17), nn.Dropout(0.7), nn.ReLU(),
        nn.Linear(17, CLASSES),
    ),
    "dropout of nothing": lambda: dropping(nn.Dropout(0), nn.Dropout(0.2)),
    "dropout of all": lambda: nn.Sequential(nn.Dropout(0.1), *dropping(nn.Dropout(1.0))),
}  # fmt: skip
FITS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(FEATURES, CLASSES),
    "as written": Written,
    "in place": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)),
    "nested": lambda: nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(FEATURES, 33), nn.ReLU(), nn.Identity()), nn.Linear(33, 17), nn.ReLU(),
        nn.Linear(17, CLASSES),
    ),
    **DROPOUT,
}  # fmt: skip
SHARED = nn.Linear(8, 8)
DOES_NOT: dict[str, Callable[[], nn.Module]] = {
    "dropout last": lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.1)),
    "dropout twice": lambda: dropping(nn.Dropout(0.1), nn.Dropout(0.1)),
    "alpha dropout": lambda: dropping(nn.AlphaDropout(0.1)),
    "dropout of features": lambda: dropping(nn.Dropout1d(0.1)),
    "noise": Noisy,
    "tanh": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "no relu": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)),
    "relu last": lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.ReLU()),
    "norm": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES)),
    "twice": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), SHARED, nn.ReLU(), SHARED),
    "frozen": lambda: nn.Sequential(nn.Linear(FEATURES, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, CLASSES)),
    "double": lambda: nn.Linear(FEATURES, CLASSES).double(),
    "skipping": Skipping,
    "hooked": Hooked,
    "branching": Branching,
}
SIZES = [33, 5, 1, 16, 40]


def population(sizes: list[int], features: int = FEATURES, classes: int = CLASSES) -> VirtualClients:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(sum(sizes), features)).astype(np.float32)
    y = (x @ draw.normal(size=(features, classes))).argmax(1)
    return virtual_clients(x, y, np.split(draw.permutation(sum(sizes)), np.cumsum(sizes)[:-1]))


def answers(trainer: Trainer, clients: Any, arrays: Arrays | None = None, **config: Any) -> dict[str, Any]:
    arrays = arrays or trainer.initial(0)
    requests = {c: Request("train", arrays, {"seed": 3, "round": 1, **config}) for c in clients}
    return dict(train_many(trainer, requests, {c: Site(c, clients[c]) for c in clients}))


def assert_same(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours.keys() == plain.keys()
    for client, reply in plain.items():
        mine = ours[client]
        assert isinstance(mine, Reply), mine
        assert list(mine.arrays) == list(reply.arrays)
        assert np.linalg.norm(flat(mine.arrays) - flat(reply.arrays)) <= 1e-5 * np.linalg.norm(flat(reply.arrays))
        assert mine.metrics == pytest.approx(reply.metrics, rel=1e-4)
        assert mine.n == reply.n
        assert {k: v.tolist() for k, v in mine.extras.items()} == {k: v.tolist() for k, v in reply.extras.items()}


@here
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"mu": 0.4}, {"batch_size": 1}, {"lr": 1e-5}]
)
@pytest.mark.parametrize("model", FITS)
def test_the_same_models_metrics_and_extras_as_the_plain_path(model: str, options: dict[str, Any]) -> None:
    made = []
    for engine in ("fused", "plain"):
        trainer = Trainer(FITS[model], **{"lr": 0.1, "batch_size": 8, "epochs": 3, **options}, engine=engine)
        made.append(answers(trainer, population(SIZES), extras="squared_errors,entropy"))
    assert_same(*made)
    assert fused.verified_layers(trainer, population(SIZES)["c0"].kind)


@here
@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 70), min_size=2, max_size=5),
    batch=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
def test_any_widths(widths: list[int], batch: int, sizes: list[int]) -> None:
    def model() -> nn.Module:
        pairs = list(itertools.pairwise(widths))
        layers = [layer for i, o in pairs for layer in (nn.ReLU(), nn.Linear(i, o))]
        return nn.Sequential(*layers[1:])

    clients = population(sizes, widths[0], widths[-1])
    made = [answers(Trainer(model, batch_size=batch, lr=0.05, engine=e), clients) for e in ("fused", "plain")]
    assert_same(*made)


def jobs_of(trainer: Trainer, clients: Any) -> list[Any]:
    arrays = trainer.initial(0)
    requests = {c: Request("train", arrays, {"seed": 3, "round": 1}) for c in clients}
    return plan_jobs(trainer, requests, {c: Site(c, clients[c]) for c in clients})[0]


@here
@pytest.mark.parametrize("model", DOES_NOT)
def test_other_models_are_left_to_others(model: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(DOES_NOT[model], engine="fused", batch_size=8)
    with pytest.raises(Unsupported):
        fused.train_fused(trainer, jobs_of(trainer, population(SIZES)))
    if model not in ("twice", "double"):
        plain = answers(Trainer(DOES_NOT[model], engine="plain", batch_size=8), population(SIZES))
        with caplog.at_level(logging.WARNING):
            assert_same(answers(trainer, population(SIZES)), plain)
            answers(trainer, population(SIZES))
        assert caplog.text.count("the kernel cannot train this model") == 1


@pytest.mark.parametrize(
    "options", [{"optimizer": "adam"}, {"clip": 1.0}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}]
)
def test_other_settings_are_left_to_others(options: dict[str, Any]) -> None:
    trainer = Trainer(Written, **options)
    with pytest.raises(Unsupported):
        fused.train_fused(trainer, jobs_of(trainer, population(SIZES)))


def test_without_the_kernel_the_stacked_way_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "kernel", None)
    sizes = [30] * 20
    plain = answers(Trainer(Written, batch_size=8, engine="plain"), population(sizes))
    assert_same(answers(Trainer(Written, batch_size=8), population(sizes)), plain)


@here
@pytest.mark.parametrize("model", ["as written", "dropout of inputs"])
def test_no_bit_depends_on_the_workers_or_on_the_other_clients(model: str) -> None:
    clients = population([50, 3, 47, 1] * 5)
    made = [answers(Trainer(FITS[model], batch_size=8, workers=w, engine="fused"), clients) for w in (1, 2, 5)]
    for client in clients:
        x, y = clients[client].batch(np.arange(len(clients[client])))
        alone = [answers(Trainer(FITS[model], batch_size=8, engine="fused"), {client: (x, y)})[client]]
        alone += [answers(Trainer(FITS[model], batch_size=8, engine="fused"), {client: (x.T.clone().T, y)})[client]]
        assert len({digest(reply.arrays) for reply in [*alone, *(replies[client] for replies in made)]}) == 1


@here
@pytest.mark.parametrize("model", DROPOUT)
def test_dropout_leaves_out_the_same_numbers_as_torch_round_by_round(model: str) -> None:
    made = []
    for engine in ("fused", "plain", "threads"):
        trainer = Trainer(FITS[model], lr=0.1, batch_size=16, epochs=2, engine=engine)
        arrays = trainer.initial(0)
        for round in range(4):
            replies = answers(trainer, population(SIZES), arrays, round=round)
            arrays = {n: np.mean([r.arrays[n] for r in replies.values()], axis=0) for n in arrays}
        made.append(flat(arrays))
    for other in made[1:]:
        assert np.linalg.norm(made[0] - other) <= 1e-4 * np.linalg.norm(other)


@here
def test_masks_drawn_by_torch_are_those_drawn_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for drawn_here in (True, False):
        monkeypatch.setattr(dropout, "draws_like_torch", lambda drawn_here=drawn_here: drawn_here)
        trainer = Trainer(FITS["dropout of inputs"], batch_size=16, epochs=2, engine="fused")
        made.append({c: digest(reply.arrays) for c, reply in answers(trainer, population(SIZES)).items()})
    assert made[0] == made[1] or not dropout.draws_like_torch.__wrapped__()


@pytest.mark.parametrize(("width", "dropped"), [(512, 0.2), (1, 0.5), (37, 0.9), (16, 1e-3)])
def test_masks_are_those_of_torch(width: int, dropped: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "draws_like_torch", lambda: False)
    layers, layer = [(5, 0.0), (width, dropped), (3, 1.0), (7, 0.3)], nn.Dropout(dropped)
    (unused, (_, first), (kept, none), (_, other)), draw = dropout.kernel_masks(layers, 32, seed=2**62 + 5)
    assert (unused, kept) == (None, 0)
    with seeded(2**62 + 5):
        for length in (32, 32, 1, 24, 32, 17):
            draw(length)
            np.testing.assert_array_equal(first[:length], layer(torch.ones(length, width)) > 0)
            np.testing.assert_array_equal(other[:length], nn.Dropout(0.3)(torch.ones(length, 7)) > 0)
            assert not none.any()


@here
@pytest.mark.parametrize("labels", [[0], [CLASSES - 1] * 9, [99] * 50])
def test_whether_a_model_fits_does_not_depend_on_the_clients(labels: list[int]) -> None:
    trainer = Trainer(Written, engine="fused", batch_size=8)
    x, y = np.zeros((len(labels), FEATURES), np.float32), np.array(labels)
    replies = fused.train_fused(trainer, jobs_of(trainer, {"ana": (x, y)}))
    assert list(replies) == (["ana"] if max(labels) < CLASSES else [])
    assert not fused.fits_kernel(trainer, jobs_of(trainer, {"ana": (x[:, :5], y)}))
    broken = Trainer(lambda: dropping(nn.Dropout(0.1, inplace=True)))  # what ReLU needs to go back is overwritten
    assert not fused.fits_kernel(broken, jobs_of(broken, {"ana": (x, y)}))


@here
def test_a_client_with_wrong_data_fails_alone() -> None:
    clients: dict[str, Any] = {c: s.batch(np.arange(len(s))) for c, s in population([20] * 4).items()}
    clients["c1"][1][3] = 99
    clients["c2"] = (clients["c2"][0][:, :5], clients["c2"][1])
    made = answers(Trainer(Written, batch_size=8, engine="fused"), clients)
    assert [isinstance(made[c], Failure) for c in sorted(clients)] == [False, True, True, False]


@here
def test_the_kernel_checks_what_it_is_given() -> None:
    weight, bias = np.zeros((3, 2), np.float32), np.zeros(3, np.float32)
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    rows, lengths, rates = np.arange(4), np.array([4]), (0.1, 0.0, 0.0, 0.0, None)
    rest = (*rates, None, None)
    assert fused.kernel is not None
    fused.kernel([weight, bias], x, y, rows, lengths, *rest)
    for wrong in (
        ([weight], x, y, rows, lengths),
        ([weight, bias[:2]], x, y, rows, lengths),
        ([weight.astype(np.float64), bias], x, y, rows, lengths),
        ([weight, bias, weight, bias], x, y, rows, lengths),
        ([weight[0], bias], x, y, rows, lengths),
        ([weight, bias], x.astype(np.float64), y, rows, lengths),
        ([weight, bias], x, y[:3], rows, lengths),
        ([weight, bias], x, y + 3, rows, lengths),
        ([weight, bias], x, y - 1, rows, lengths),
        ([weight, bias], x, y, rows + 1, lengths),
        ([weight, bias], x, y, rows - 1, lengths),
        ([weight, bias], x, y, rows[:3], lengths),
        ([weight, bias], x, y, rows, np.array([2, 0, 2])),
        ([weight, bias], x, y, rows, np.array([-1, 5])),
        ([weight, bias], x, y, rows, lengths.astype(np.int32)),
    ):
        with pytest.raises((ValueError, IndexError)):
            fused.kernel(*wrong, *rest)
    for wrong_type in ((weight, bias), ["a", "b"]):
        with pytest.raises(TypeError):
            fused.kernel(wrong_type, x, y, rows, lengths, *rest)
    mask = np.ones((4, 2), np.float32)
    for some in ([], [None, None], mask, [(0.5, mask[:3])], [(0.5, mask > 0)]):
        with pytest.raises(ValueError, match="mask"):
            fused.kernel([weight, bias], x, y, rows, lengths, *rates, some, int)
    with pytest.raises(TypeError):
        fused.kernel([weight, bias], x, y, rows, lengths, *rates, [(0.5, None)], "seed")
    with pytest.raises(ZeroDivisionError):
        fused.kernel([weight, bias], x, y, rows, lengths, *rates, [(0.5, mask)], lambda length: 1 // 0)
    with pytest.raises((BufferError, ValueError)):
        fused.kernel([weight.T, bias], x, y, rows, lengths, *rest)


@here
def test_a_diverging_client_says_so() -> None:
    clients = population([200])
    trainer = Trainer(FITS["nested"], lr=1e30, batch_size=8, engine="fused")
    reply = answers(trainer, clients)["c0"]
    assert not np.isfinite(flat(reply.arrays)).all()
    assert torch.tensor(reply.metrics["loss"]).isnan() or reply.metrics["loss"] > 1e3


def test_a_model_of_other_widths_than_the_trainers_is_refused_alone_and_among_others() -> None:
    """Whoever asks must not have another network trained than the one that is agreed on."""
    trainer = Trainer(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    wider = Trainer(lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))).initial(0)
    site = Site("ana", (np.ones((9, 6), np.float32), np.zeros(9, np.int64)))
    request = Request("train", wider, {"seed": 0, "round": 1})
    with pytest.raises(RuntimeError, match="size"):
        trainer(request, site)
    assert isinstance(trainer.many({"ana": request, "bia": request}, {"ana": site, "bia": site})["ana"], Failure)
