"""Counts steps and tokens over time, and says when a line is to be logged.

It decides nothing.
"""

from __future__ import annotations

from cardan.scheduler.events import DecodeLogged, PrefillLogged
from cardan.scheduler.state import Extend, State

BLOCKED_RETRY_STEPS = 8
"""Decode steps after which a request that did not fit is tried again, since the reserve falls with each step."""


class Pace:
    """Throughputs and log lines.

    Attributes:
        gen_throughput: output tokens per second over the last log interval.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._last_prefill_s: float | None = None
        self._interval_start_s: float | None = None
        self._interval_tokens = 0
        self.gen_throughput = 0.0

    def note_prefill(self, extends: list[Extend], now_s: float) -> None:
        """A prefill pass was planned."""
        state = self._state
        state.totals["prefill_batches"] += 1
        new_tokens = sum(extend.count for extend in extends)
        new = [extend for extend in extends if extend.is_new]
        state.events.append(
            PrefillLogged(
                new_seq=len(new),
                new_token=new_tokens,
                cached_token=sum(extend.start for extend in new),
                token_usage=self._usage(),
                running=len(state.running),
                queue=len(state.waiting),
                pending_token=state.waiting.num_tokens + self._half_done_tokens(),
                input_throughput=_rate(new_tokens, self._last_prefill_s, now_s),
            )
        )
        self._last_prefill_s = now_s

    def note_decode(self, now_s: float) -> None:
        """A decode step was planned."""
        state = self._state
        state.totals["decode_steps"] += 1
        steps = state.totals["decode_steps"]
        if steps % BLOCKED_RETRY_STEPS == 0:
            state.head_blocked = False
        if self._interval_start_s is None:
            self._interval_start_s, self._interval_tokens = now_s, state.totals["generated_tokens"]
        if steps % state.settings.decode_log_interval == 0:
            self._log_decode(now_s)

    def _log_decode(self, now_s: float) -> None:
        state = self._state
        tokens = state.totals["generated_tokens"]
        self.gen_throughput = _rate(tokens - self._interval_tokens, self._interval_start_s, now_s)
        self._interval_start_s, self._interval_tokens = now_s, tokens
        state.events.append(
            DecodeLogged(
                running=len(state.running),
                token=state.used_tokens,
                token_usage=self._usage(),
                gen_throughput=self.gen_throughput,
                queue=len(state.waiting),
            )
        )

    def _usage(self) -> float:
        return self._state.used_tokens / self._state.settings.num_slots

    def _half_done_tokens(self) -> int:
        request = self._state.half_done
        if request is None:
            return 0
        return int(request.sequence().shape[0] - self._state.memory.arrays.seq_len[request.row])


def _rate(count: int, since_s: float | None, now_s: float) -> float:
    return 0.0 if since_s is None or now_s <= since_s else count / (now_s - since_s)
