"""What a selector cannot be told."""

from typing import Any

import pytest

from mutirao.errors import ConfigError
from mutirao.selection import AoIU, Entropy, FedCS, Mix, Oort, PowerOfChoice


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AoIU(3, 1.5), "alpha is 1.5, but must be between 0 and 1"),
        (lambda: AoIU(3, float("nan")), "alpha is nan"),
        (lambda: AoIU(3, utility="mood"), "utility is 'mood'"),  # type: ignore[arg-type]
        (lambda: AoIU(0), "count is 0"),
        (lambda: Entropy(3, refresh="never"), "refresh is 'never'"),  # type: ignore[arg-type]
        (lambda: Entropy(3, share=0.0), "share is 0.0"),
        (lambda: Mix(3, samples=0), "samples is 0"),
        (lambda: Mix(3, "0.5 agee"), "no score is called 'agee'; did you mean 'age'"),
        (lambda: Mix(3, "age entropy"), "'age entropy' is not a weight and a score"),
        (lambda: Mix(3, "inf age"), "not a finite number"),
        (lambda: PowerOfChoice(3, candidates=-1), "candidates is -1"),
        (lambda: Oort(3, explore=2.0), "explore is 2.0"),
        (lambda: Oort(3, duration=-1.0), "duration is -1.0"),
        (lambda: Oort(3, pace=101.0), "pace is 101.0"),
        (lambda: Oort(3, pace=30.0, pace_step=0), "pace_step is 0"),
        (lambda: Oort(3, pace=30.0, duration=5.0), "duration is 5.0, but must be 0 with pace"),
        (lambda: Oort(3, blacklist=-1), "blacklist is -1"),
        (lambda: FedCS(3, deadline=0.0), "deadline is 0.0"),
        (lambda: FedCS(3, candidates=-2), "count is -2"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
