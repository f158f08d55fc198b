"""Documents as lists: all of them, once, however long the lists are; and scorers that look at documents alone."""

import numpy as np
import pytest
import torch

from mutirao.systems.ranking.encoding import flatten_lists, make_lists, subsample
from mutirao.systems.ranking.losses import PAD
from mutirao.systems.ranking.scorers import Scorer, dense, score

DRAW = np.random.default_rng(0)


def test_lists_hold_every_document_once_and_none_is_cut() -> None:
    queries = np.concatenate([np.full(300, 5), DRAW.integers(0, 5, 40)])
    x, grades = DRAW.normal(size=(340, 3)).astype(np.float32), DRAW.integers(0, 3, 340)
    rows = DRAW.permutation(340)[:330]
    lists = make_lists(x, grades, queries, rows)
    (features, there), y = lists.batch(np.arange(len(lists)))
    assert len(lists) == 6
    assert y.shape[1] == np.bincount(queries[rows]).max() > 64
    assert there.equal(y > PAD)
    assert sorted(features[there][:, 0].tolist()) == sorted(x[rows, 0].tolist())
    assert features[~there].abs().max() == 0
    of = {tuple(f): g for f, g in zip(x.tolist(), grades.tolist(), strict=True)}
    assert [of[tuple(f)] for f in features[there].tolist()] == y[there].tolist()
    for places, document in zip(there, features, strict=True):
        found = {queries[np.flatnonzero((x == d.numpy()).all(1))[0]] for d in document[places]}
        assert len(found) == 1


def test_at_most_so_many_lists_are_drawn_once() -> None:
    lists = make_lists(np.eye(6, dtype=np.float32), np.arange(6), [0, 0, 1, 2, 3, 3])
    assert subsample(lists, 0, 1) is lists
    some = subsample(lists, 2, 1)
    assert len(some) == 2
    assert subsample(lists, 2, 1).batch(slice(0, 2))[1].equal(some.batch(slice(0, 2))[1])


def test_flat_lists_are_what_metrics_take() -> None:
    scores, grades, queries = flatten_lists([[0.1, 0.2], [0.3, 9.0]], [[1.0, 0.0], [2.0, PAD]])
    assert (scores.tolist(), grades.tolist(), queries.tolist()) == ([0.1, 0.2, 0.3], [1.0, 0.0, 2.0], [0, 0, 1])


def test_batch_normalisation_takes_its_means_over_documents_alone() -> None:
    model = Scorer(3, hidden=4, layers=2, norm="batch")
    x = DRAW.normal(size=(7, 3)).astype(np.float32)
    (features, there), _ = make_lists(x, np.zeros(7), [0, 0, 0, 0, 1, 2, 2]).batch(np.arange(3))
    listed = model.train()(features, there)
    alone = model(torch.from_numpy(x))
    assert listed[there].tolist() == pytest.approx(alone.tolist(), rel=1e-5)
    assert listed[~there].abs().max() == 0
    hidden = model.body[0](torch.from_numpy(x)).detach()
    mean = model.body[1].running_mean
    assert isinstance(mean, torch.Tensor)
    assert mean.numpy() == pytest.approx((1 - 0.9**2) * hidden.mean(0).numpy(), abs=1e-6)  # two steps of 0.1


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_networks_are_as_deep_as_asked_and_score_single_documents(layers: int, norm: str) -> None:
    x = DRAW.normal(size=(5, 4)).astype(np.float32)
    for model in (dense(4, 3, 8, layers, norm), Scorer(4, 8, layers, norm)):
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert len(linear) == layers + 1
        assert score(model, x).shape == (5,)
        names = [k for k in model.state_dict() if "running" in k]
        assert len(names) == (2 * layers if norm == "batch" else 0)
