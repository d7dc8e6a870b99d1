"""The plan: every setting as it was resolved, with its source and the reason.

It starts nothing and touches no device; ``resolve`` is pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cardan.platform.device import DeviceInfo
from cardan.platform.model import ModelFacts


class SettingSource(enum.StrEnum):
    """Where a value in the plan came from."""

    FLAG = "flag"
    DEFAULT = "default"
    PLATFORM = "platform"
    MODEL = "model"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved value."""

    value: Any
    source: SettingSource
    why: str


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """What happens to the weights of one format.

    Attributes:
        fmt: the format in the checkpoint.
        tensors: how many tensors have it.
        native: a GEMM of the platform takes it as it is; otherwise it is widened at load.
        why: which GEMM, or why none.
    """

    fmt: str
    tensors: int
    native: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that was decided before the engine starts, and what was measured while it did.

    ``settings`` has at least: ``dtype``, ``kv_cache_dtype``, ``page_size``, ``context_length``,
    ``chunked_prefill_size``, ``max_prefill_tokens``, ``max_running_requests``, ``prefill_attention_backend``,
    ``decode_attention_backend``, ``overlap``, ``graph``, ``quantization_fallback``, ``random_seed``; and
    ``max_total_tokens`` once memory was measured.
    """

    platform: str
    device: DeviceInfo
    model: ModelFacts
    settings: Mapping[str, Setting]
    formats: tuple[FormatPlan, ...] = ()
    platform_options: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    memory: tuple[tuple[str, int, str], ...] = ()

    def value(self, name: str) -> Any:
        """Value of a setting; a name that was not resolved is a KeyError."""
        return self.settings[name].value

    def with_setting(self, name: str, value: Any, source: SettingSource, why: str) -> Plan:
        """A new plan in which one setting has another value and says why."""
        return replace(self, settings={**self.settings, name: Setting(value, source, why)})

    def with_notes(self, *notes: str) -> Plan:
        """A new plan with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    @property
    def dtype(self) -> str:
        """Type of the activations."""
        return str(self.value("dtype"))

    @property
    def kv_cache_dtype(self) -> str:
        """Element type of the KV pool."""
        return str(self.value("kv_cache_dtype"))

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return int(self.value("page_size"))

    @property
    def context_length(self) -> int:
        """Longest sequence."""
        return int(self.value("context_length"))

    @property
    def chunked_prefill_size(self) -> int:
        """Most tokens of one prefill pass; -1 for no chunking."""
        return int(self.value("chunked_prefill_size"))

    @property
    def max_running_requests(self) -> int:
        """Most rows in the running set."""
        return int(self.value("max_running_requests"))

    @property
    def overlap(self) -> bool:
        """Whether step N+1 is launched before step N is read."""
        return bool(self.value("overlap"))
