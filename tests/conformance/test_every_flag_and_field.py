"""Every flag and request field on every installed platform takes effect, or is refused with what would work."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cardan.cli.flags import ENGINE_GROUPS, config_flags
from cardan.platform import Platform
from cardan.platform.discovery import survey
from cardan.testing.conformance import Check, Status, Subject, collect, end_to_end_checks, refusal_checks, run_check
from cardan.types import LogprobParams, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN_BY = {
    "temperature": "end_to_end/field-temperature",
    "top_p": "end_to_end/field-top_p",
    "top_k": "end_to_end/field-top_k",
    "min_p": "end_to_end/field-min_p",
    "seed": "end_to_end/field-seed",
    "frequency_penalty": "end_to_end/field-frequency_penalty",
    "presence_penalty": "end_to_end/field-presence_penalty",
    "repetition_penalty": "end_to_end/field-repetition_penalty",
    "logit_bias": "end_to_end/field-logit_bias",
    "min_new_tokens": "end_to_end/field-min_new_tokens",
    "output": "end_to_end/field-logprobs",
    "top": "end_to_end/field-logprobs",
    "token_ids": "end_to_end/field-logprobs",
    "prompt_start": "end_to_end/field-logprobs",
    "grammar": "sampler/grammar-mask",
}
"""The check that sees a request field take effect on a device that claims it."""


@cache
def platforms() -> dict[str, Platform]:
    """Those that are installed and usable here, and the vendors' examples."""
    import sys

    found = {status.plugin.name: status.platform for status in survey() if status.availability}
    for folder, module in (("vendor_platform", "acme_cardan"), ("vendor_device", "beacon_cardan")):
        sys.path.insert(0, str(EXAMPLES / folder))
        found[module] = __import__(module).platform
        sys.path.pop(0)
    return {name: platform for name, platform in found.items() if platform and platform.probe().usable}


def names() -> list[str]:
    return list(platforms())


@pytest.fixture(scope="module")
def subjects() -> Any:
    made: dict[str, Subject] = {}

    def subject(name: str) -> Subject:
        if name not in made:
            made[name] = Subject(platforms()[name])
        return made[name]

    yield subject
    for one in made.values():
        one.close()


def test_the_tables_name_every_flag_that_starts_an_engine() -> None:
    flags = {f"{flag.group}.{flag.field}" for flag in config_flags(ENGINE_GROUPS)}
    assert flags == set(refusal_checks.FLAGS) | set(refusal_checks.BESIDE_THE_PLAN)
    assert not set(refusal_checks.FLAGS) & set(refusal_checks.BESIDE_THE_PLAN)


def test_the_tables_name_every_request_field() -> None:
    known = {field.name for kind in (SamplingParams, LogprobParams) for field in fields(kind)}
    assert known == set(refusal_checks.FIELDS) | set(refusal_checks.BESIDE_THE_DEVICE)
    assert set(SHOWN_BY) == set(refusal_checks.FIELDS)
    assert set(end_to_end_checks.FIELDS) <= set(SHOWN_BY)


def checks_of(subject: Subject) -> list[Check]:
    return [c for c in collect(subject, ("capabilities",)) if re.match(r"flag-|request-field-|what-layers", c.name)]


def test_the_vendors_and_one_of_ours_are_among_the_platforms() -> None:
    assert {"null", "acme_cardan", "beacon_cardan"} <= set(names())
    assert {"cpu", "mlx"} & set(names())


@pytest.mark.parametrize("name", names())
def test_nothing_is_accepted_and_ignored(name: str, subjects: Any) -> None:
    subject = subjects(name)
    checks = checks_of(subject)
    assert len(checks) > 40
    outcomes = [run_check(subject, check) for check in checks]
    assert {outcome.id: outcome.detail for outcome in outcomes if outcome.status is Status.FAILED} == {}
    seen = {check.id for check in collect(subject, ("end_to_end", "sampler"))}
    assert set(SHOWN_BY.values()) <= seen


def test_a_flag_that_is_dropped_is_noticed(subjects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of every config is that of no flag at all."""
    subject = subjects("cpu" if "cpu" in names() else "mlx")
    plain = Subject.plan

    def ignoring(self: Subject, facts: Any, config: Any) -> Any:
        return plain(self, facts, refusal_checks._config({}))

    monkeypatch.setattr(Subject, "plan", ignoring)
    flags = [check for check in checks_of(subject) if check.name.startswith("flag-")]
    passed = [check.name for check in flags if run_check(subject, check).status is Status.PASSED]
    assert passed == []


def test_a_field_that_is_not_refused_is_noticed(subjects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subjects("beacon_cardan")
    monkeypatch.setattr(refusal_checks, "check_request", lambda request, limits: None)
    fields_refused = [check for check in checks_of(subject) if check.name.startswith("request-field-")]
    outcomes = {check.name: run_check(subject, check) for check in fields_refused}
    assert {outcome.status for outcome in outcomes.values()} == {Status.FAILED}
    assert "was accepted" in outcomes["request-field-temperature"].detail
