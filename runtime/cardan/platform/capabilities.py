"""What a platform says it can do, feature by feature, with the reason and how that was verified.

It decides nothing: ``resolve`` compares these answers with what the user asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Support(enum.StrEnum):
    """How well a feature works."""

    NATIVE = "native"
    EMULATED = "emulated"
    UNSUPPORTED = "unsupported"


class Evidence(enum.StrEnum):
    """How it was verified that a feature works.

    ``HARDWARE``: run on the device itself. ``SIMULATOR``: run on a stand-in for the device. ``INTERPRETED``: the kernel
    was run by its language's interpreter on the host. ``COMPILED``: compiled for the device, never run. ``NONE``: by
    reading only.
    """

    HARDWARE = "hardware"
    SIMULATOR = "simulator"
    INTERPRETED = "interpreted"
    COMPILED = "compiled"
    NONE = "none"


class Feature(enum.StrEnum):
    """Features that every platform answers for.

    Families with a parameter are written ``family:parameter``: ``dtype:bfloat16``,
    ``kv_dtype:float32``, ``weights:Q4_1``, ``attention:torch``.
    """

    SLIDING_WINDOW = "sliding_window"
    ATTENTION_SOFTCAP = "attention_softcap"
    ATTENTION_SINKS = "attention_sinks"
    GRAPH = "graph"
    OVERLAP = "overlap"
    SAMPLING = "sampling"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    HOST_LOGITS = "host_logits"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    GRAMMAR_MASK = "grammar_mask"
    HIDDEN_STATES = "hidden_states"
    INPUT_EMBEDS = "input_embeds"
    TENSOR_PARALLEL = "tensor_parallel"
    MIXED_BATCH = "mixed_batch"


@dataclass(frozen=True, slots=True)
class Requantized:
    """What weights are packed in where their own values are not kept: codes from the least of a group to the greatest.

    Attributes:
        bits: of a code.
        group: neighbouring weights of a row that share a scale and an offset.
    """

    bits: int
    group: int


@dataclass(frozen=True, slots=True)
class Capability:
    """The answer for one feature.

    Attributes:
        support: how well it works.
        reason: why it is emulated or unsupported, or what implements it.
        evidence: how the answer was verified.
        alternative: what works instead, where something does.
        requantized: for a weight format that is packed in another of the platform's own, and for one that is made at
            load, what that is; None where weights keep their values.
    """

    support: Support
    reason: str = ""
    evidence: Evidence = Evidence.NONE
    alternative: str = ""
    requantized: Requantized | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """All answers of one platform for one device.

    Attributes:
        features: answers by feature name (``Feature`` or ``family:parameter``).
        page_sizes: page sizes that the attention backends take, the preferred one first.
    """

    features: Mapping[str, Capability]
    page_sizes: tuple[int, ...] = (1,)
    notes: tuple[str, ...] = field(default=())

    def get(self, feature: str) -> Capability:
        """The answer for ``feature``; one that the platform does not mention is unsupported."""
        found = self.features.get(str(feature))
        if found is not None:
            return found
        return Capability(Support.UNSUPPORTED, "the platform does not mention it")

    def supports(self, feature: str) -> bool:
        """Whether ``feature`` works, natively or emulated."""
        return self.get(feature).support is not Support.UNSUPPORTED

    def family(self, name: str) -> tuple[str, ...]:
        """Parameters of a family that work: ``family("dtype")`` gives ``("bfloat16", "float32")``."""
        prefix = name + ":"
        return tuple(key[len(prefix) :] for key in self.features if key.startswith(prefix) and self.supports(key))
