"""Every setting is checked, and every setting is read by someone."""

from __future__ import annotations

import math
import re
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cardan.cache import EVICTION_POLICIES
from cardan.config import (
    RANGES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PlatformConfig,
    SchedulerConfig,
    ServerConfig,
    cache_dir,
    hub_cache_dir,
    hub_offline,
)
from cardan.errors import ConfigError
from cardan.scheduler import SCHEDULE_POLICIES

ROOT = Path(__file__).parents[1] / "runtime" / "cardan"

RESOLVE = "platform/resolve.py"
CONSUMED_BY = {
    "model.model": "weights/locate.py",
    "model.tokenizer": "weights/opening.py",
    "model.chat_template": "engine/model_files.py",
    "model.tool_call_parser": "server/chats/preparation.py",
    "model.reasoning_parser": "server/chats/preparation.py",
    "model.is_embedding": "server/generation.py",
    "model.embedding_pooling": "server/openai/embeddings.py",
    "model.served_model_name": "engine/frontend.py",
    "model.dtype": RESOLVE,
    "model.context_length": RESOLVE,
    "model.quantization": RESOLVE,
    "model.quantization_fallback": RESOLVE,
    "model.revision": "weights/locate.py",
    "model.sampling_defaults": "engine/preparation.py",
    "model.random_weights": "engine/preparation.py",
    "platform.platform": "engine/preparation.py",
    "platform.attention_backend": RESOLVE,
    "platform.prefill_attention_backend": RESOLVE,
    "platform.decode_attention_backend": RESOLVE,
    "platform.kv_cache_dtype": RESOLVE,
    "platform.disable_graph": RESOLVE,
    "platform.tp_size": RESOLVE,
    "platform.options": RESOLVE,
    "cache.mem_fraction_static": RESOLVE,
    "cache.max_total_tokens": RESOLVE,
    "cache.page_size": RESOLVE,
    "cache.disable_radix_cache": RESOLVE,
    "cache.radix_eviction_policy": RESOLVE,
    "scheduler.schedule_policy": RESOLVE,
    "scheduler.schedule_conservativeness": RESOLVE,
    "scheduler.chunked_prefill_size": RESOLVE,
    "scheduler.max_prefill_tokens": RESOLVE,
    "scheduler.max_running_requests": RESOLVE,
    "scheduler.max_queued_requests": RESOLVE,
    "scheduler.enable_mixed_chunk": RESOLVE,
    "scheduler.prefill_decode_interval": RESOLVE,
    "scheduler.enable_priority_scheduling": RESOLVE,
    "scheduler.priority_scheduling_preemption_threshold": RESOLVE,
    "scheduler.disable_overlap_schedule": RESOLVE,
    "scheduler.allow_auto_truncate": RESOLVE,
    "scheduler.random_seed": RESOLVE,
    "scheduler.enable_return_hidden_states": "engine/frontend.py",
    "scheduler.enable_custom_logit_processor": "engine/frontend.py",
    "grammar.grammar_backend": "engine/grammars.py",
    "grammar.grammar_compile_timeout_s": "engine/grammars.py",
    "grammar.json_whitespace": "engine/grammars.py",
    "grammar.disable_jump_forward": "engine/grammars.py",
    "server.host": "server/serve.py",
    "server.port": "server/serve.py",
    "server.api_key": "server/app.py",
    "server.admin_api_key": "server/app.py",
    "server.cors_allow_origins": "server/app.py",
    "server.ssl_certfile": "server/serve.py",
    "server.ssl_keyfile": "server/serve.py",
    "server.ssl_keyfile_password": "server/serve.py",
    "server.stream_interval": "engine/detokenizer_process.py",
    "server.enable_cache_report": "server/openai/usage.py",
    "server.enable_metrics": "server/app.py",
    "server.max_body_bytes": "server/native/generate.py",
    "server.drain_timeout_s": "server/serve.py",
    "server.request_timeout_s": "server/generation.py",
    "server.client_timeout_s": "server/serve.py",
    "server.log_requests": "server/watching/observers.py",
    "server.log_request_contents": "server/watching/request_log.py",
    "server.log_format": "engine/process_log.py",
    "server.profile_folder": "engine/scheduler_process.py",
    "server.crash_dump_folder": "server/watching/observers.py",
    "server.otlp_traces_endpoint": "server/watching/observers.py",
    "server.log_level": "engine/process_log.py",
}
"""Who reads each field of the config. What ``resolve`` reads is in the plan."""

PLAN_CONSUMED_BY = {
    "context_length": "engine/preparation.py",
    "dtype": "runner/device.py",
    "kv_cache_dtype": "engine/preparation.py",
    "prefill_attention_backend": "runner/device.py",
    "decode_attention_backend": "runner/device.py",
    "page_size": "engine/preparation.py",
    "radix_cache": "engine/preparation.py",
    "chunked_prefill_size": "engine/preparation.py",
    "max_prefill_tokens": "engine/preparation.py",
    "max_running_requests": "engine/preparation.py",
    "max_total_tokens": "engine/preparation.py",
    "mem_fraction_static": "engine/preparation.py",
    "overlap": "engine/core.py",
    "graph": "runner/device.py",
    "enable_mixed_chunk": "engine/preparation.py",
    "quantization": "runner/device.py",
    "quantization_fallback": "runner/device.py",
    "radix_eviction_policy": "engine/preparation.py",
    "schedule_policy": "engine/preparation.py",
    "schedule_conservativeness": "engine/preparation.py",
    "max_queued_requests": "engine/preparation.py",
    "prefill_decode_interval": "engine/preparation.py",
    "enable_priority_scheduling": "engine/preparation.py",
    "priority_scheduling_preemption_threshold": "engine/preparation.py",
    "allow_auto_truncate": "engine/preparation.py",
    "random_seed": "engine/preparation.py",
    "sampling_defaults": "engine/scheduler_process.py",
}
"""Who reads each setting of the plan."""


def test_every_field_names_its_reader() -> None:
    expected = {
        f"{group.name}.{item.name}"
        for group in fields(EngineConfig)
        for item in fields(getattr(EngineConfig(), group.name))
    }
    assert set(CONSUMED_BY) == expected


def test_a_value_that_is_none_of_those_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--log-level must be one of debug, info, warning, error, got 'critical'\."):
        EngineConfig(server=ServerConfig(log_level="critical"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--dtype must be one of auto, .*, got 'fp8'\."):
        EngineConfig(model=ModelConfig(dtype="fp8"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONSUMED_BY)
def test_the_reader_of_a_field_reads_it(name: str) -> None:
    source = (ROOT / CONSUMED_BY[name]).read_text()
    assert re.search(rf"\.{name.partition('.')[2]}\b", source), f"{CONSUMED_BY[name]} does not read {name}"


def test_every_setting_of_the_plan_names_its_reader() -> None:
    import plan_examples

    settings = set(plan_examples.plan().settings) | {"max_total_tokens", "sampling_defaults"}
    assert set(PLAN_CONSUMED_BY) == settings


@pytest.mark.parametrize("name", PLAN_CONSUMED_BY)
def test_the_reader_of_a_setting_reads_it(name: str) -> None:
    source = (ROOT / PLAN_CONSUMED_BY[name]).read_text()
    phase, _, rest = name.partition("_")
    spelled = rf"plan\.{name}\b|[\"']{name}[\"']"
    if rest == "attention_backend":
        spelled += rf"|_{rest}.*{phase}"
    assert re.search(spelled, source), f"{PLAN_CONSUMED_BY[name]} does not read {name}"


def numeric_fields() -> dict[str, set[type]]:
    """Fields of the config that hold numbers, with the types they may have."""
    found = {}
    for group in fields(EngineConfig):
        for name, hint in typing.get_type_hints(type(getattr(EngineConfig(), group.name))).items():
            kinds = set(typing.get_args(hint)) or {hint}
            if kinds & {int, float}:
                found[f"{group.name}.{name}"] = kinds - {type(None)}
    return found


def with_value(name: str, value: Any) -> EngineConfig:
    group, _, field = name.partition(".")
    beside = {"enable_priority_scheduling": True} if field.startswith("priority") else {}
    return EngineConfig(**{group: type(getattr(EngineConfig(), group))(**{field: value}, **beside)})


def test_every_number_has_a_range() -> None:
    assert set(RANGES) == set(numeric_fields())
    assert {name for name, bounds in RANGES.items() if not bounds.whole} == {
        name for name, kinds in numeric_fields().items() if float in kinds
    }


@pytest.mark.parametrize("name", RANGES)
def test_a_number_is_taken_inside_its_range_and_nowhere_else(name: str) -> None:
    bounds = RANGES[name]
    step = 1 if bounds.whole else 1e-3
    edges = [bounds.low, bounds.high]
    inside, outside = (edges, [bounds.low - step, bounds.high + step]) if not bounds.is_open else ([], edges)
    inside = inside or [bounds.low + step, bounds.high - step]
    for value in inside:
        with_value(name, value)
    wrong: list[Any] = [*outside, -(2**70), 2**70, 10**5000]
    wrong += [] if bounds.whole else [math.nan, math.inf, -math.inf]
    flag = re.escape("--" + name.partition(".")[2].replace("_", "-"))
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"^{flag} must be {re.escape(bounds.describe())}, got .+\.$"):
            with_value(name, value)
    for value in (True, "7", [7], *([1.5] if bounds.whole else [])):
        with pytest.raises(ConfigError, match=rf"^{flag} must be a (whole )?number, got {re.escape(repr(value))}\.$"):
            with_value(name, value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"cache": CacheConfig(mem_fraction_static=1.0)},
        "--mem-fraction-static must be between 0 and 1, neither of them, got 1.0",
    ),
    ({"cache": CacheConfig(max_total_tokens=0)}, "--max-total-tokens must be between 1 and 1073741824, got 0"),
    (
        {"scheduler": SchedulerConfig(random_seed=-1)},
        "--random-seed must be between 0 and 18446744073709551615, got -1",
    ),
    ({"model": ModelConfig(random_weights=-1)}, "--random-weights must be between 0 and 18446744073709551615, got -1"),
    (
        {"scheduler": SchedulerConfig(chunked_prefill_size=-2)},
        "--chunked-prefill-size must be between 1 and 2147483647, or -1 for no chunking, got -2",
    ),
    (
        {"scheduler": SchedulerConfig(priority_scheduling_preemption_threshold=-1)},
        "--priority-scheduling-preemption-threshold must be between 0 and 4294967296, got -1",
    ),
    ({"server": ServerConfig(drain_timeout_s=-1.0)}, "--drain-timeout-s must be between 0 and 86400 (a day), got -1.0"),
    (
        {"scheduler": SchedulerConfig(schedule_policy="lpm"), "cache": CacheConfig(disable_radix_cache=True)},
        "--schedule-policy lpm orders by cached prefixes, but --disable-radix-cache keeps none. Drop one",
    ),
    ({"scheduler": SchedulerConfig(schedule_policy="priority")}, "priority needs --enable-priority-scheduling"),
    (
        {"cache": CacheConfig(disable_radix_cache=True, radix_eviction_policy="lfu")},
        "--radix-eviction-policy lfu has no effect with --disable-radix-cache. Drop one",
    ),
    (
        {"scheduler": SchedulerConfig(priority_scheduling_preemption_threshold=5)},
        "--priority-scheduling-preemption-threshold 5 has no effect without --enable-priority-scheduling",
    ),
    (
        {"model": ModelConfig(embedding_pooling="mean")},
        "--embedding-pooling mean has no effect without --is-embedding. Drop the one",
    ),
    ({"server": ServerConfig(host="")}, "--host must not be empty"),
    ({"server": ServerConfig(api_key="")}, "--api-key must not be empty, got ''. Leave it out"),
    ({"model": ModelConfig(tokenizer="")}, "--tokenizer must not be empty"),
    (
        {"scheduler": SchedulerConfig(enable_mixed_chunk=True, chunked_prefill_size=-1)},
        "--enable-mixed-chunk needs chunked prefill",
    ),
    (
        {
            "platform": PlatformConfig(
                attention_backend="a", prefill_attention_backend="b", decode_attention_backend="c"
            )
        },
        "--attention-backend a has no effect beside both",
    ),
]


@pytest.mark.parametrize(("groups", "message"), REFUSED, ids=[row[1][:50] for row in REFUSED])
def test_what_contradicts_itself_is_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**groups)
    assert message in str(caught.value)


def test_the_help_names_the_policies_that_exist() -> None:
    assert set(_named(SchedulerConfig, "schedule_policy")) == set(SCHEDULE_POLICIES)
    assert set(_named(CacheConfig, "radix_eviction_policy")) == set(EVICTION_POLICIES)


def _named(cls: type[Any], field: str) -> list[str]:
    line = re.search(rf" {field}: (.*?)(?=\n        \w+:|\Z)", str(cls.__doc__), re.DOTALL)
    assert line is not None
    return re.findall(r"``([\w-]+)``", line.group(1))


def test_where_models_are_kept() -> None:
    assert cache_dir({"CARDAN_CACHE": "/a"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/cardan")
    assert cache_dir({}) == Path.home() / ".cache" / "cardan"
    assert hub_cache_dir({"HF_HUB_CACHE": "/h"}) == Path("/h")
    assert hub_cache_dir({"HF_HOME": "/h"}) == Path("/h/hub")
    assert hub_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert [hub_offline({"HF_HUB_OFFLINE": text}) for text in ("1", "TRUE", "0", "")] == [True, True, False, False]
