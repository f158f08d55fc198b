"""Former public names work, and say what they are called now."""

import importlib

import pytest


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
