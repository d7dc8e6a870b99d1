"""The conformance suite as pytest tests, one for each check: ``pytest --pyargs cardan.testing --platform NAME``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cardan.testing.conformance import Check, Status, Subject, run_check
from cardan.testing.conformance.pytest_session import checks_of, subject_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each check of the platform."""
    if "check" not in metafunc.fixturenames:
        return
    if subject_of(metafunc.config) is None:
        missing = pytest.mark.skip(reason="pass --platform NAME to try an installed platform")
        metafunc.parametrize("check", [pytest.param(None, id="no-platform", marks=missing)])
        return
    metafunc.parametrize("check", [pytest.param(check, id=check.id) for check in checks_of(metafunc.config)])


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject | None]:
    """The platform under test."""
    found = subject_of(request.config)
    yield found
    if found is not None:
        found.close()


def test_conforms(check: Check, subject: Subject) -> None:
    """One check of the suite."""
    outcome = run_check(subject, check)
    if outcome.status is Status.SKIPPED:
        pytest.skip(outcome.detail)
    if outcome.status is Status.FAILED:
        pytest.fail(outcome.detail, pytrace=False)
