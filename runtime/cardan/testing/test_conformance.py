"""The conformance suite as pytest tests, one for each check: ``pytest --pyargs cardan.testing --platform NAME``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cardan.platform.discovery import choose_platform
from cardan.testing.conformance import Check, Status, Subject, collect, run_check

_SUBJECT = pytest.StashKey[Subject]()


def _subject(config: pytest.Config) -> Subject | None:
    """The platform that ``--platform`` names, loaded once a session."""
    name = config.getoption("--platform")
    if name is None:
        return None
    if _SUBJECT not in config.stash:
        options = tuple(config.getoption("--platform-option"))
        quick = bool(config.getoption("--conformance-quick"))
        config.stash[_SUBJECT] = Subject(choose_platform(name), quick=quick, options=options)
    return config.stash[_SUBJECT]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each check of the platform."""
    if "check" not in metafunc.fixturenames:
        return
    subject = _subject(metafunc.config)
    if subject is None:
        missing = pytest.mark.skip(reason="pass --platform NAME to try an installed platform")
        metafunc.parametrize("check", [pytest.param(None, id="no-platform", marks=missing)])
        return
    checks = collect(subject, metafunc.config.getoption("--conformance-only"))
    metafunc.parametrize("check", [pytest.param(check, id=check.id) for check in checks])


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject | None]:
    """The platform under test."""
    found = _subject(request.config)
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
