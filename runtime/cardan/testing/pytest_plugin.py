"""Options with which ``pytest --pyargs cardan.testing --platform NAME`` runs the conformance suite.

It loads with every pytest that runs beside Cardan, so it imports nothing but pytest until an option asks for more.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("cardan", "Cardan's conformance suite (pytest --pyargs cardan.testing)")
    group.addoption("--platform", metavar="NAME", default=None, help="the installed platform to try")
    group.addoption(
        "--platform-option", metavar="NAME=VALUE", action="append", default=[], help="an option of the platform's own"
    )
    group.addoption(
        "--conformance-only", metavar="PART", action="append", default=[], help="a part, or the start of part/check"
    )
    group.addoption("--conformance-quick", action="store_true", help="leave out long lengths and rare shapes")


def pytest_collection(session: pytest.Session) -> None:
    """Load the platform before tests are collected.

    Raises:
        pytest.UsageError: an option names what is not there.
    """
    if session.config.getoption("--platform") is not None:
        from cardan.testing.conformance.pytest_session import choose

        choose(session.config)
