"""What pytest's options choose: the platform under test and its checks, made once a session.

It knows no check. A wrong option is a usage error, which pytest shows without a traceback.
"""

from __future__ import annotations

import pytest

from cardan.errors import CardanError
from cardan.platform.discovery import choose_platform
from cardan.testing.conformance.check import Check
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.suite import collect

_SUBJECT = pytest.StashKey[Subject]()
_CHECKS = pytest.StashKey[list[Check]]()


def choose(config: pytest.Config) -> None:
    """Load the platform that ``--platform`` names and collect its checks.

    Raises:
        pytest.UsageError: the platform, one of its options or a part of the suite is unknown.
    """
    try:
        options = tuple(config.getoption("--platform-option"))
        found = choose_platform(config.getoption("--platform"), options=options, trial=True)
        subject = Subject(found, quick=bool(config.getoption("--conformance-quick")), options=options)
        config.stash[_CHECKS] = collect(subject, config.getoption("--conformance-only"), "--conformance-only")
    except CardanError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_SUBJECT] = subject


def subject_of(config: pytest.Config) -> Subject | None:
    """The platform under test, or None where no option names one."""
    return config.stash.get(_SUBJECT, None)


def checks_of(config: pytest.Config) -> list[Check]:
    """The checks that the options choose."""
    return config.stash.get(_CHECKS, [])
