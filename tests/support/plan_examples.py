"""Small configs, model facts and platform facts, and the plan that they resolve to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.platform import Capabilities, Capability, DeviceInfo, ModelFacts, Plan, Support
from cardan.platform.resolve import PlatformFacts, resolve
from cardan.types import LayerKV

NATIVE = Capability(Support.NATIVE)
LACKS = Capability(Support.UNSUPPORTED, "no kernel for it")


def layer(**changes: Any) -> LayerKV:
    return replace(LayerKV(index=0, q_heads=4, kv_heads=2, k_dim=8, v_dim=8, scale=0.35), **changes)


def model(**changes: Any) -> ModelFacts:
    facts = ModelFacts(
        name="tiny",
        architecture="LlamaForCausalLM",
        family="llama",
        num_layers=1,
        hidden_size=32,
        intermediate_size=64,
        vocab_size=100,
        context_length=4096,
        layers=(layer(),),
        num_parameters=1000,
        weight_bytes=2000,
        weight_formats={"BF16": 10},
        native_dtype="bfloat16",
    )
    return replace(facts, **changes)


def platform(features: Mapping[str, Capability] | None = None, **changes: Any) -> PlatformFacts:
    base = {
        "dtype:bfloat16": NATIVE,
        "dtype:float32": NATIVE,
        "kv_dtype:bfloat16": NATIVE,
        "kv_dtype:float32": NATIVE,
        "attention:first": NATIVE,
        "attention:second": NATIVE,
        "overlap": NATIVE,
        "mixed_batch": NATIVE,
    }
    pages = changes.pop("page_sizes", (1, 16))
    notes = changes.pop("notes", ())
    capabilities = Capabilities({**base, **(features or {})}, pages, notes)
    defaults: dict[str, Any] = {"name": "npu", "device": DeviceInfo(index=0, name="chip"), "capabilities": capabilities}
    return PlatformFacts(**{**defaults, **changes})


def config(m: Any = None, p: Any = None, c: Any = None, s: Any = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(**(m or {})),
        platform=PlatformConfig(**(p or {})),
        cache=CacheConfig(**(c or {})),
        scheduler=SchedulerConfig(**(s or {})),
    )


def plan(asked: EngineConfig | None = None, facts: ModelFacts | None = None, on: PlatformFacts | None = None) -> Plan:
    return resolve(asked or config(), facts or model(), on or platform())
