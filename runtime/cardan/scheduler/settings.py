"""The resolved numbers that a scheduler works with.

It resolves nothing: flags and the plan have been turned into these before.
"""

from __future__ import annotations

from dataclasses import dataclass

from cardan.cache import EVICTION_POLICIES
from cardan.errors import ConfigError
from cardan.scheduler.ordering import SCHEDULE_POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Everything that decides who runs when.

    Attributes:
        num_slots: tokens the KV pool holds, without the padding page; a multiple of ``page_size``.
        page_size: tokens per page.
        num_groups: KV groups of the model; all groups keep a sequence in the same slots.
        context_length: longest sequence.
        vocab_size: ids from here on are errors.
        max_running_requests: most rows at once.
        chunked_prefill_size: most tokens of one prefill pass; -1 for no chunking.
        max_prefill_tokens: most uncached prompt tokens of one prefill pass; a longer prompt runs alone.
        max_queued_requests: most waiting requests, retracted ones not counted; None for no limit.
        schedule_policy: order of the queue.
        schedule_conservativeness: above 1 reserves more room for output, below 1 less.
        enable_mixed_chunk: decode rows ride in the prefill pass.
        prefill_decode_interval: decode passes that run between two prefill passes.
        enable_priority_scheduling: higher priority goes first and may preempt.
        priority_scheduling_preemption_threshold: a difference of priority above this preempts.
        allow_auto_truncate: cut prompts that are too long instead of refusing them.
        disable_radix_cache: never reuse a prefix.
        radix_eviction_policy: which unlocked prefix goes first.
        random_seed: for requests that bring no seed, and for the ``random`` policy.
        decode_log_interval: decode steps between two log lines.
        mixed_batch: rows of one token and rows of several may run in one pass.
        jump_forward: tokens that a grammar forces are computed in one pass, without being sampled one by one.
    """

    num_slots: int
    page_size: int = 1
    num_groups: int = 1
    context_length: int
    vocab_size: int
    max_running_requests: int
    chunked_prefill_size: int = -1
    max_prefill_tokens: int = 16384
    max_queued_requests: int | None = None
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    prefill_decode_interval: int = 0
    enable_priority_scheduling: bool = False
    priority_scheduling_preemption_threshold: int = 10
    allow_auto_truncate: bool = False
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    random_seed: int = 0
    decode_log_interval: int = 40
    mixed_batch: bool = True
    jump_forward: bool = True

    def __post_init__(self) -> None:
        check_policies(self.schedule_policy, self.radix_eviction_policy)
        _check_policy_fits(self)
        if self.max_running_requests < 1:
            raise ConfigError(f"--max-running-requests must be at least 1, got {self.max_running_requests}.")
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < self.page_size:
            raise ConfigError(
                f"--chunked-prefill-size must be at least one page ({self.page_size} tokens), or -1 for no chunking, "
                f"got {self.chunked_prefill_size}."
            )
        if self.max_input_tokens < 1:
            raise ConfigError(
                f"A KV pool of {self.num_slots} tokens in pages of {self.page_size} and a context of "
                f"{self.context_length} tokens leave no room for a prompt. Raise --max-total-tokens or "
                "--context-length, or lower --page-size."
            )

    @property
    def max_input_tokens(self) -> int:
        """Longest prompt that is admitted: room is kept for some output and for the pool's last page."""
        by_formula = min(self.context_length - 1, self.num_slots - 1) - 5
        return min(by_formula, self.num_slots - self.page_size - 2)

    @property
    def num_rows(self) -> int:
        """Rows of the row-to-slot table, the padding row included."""
        return self.max_running_requests + 1


def check_policies(schedule_policy: str, radix_eviction_policy: str) -> None:
    """Check that there are policies of these names; plugins must have added theirs.

    Raises:
        ConfigError: one of the names is unknown.
    """
    if schedule_policy not in SCHEDULE_POLICIES:
        known = ", ".join(SCHEDULE_POLICIES)
        raise ConfigError(f"--schedule-policy must be one of {known}, got {schedule_policy!r}.")
    if radix_eviction_policy not in EVICTION_POLICIES:
        known = ", ".join(EVICTION_POLICIES)
        raise ConfigError(f"--radix-eviction-policy must be one of {known}, got {radix_eviction_policy!r}.")


def _check_policy_fits(settings: SchedulerSettings) -> None:
    policy = settings.schedule_policy
    if SCHEDULE_POLICIES[policy].needs_cache and settings.disable_radix_cache:
        raise ConfigError(
            f"--schedule-policy {policy} orders by cached prefixes, but --disable-radix-cache keeps none. "
            "Drop one of the two."
        )
    if policy == "priority" and not settings.enable_priority_scheduling:
        raise ConfigError("--schedule-policy priority needs --enable-priority-scheduling.")
