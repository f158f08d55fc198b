"""Former public names work, and say what they are called now."""

import importlib

import numpy as np
import pytest

from mutirao import LocalFleet, Reply, Request, Run, Site, train
from mutirao.aggregation import FedAvg
from mutirao.selection import everyone


def test_former_names_of_the_package_work_and_warn() -> None:
    import mutirao

    for former, now in (("Cohort", "Group"), ("Exhibits", "Artifacts")):
        with pytest.warns(DeprecationWarning, match=f"mutirao.{former} is called {now} now"):
            assert getattr(mutirao, former) is getattr(mutirao, now)


@pytest.mark.parametrize(
    ("module", "former", "now"),
    [
        ("metrics", "judge_classes", "evaluate_logits"),
        ("partition", "deal_tests", "split_test_set"),
        ("partitioning", "deal_tests", "split_test_set"),
        ("robustness.attacks", "liars_among", "malicious_among"),
        ("attacks", "Swarm", "Sybils"),
        ("privacy", "Open", "NoPrivacy"),
        ("config", "read", "read_toml"),
        ("stats", "span", "central_interval"),
    ],
)
def test_a_former_name_is_the_new_one_and_warns(module: str, former: str, now: str) -> None:
    place = importlib.import_module(f"mutirao.{module}")
    with pytest.warns(DeprecationWarning, match=f"{former} is called {now} now"):
        found = getattr(place, former)
    assert found is getattr(place, now)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = place.nothing


def test_train_takes_what_it_sends_to_clients_by_its_former_name() -> None:
    sent = []

    def answer(request: Request, site: Site) -> Reply:
        sent.append(request.config["lr"])
        return Reply(request.arrays, n=1)

    fleet = LocalFleet(answer, {"ana": None})
    with pytest.warns(DeprecationWarning, match="called config= now"):
        list(train(Run({"w": np.zeros(1)}), fleet, rounds=1, select=everyone, aggregate=FedAvg(), tell={"lr": 0.5}))
    assert sent == [0.5]
