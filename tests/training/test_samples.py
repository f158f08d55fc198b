"""What clients hold: rows of one storage, to train on and to judge by."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mutirao import ClientData
from mutirao.core.exclusion import PopulationWithout
from mutirao.core.fleet import ClientId
from mutirao.deploy.policy.enforcement import SampleCounts
from mutirao.training.samples import (
    Population,
    Samples,
    VirtualClients,
    can_evaluate,
    own_test_samples,
    poison,
    pool_clients,
    virtual_clients,
)

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(50, 4)).astype(np.float32)
Y = DRAW.integers(0, 3, 50)


def halves(**more: Any) -> VirtualClients:
    return virtual_clients(X, Y, [np.arange(20), np.arange(20, 40)], **more)


def test_virtual_clients_share_one_storage() -> None:
    clients = virtual_clients(X, Y, [np.array([3, 1]), np.arange(4, 50)], most=10, seed=1)
    assert list(clients) == ["c0", "c1"]
    assert clients["c0"].x.data_ptr() == clients["c1"].x.data_ptr()
    assert len(clients["c1"]) == 10
    x, y = clients["c0"].batch(np.array([1]))
    assert np.array_equal(x.numpy(), X[[1]])
    assert y.tolist() == [Y[1]]
    for stranger in ("c2", "c00", "x1", "c"):
        with pytest.raises(KeyError):
            clients[stranger]


def test_clients_judge_by_their_own_rows_of_a_common_test_set() -> None:
    test = Samples(X[40:], Y[40:])
    clients = halves(test=test, tests=[np.array([0, 3]), np.array([3, 4, 9])])
    own = [clients[c] for c in clients]
    assert all(isinstance(data, ClientData) for data in own)
    assert [len(data) for data in own] == [20, 20]
    assert {data.test.x.data_ptr() for data in own} == {test.x.data_ptr()}
    assert own[1].test.batch(slice(0, 3))[1].tolist() == Y[[43, 44, 49]].tolist()
    assert own_test_samples(pool_clients(clients)["pooled"]) is test
    assert len(pool_clients(clients)["pooled"]) == 40
    with pytest.raises(ValueError, match="1 lists of test rows for 2 clients"):
        halves(test=test, tests=[np.array([0])])


def test_data_of_a_client_are_what_it_trains_on_and_what_it_judges_by() -> None:
    data = ClientData((X[:9], Y[:9]), Samples(X[9:12], Y[9:12]))  # type: ignore[arg-type]
    assert (len(data), len(data.train), len(own_test_samples(data))) == (9, 9, 3)
    assert Samples.of(data) is data.train
    assert [SampleCounts.of(d).train for d in (data, data.train, (X, Y))] == [9, 9, 50]  # what a site's policy counts
    assert [SampleCounts.of(several).train for several in (((X, X), Y), ({"a": X}, Y))] == [50, 50]
    for plain in (data.train, (X, Y), None):
        with pytest.raises(ValueError, match=r"no test data of its own: give it ClientData\(train, test\)"):
            own_test_samples(plain)


def test_only_what_is_trained_on_gets_other_labels_or_inputs() -> None:
    data = ClientData(Samples(X, Y, np.arange(5)), Samples(X, Y))
    for given in (data, data.train, (X[:5], Y[:5])):
        changed = poison(given, lambda x, y: (x, y + 7))
        assert Samples.of(changed).y.tolist() == (Y[:5] + 7).tolist()
        assert len(changed) == 5
        assert isinstance(changed, ClientData) == (given is data)
        assert np.array_equal(Samples.of(poison(given, lambda x, y: (x + 1, y))).x, X[:5] + 1)
    assert own_test_samples(poison(data, lambda x, y: (x, y + 7))) is data.test


class Unread(Population):
    """Clients whose data only they can read."""

    def __init__(self, has_tests: bool) -> None:
        self._tests = has_tests

    @property
    def has_tests(self) -> bool:
        return self._tests

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[ClientId]:
        return iter(["ana", "bia"])

    def __getitem__(self, name: ClientId) -> Any:
        raise AssertionError(f"the data of {name} were read")

    def __contains__(self, name: object) -> bool:
        return name in ("ana", "bia")


def test_who_can_judge_is_known_without_reading_any_data() -> None:
    own = ClientData(Samples(X, Y), Samples(X, Y))
    assert can_evaluate({"ana": own, "bia": own})
    assert not can_evaluate({"ana": own, "bia": (X, Y)})
    assert not can_evaluate(halves())
    assert can_evaluate(halves(test=Samples(X, Y), tests=[np.arange(2)] * 2))
    for has_tests in (True, False):
        assert can_evaluate(Unread(has_tests)) == has_tests
        assert can_evaluate(PopulationWithout(Unread(has_tests), ["ana"])) == has_tests
