"""What the scheduler wants logged, as plain data that says how it reads.

It prints nothing; the engine takes these and adds what only it knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLogged:
    """One prefill pass.

    Attributes:
        new_seq: requests that are new in it.
        new_token: tokens computed.
        cached_token: tokens taken from the cache by the new requests.
        token_usage: share of the pool in use.
        running: rows that decode.
        queue: requests that wait.
        pending_token: prompt tokens that wait, those of the half-prefilled request included.
        input_throughput: tokens per second since the pass before.
    """

    new_seq: int
    new_token: int
    cached_token: int
    token_usage: float
    running: int
    queue: int
    pending_token: int
    input_throughput: float

    def describe(self, graph: bool = False) -> str:
        """One log line."""
        return (
            f"Prefill batch, new-seq: {self.new_seq}, new-token: {self.new_token}, cached-token: {self.cached_token}, "
            f"token usage: {self.token_usage:.2f}, running: {self.running}, queue: {self.queue}, "
            f"pending-token: {self.pending_token}, graph: {graph}, "
            f"input throughput (token/s): {self.input_throughput:.2f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLogged:
    """The last few decode steps.

    Attributes:
        running: rows that decode.
        token: slots in use.
        token_usage: share of the pool in use.
        gen_throughput: output tokens per second since the line before.
        queue: requests that wait.
    """

    running: int
    token: int
    token_usage: float
    gen_throughput: float
    queue: int

    def describe(self, graph: bool = False) -> str:
        """One log line."""
        return (
            f"Decode batch, running: {self.running}, token: {self.token}, token usage: {self.token_usage:.2f}, "
            f"graph: {graph}, gen throughput (token/s): {self.gen_throughput:.2f}, queue: {self.queue}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetractionLogged:
    """A running request lost its KV and waits again.

    Attributes:
        rid: the request.
        cause: ``pool full`` or ``priority``.
        num_generated: tokens it keeps.
        new_token_ratio: the reserve from now on.
    """

    rid: str
    cause: str
    num_generated: int
    new_token_ratio: float

    def describe(self, graph: bool = False) -> str:
        """One log line."""
        return (
            f"Retracted {self.rid} ({self.cause}) with {self.num_generated} output tokens; "
            f"new token ratio: {self.new_token_ratio:.2f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackLogged:
    """The scheduler did something slower than usual, for the first time for this reason."""

    reason: str

    def describe(self, graph: bool = False) -> str:
        """One log line."""
        return f"Fallback: {self.reason} (logged once, counted in the metrics)"


LogEvent: TypeAlias = PrefillLogged | DecodeLogged | RetractionLogged | FallbackLogged
