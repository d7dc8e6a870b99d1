"""JSON objects from files that may be damaged.

It knows no keys; what an object must hold is for the caller to check.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cardan.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: it cannot be read, is no JSON, or holds something else.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    return parse_json_object(raw, str(path))


def parse_json_object(raw: bytes, what: str) -> dict[str, Any]:
    """Parse one JSON object, whose keys must differ.

    Raises:
        CheckpointError: it is no JSON, holds something else, or repeats a key.
    """
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{what} is no valid JSON: {error.msg} at line {error.lineno}, column {error.colno}. Fetch it again."
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is no valid JSON: {error}. Fetch it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} must hold a JSON object, got {type(value).__name__}. Fetch it again.")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return result
