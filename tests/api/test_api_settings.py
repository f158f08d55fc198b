"""Keywords become the settings that `--set` would make of them."""

import doctest

import numpy as np
import pytest

from mutirao.api.run import route
from mutirao.config import Common, Part, resolve
from mutirao.errors import ConfigError


def test_the_example_holds() -> None:
    example = doctest.DocTestFinder().find(route, "route", globs={"route": route, "Common": Common})[0]
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize(
    ("keywords", "pairs"),
    [
        ({"alpha": 0.3}, {"partition.alpha": 0.3}),
        ({"partition": "iid", "rounds": 3, "lr": None}, {"partition": "iid", "rounds": 3}),
        ({"aggregate": "fedprox", "mu": 0.1}, {"aggregate": "fedprox", "aggregate.mu": 0.1}),
        ({"aggregate": "fedavgm", "momentum": 0.5}, {"aggregate": "fedavgm", "momentum": 0.5}),  # the clients' own
        ({"partition": {"name": "dirichlet", "alpha": 0.3}}, {"partition.name": "dirichlet", "partition.alpha": 0.3}),
        ({"partition": Part("shards", {"per_client": 3})}, {"partition.name": "shards", "partition.per_client": 3}),
        ({"partition.alpha": np.float32(0.5)}, {"partition.alpha": 0.5}),
        ({"rounds": np.int64(7)}, {"rounds": 7}),
    ],
)
def test_a_keyword_goes_where_it_belongs(keywords: dict[str, object], pairs: dict[str, object]) -> None:
    found = route(Common, keywords)
    assert dict(found) == pairs
    resolve(Common, {}, found)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"select": "aoiu", "alpha": 0.3}, "'alpha' is a setting of partition=dirichlet and select=aoiu; say which"),
        ({"partition": "iid", "alpha": 0.3}, "unknown setting 'alpha'"),
        ({"ruonds": 3}, "unknown setting 'ruonds'; did you mean 'rounds'?"),
        ({"partition": "dirichlt"}, "partition: no part is called 'dirichlt'; did you mean 'dirichlet'?"),
        ({"rounds": 0}, "rounds: 0 is too small, at least 1 is needed"),
        ({"lr": "fast"}, "lr: 'fast' is not a number"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(keywords: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Common, {}, route(Common, keywords))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
