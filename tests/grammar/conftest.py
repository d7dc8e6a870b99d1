"""Backends over a small vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_words import vocabulary

from cardan.grammar import GRAMMAR_BACKENDS, GrammarOptions


@pytest.fixture(scope="session", params=["llguidance", "xgrammar"])
def backend_name(request: pytest.FixtureRequest) -> str:
    if not GRAMMAR_BACKENDS[request.param].installed:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture(scope="session")
def backend(backend_name: str) -> Any:
    return GRAMMAR_BACKENDS[backend_name].make(vocabulary(), GrammarOptions())
