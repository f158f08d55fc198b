"""FCube and Synthetic(alpha, beta) against their published recipes, written out here once more."""

import numpy as np
import pytest
from scipy.stats import kstest, lognorm
from sklearn.linear_model import LogisticRegression

from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.datasets import check_data_set
from mutirao.datasets.generated import generate, is_generated, make_synthetic
from mutirao.datasets.labelled import is_arrays, load_labelled
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.simulation.local_fleet import LocalFleet


def test_fcube_has_balanced_classes_by_the_first_number() -> None:
    made = generate("fcube", 0)
    assert made.x_train.shape == (4000, 3)
    assert made.x_train.dtype == np.float32
    for x, y in ((made.x_train, made.y_train), (made.x_test, made.y_test)):
        assert np.array_equal(y, (x[:, 0] <= 0).astype(int))
        assert np.abs(x).max() <= 1
    assert np.bincount(made.y_train).tolist() == [2000, 2000]


def test_each_user_of_fcube_has_two_opposite_octants() -> None:
    made = generate("fcube", 3)
    seen = set()
    for user in np.unique(made.users):
        octants, counts = np.unique(np.sign(made.x_train[made.users == user]), axis=0, return_counts=True)
        assert np.array_equal(octants[0], -octants[1])
        assert counts.tolist() == [500, 500]
        seen |= set(map(tuple, octants.tolist()))
        judged = {tuple(o) for o in np.sign(made.x_test[made.test_users == user]).tolist()}
        assert judged == set(map(tuple, octants.tolist()))
    assert len(seen) == 8
    for x in np.abs(made.x_train).T:
        assert kstest(x, "uniform").pvalue > 1e-3


def test_fcube_differs_by_seed_and_repeats_itself() -> None:
    assert np.array_equal(generate("fcube", 1).x_train, generate("fcube", 1).x_train)
    assert not np.array_equal(generate("fcube", 1).x_train, generate("fcube", 2).x_train)
    assert not set(map(bytes, generate("fcube", 1).x_train)) & set(map(bytes, generate("fcube", 1).x_test))


def published(alpha: float, beta: float, users: int, draw: np.random.RandomState) -> tuple[list[int], list[float]]:
    """Synthetic(alpha, beta) as the paper's appendix has it, sample by sample: sizes, and the classes a user has."""
    sizes, kinds = [], []
    for _ in range(users):
        n = int(draw.lognormal(4, 2)) + 50
        u, centre = draw.normal(0, alpha), draw.normal(0, beta)
        v = [draw.normal(centre, 1) for _ in range(60)]
        w = np.array([[draw.normal(u, 1) for _ in range(60)] for _ in range(10)])
        b = np.array([draw.normal(u, 1) for _ in range(10)])
        labels = set()
        for _ in range(min(n, 200)):
            x = [draw.normal(v[j], ((j + 1) ** -1.2) ** 0.5) for j in range(60)]
            scores = np.exp(w @ x + b - np.max(w @ x + b))
            labels.add(int(np.argmax(scores / scores.sum())))
        sizes.append(n)
        kinds.append(float(len(labels)))
    return sizes, kinds


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.0), (1.0, 1.0)])
def test_synthetic_is_distributed_as_published(alpha: float, beta: float) -> None:
    made = make_synthetic(alpha, beta, 300, seed=5)
    sizes, kinds = published(alpha, beta, 60, np.random.RandomState(0))
    ours = [made.y_train[made.users == u] for u in np.unique(made.users)]
    mean, spread = np.mean(kinds), np.std(kinds) / len(kinds) ** 0.5
    found = [len(set(y[:200].tolist())) for y in ours]
    assert abs(np.mean(found) - mean) < 4 * (spread + np.std(found) / 300**0.5)
    whole = np.unique(made.users, return_counts=True)[1] + np.unique(made.test_users, return_counts=True)[1]
    assert kstest(whole - 49.5, lognorm(2, scale=np.exp(4)).cdf).pvalue > 1e-3
    assert min(sizes) >= 50
    assert whole.min() >= 50


def test_inputs_have_the_published_moments_and_models_tell_the_labels() -> None:
    made = make_synthetic(1.0, 1.0, 40, seed=1)
    largest = max(np.unique(made.users), key=lambda u: int((made.users == u).sum()))
    x = made.x_train[made.users == largest].astype(np.float64)
    assert len(x) > 1000
    np.testing.assert_allclose(x.var(0), np.arange(1, 61) ** -1.2, rtol=0.2)
    middles = np.array([made.x_train[made.users == u].mean(0) for u in np.unique(made.users)])
    assert middles.std(1).mean() == pytest.approx(1, abs=0.1)  # v_kj around B_k
    assert middles.mean(1).std() == pytest.approx(1, abs=0.35)  # B_k, of 40 users
    still = make_synthetic(1.0, 0.0, 40, seed=1)
    assert np.array([still.x_train[still.users == u].mean() for u in np.unique(still.users)]).std() < 0.25


def test_alpha_moves_all_classes_alike_as_published_and_beta_moves_the_inputs() -> None:
    none, much, other = (make_synthetic(a, b, 20, seed=2) for a, b in ((0.0, 0.5), (100.0, 0.5), (0.0, 5.0)))
    assert np.array_equal(none.x_train, much.x_train)
    assert np.mean(none.y_train == much.y_train) > 0.999  # but for ties that rounding breaks
    assert not np.array_equal(none.x_train, other.x_train)


def learn_from_half_of_the_users(name: str, steps: int) -> tuple[float, float, float]:
    """How a linear model does on the users it is learnt from and on the others, and how the commonest class would."""
    made = generate(name, 0)
    mine = np.isin(made.users, np.unique(made.users)[::2])
    model = LogisticRegression(max_iter=steps, C=1e4).fit(made.x_train[mine], made.y_train[mine])
    own, others = (float(model.score(made.x_train[rows], made.y_train[rows])) for rows in (mine, ~mine))
    return own, others, float(np.bincount(made.y_train[~mine]).max() / (~mine).sum())


@pytest.mark.slow
def test_iid_users_have_one_model_and_one_distribution() -> None:
    assert np.abs(generate("synthetic-iid", 0).x_train.mean(0)).max() < 0.1
    own, others, commonest = learn_from_half_of_the_users("synthetic-iid", 1000)
    assert own == 1.0  # one W and b tell all labels, so that one linear model separates them
    assert others > (1 + commonest) / 2
    own, others, commonest = learn_from_half_of_the_users("synthetic-0-0", 60)
    assert own < 1.0
    assert others < commonest  # what holds for some users is worth nothing for others


def test_a_tenth_of_each_user_is_held_out() -> None:
    made = generate("synthetic-0.5-0.5", 0)
    for user in np.unique(made.users):
        train, test = int((made.users == user).sum()), int((made.test_users == user).sum())
        assert train == int(0.9 * (train + test))
    assert len(np.unique(made.users)) == 30
    assert made.x_train.shape[1] == 60


@pytest.mark.parametrize(
    ("name", "users"), [("fcube", 4), ("synthetic-0-0", 30), ("synthetic-1-0.5-7", 7), ("synthetic-iid-5", 5)]
)
def test_names_are_known_everywhere(name: str, users: int) -> None:
    assert is_generated(name)
    assert is_arrays(name)
    data = load_labelled(name, 0)
    assert data.users is not None
    assert len(np.unique(data.users)) == users


@pytest.mark.parametrize("name", ["synthetic-1", "synthetic-a-b", "synthetic--1-1", "synthetic-1-1-x", "fcubes"])
def test_other_names_are_refused_in_one_line(name: str) -> None:
    assert not is_generated(name)
    with pytest.raises(ConfigError, match="no data set of that name"):
        load_labelled(name, 0)


@pytest.mark.parametrize("name", ["synthetic-1-1-0", "synthetic-1-1-1001"])
def test_numbers_of_users_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="from 1 to 1,000 can be generated"):
        load_labelled(name, 0)


@pytest.mark.parametrize(
    ("recipe", "name"), [("quickstart", "fcube"), ("selection", "synthetic-0-0"), ("groups", "fcube")]
)
def test_their_users_are_clients_of_any_labelled_recipe(recipe: str, name: str) -> None:
    settings = {"data": name, "partition": "natural", "rounds": 1, "epochs": 1, "per_round": 4, "lr": 0.05}
    config = resolve(find(recipe).config, settings)
    task = find(recipe).prepare(config)
    assert len(task.population) == (4 if name == "fcube" else 30)
    done = next(iter(find(recipe).flow(LocalFleet(task.handler, task.population), config, task, Run(task.initial()))))
    assert done.row["failed"] == 0


def test_the_check_says_what_there_is() -> None:
    assert check_data_set("generated")[0].startswith("fcube: 4,000 training samples, 1,000 test samples")
    with pytest.raises(ConfigError, match="leave '/tmp' out"):
        check_data_set("generated", "/tmp")
