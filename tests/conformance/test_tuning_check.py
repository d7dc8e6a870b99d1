"""What the suite says of a platform that offers something to tune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tuned_platforms import TUNABLES, FakeTuner, TunedNull

from cardan.platform import Platform, Tunable
from cardan.testing.conformance import Status, Subject, collect, run_check

CHECK = "capabilities/tuning-is-well-formed"


def outcome(platform: Platform) -> tuple[Status, str]:
    with Subject(platform, quick=True) as subject:
        (check,) = collect(subject, (CHECK,))
        found = run_check(subject, check)
    return found.status, found.detail


class Tuned(FakeTuner):
    """With tunables of the test's own."""

    def __init__(self, *tunables: Tunable, kernels: str = "k1") -> None:
        super().__init__({}, kernels=kernels)
        self._tunables = tunables

    def tunables(self) -> tuple[Tunable, ...]:
        return self._tunables


class Deaf(TunedNull):
    """Offers to be tuned and does not listen."""

    def tuned(self, numbers: Mapping[str, int]) -> TunedNull:
        return self


def test_a_tuner_as_it_should_be_passes() -> None:
    assert outcome(TunedNull(Tuned(*TUNABLES))) == (Status.PASSED, "")


def test_a_platform_without_a_tuner_is_not_asked() -> None:
    with Subject(TunedNull(None), quick=True) as subject:
        assert not [check for check in collect(subject, ("capabilities",)) if check.id == CHECK]


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        (Deaf(Tuned(*TUNABLES)), "tuned() returns the platform itself, so that no table has an effect"),
        (TunedNull(Tuned()), "tunables are [], expected some, each name once"),
        (TunedNull(Tuned(*TUNABLES, TUNABLES[0])), "tunables are ['few', 'many', 'few'], expected some, each"),
        (TunedNull(Tuned(replace(TUNABLES[0], default=65))), "tunable few: the default 65 is not within 0 to 64"),
        (TunedNull(Tuned(replace(TUNABLES[0], help=""))), "tunable few has no help"),
        (TunedNull(Tuned(*TUNABLES, kernels=" ")), "the tuner does not say for which processor and kernels"),
    ],
)
def test_a_tuner_that_no_table_could_be_used_with_fails(platform: Platform, said: str) -> None:
    status, detail = outcome(platform)
    assert status is Status.FAILED
    assert said in detail
