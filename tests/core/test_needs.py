import doctest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.aggregation import FedProx
from mutirao.core import needs as module
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.needs import SERVER_FIGURES, Capabilities, Needs, as_needs
from mutirao.core.parts import as_handler, as_selector
from mutirao.errors import ConfigError

NAMES = st.frozensets(st.sampled_from(["loss", "entropy", "rms_loss", "control"]))
NEEDS = st.builds(
    Needs,
    metrics=NAMES,
    extras=NAMES,
    probes=NAMES,
    config=st.dictionaries(st.sampled_from(["mu", "lr"]), st.just(0.5)),  # one value a name: two would contradict
    request_extras=NAMES,
    server=st.frozensets(st.sampled_from(sorted(SERVER_FIGURES))),
)


def test_the_examples_hold() -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert result.failed == 0


@given(NEEDS, NEEDS, NEEDS)
def test_joining_needs_is_a_union(one: Needs, two: Needs, three: Needs) -> None:
    assert one | Needs() == one == one | one
    assert one | two == two | one
    assert (one | two) | three == one | (two | three)


@given(NEEDS, NEEDS)
def test_what_serves_both_parts_serves_each_and_nothing_less_does(one: Needs, two: Needs) -> None:
    both = one | two
    able = Capabilities(both.metrics | both.probes, both.extras, both.config.keys(), both.request_extras)  # type: ignore[operator]
    assert able.unmet(one) == able.unmet(two) == able.unmet(both) == []
    for name in both.metrics:
        assert (able - Capabilities(metrics={name})).unmet(both) == [f"the metric {name!r}"]
    for name in both.config:
        assert (able - Capabilities(config={name})).unmet(both) == [f"the hyperparameter {name!r}"]


def test_two_values_for_one_hyperparameter_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two parts send mu .* with the values 0.1 and 0.2; give them one value"):
        FedProx(mu=0.1).needs | FedProx(mu=0.2).needs


def test_a_text_is_no_set_of_names_and_the_server_measures_what_it_lists() -> None:
    with pytest.raises(TypeError, match=r"metrics: expected a set of names, got 'loss'; write \{'loss'\}"):
        Needs(metrics="loss")
    with pytest.raises(ConfigError, match=r"server: the server measures no 'memroy'; did you mean 'memory'"):
        Needs(server={"memroy"})


def test_what_a_sum_cannot_give_is_named() -> None:
    needs = Needs(metrics={"entropy"}, server={"sketch"}, biases={"10"}, config={"mu": 0.1})
    assert needs.of_single_clients() == ["metric 'entropy'", "figure 'sketch'", "bias update of layer '10'"]
    assert FedProx(mu=0.1).needs.of_single_clients() == []


def test_the_words_of_earlier_versions_are_read_and_warned_of() -> None:
    words = {"metrics:pain", "extras:rows", "probe:loss", "comes:control", "replies:memory", "replies:bias=fc"}
    wanted = Needs({"pain"}, {"rows"}, {"loss"}, {"mu": 0.25, "name": "text"}, {"control"}, {"memory"}, {"fc"})
    with pytest.warns(DeprecationWarning, match=r"goes with 0.3; write Needs\(...\)"):
        assert as_needs(words | {"config:mu=0.25", "config:name=text"}) == wanted

    def select(*_: Any) -> list[str]:
        return []

    def handler(request: Request, site: Site) -> Reply:
        return Reply({}, n=1)

    select.needs = frozenset({"metrics:pain"})  # type: ignore[attr-defined]
    handler.provides = frozenset({"metrics:loss", "config:mu", "evaluate"})  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="metrics:pain"):
        assert as_selector(select).needs == Needs(metrics={"pain"})
    with pytest.warns(DeprecationWarning, match=r"write capabilities = Capabilities\(...\)"):
        assert as_handler(handler).capabilities == Capabilities({"loss"}, config={"mu"}, requests={"evaluate"})
    with pytest.raises(ConfigError, match="needs: 'metric:pain' is unknown; did you mean 'metrics'"), pytest.warns():
        as_needs({"metric:pain"})
