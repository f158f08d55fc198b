import pytest

from mutirao.core.agreement import hold_agreed, tell_agreed
from mutirao.errors import Refused


def test_what_is_agreed_on_is_told_and_held() -> None:
    told = tell_agreed({"frozen": "a1", "columns": "b2"})
    hold_agreed({"seed": 0, "round": 1, **told}, {"columns": "b2", "frozen": "a1"})
    hold_agreed({"seed": 0, "round": 1}, {"frozen": "a1"})  # a request that speaks of nothing


@pytest.mark.parametrize(("own", "says"), [({"frozen": "c3"}, "here it is c3"), ({}, "there is none here")])
def test_a_site_with_another_one_or_none_refuses_by_name(own: dict[str, str], says: str) -> None:
    with pytest.raises(Refused, match=f"frozen a1 is agreed on, {says}") as refused:
        hold_agreed({"round": 1, **tell_agreed({"frozen": "a1"})}, own)
    assert refused.value.rule == "agreed.frozen"
