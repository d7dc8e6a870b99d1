"""Resolving the plan: defaults with their source, and refusals with what would work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_examples import LACKS, NATIVE, config, layer, model, plan, platform

from cardan.config import EngineConfig
from cardan.errors import CardanError, ConfigError, PlatformApiError, UnsupportedError
from cardan.platform import (
    Availability,
    Capabilities,
    Capability,
    DeviceInfo,
    Feature,
    ModelFacts,
    OptionSpec,
    Plan,
    Platform,
    Recommendation,
    SettingSource,
    Support,
)
from cardan.platform.resolve import PlatformFacts, platform_facts, resolve
from cardan.types import KVKind


def source(resolved: Plan, name: str) -> tuple[Any, SettingSource]:
    return resolved.settings[name].value, resolved.settings[name].source


def test_the_plan_has_every_setting_it_promises_with_a_reason() -> None:
    promised = re.findall(r"``(\w+)``", str(Plan.__doc__).split("has at least:")[1].split("; and")[0])
    resolved = plan()
    assert len(promised) == 13
    assert set(promised) <= set(resolved.settings)
    assert all(setting.why for setting in resolved.settings.values())


def test_defaults() -> None:
    resolved = plan()
    assert source(resolved, "dtype") == ("bfloat16", SettingSource.MODEL)
    assert source(resolved, "kv_cache_dtype") == ("bfloat16", SettingSource.DEFAULT)
    assert source(resolved, "page_size") == (1, SettingSource.DEFAULT)
    assert source(resolved, "context_length") == (4096, SettingSource.MODEL)
    assert source(resolved, "chunked_prefill_size") == (2048, SettingSource.DEFAULT)
    assert source(resolved, "max_running_requests") == (64, SettingSource.DEFAULT)
    assert source(resolved, "prefill_attention_backend") == ("first", SettingSource.PLATFORM)
    assert source(resolved, "overlap") == (True, SettingSource.PLATFORM)
    assert source(resolved, "random_seed") == (0, SettingSource.DEFAULT)
    assert "max_total_tokens" not in resolved.settings


def test_recommendations_win_over_defaults_and_flags_over_recommendations() -> None:
    values = {
        "chunked_prefill_size": 512,
        "max_running_requests": 8,
        "page_size": 16,
        "dtype": "float32",
        "kv_cache_dtype": "bfloat16",
        "attention_backend": "second",
        "mem_fraction_static": 0.5,
    }
    on = platform(recommendations={name: Recommendation(value, f"why {name}") for name, value in values.items()})
    resolved = plan(on=on)
    assert {name: resolved.value(name) for name in values if name != "attention_backend"} == {
        name: value for name, value in values.items() if name != "attention_backend"
    }
    assert resolved.value("decode_attention_backend") == "second"
    assert resolved.settings["page_size"].why == "why page_size"
    flags = config(
        m={"dtype": "bfloat16"},
        p={"kv_cache_dtype": "float32", "prefill_attention_backend": "first"},
        c={"page_size": 1, "mem_fraction_static": 0.9},
        s={"chunked_prefill_size": 100, "max_running_requests": 3},
    )
    resolved = plan(flags, on=on)
    for name, value in {
        "dtype": "bfloat16",
        "kv_cache_dtype": "float32",
        "page_size": 1,
        "mem_fraction_static": 0.9,
        "chunked_prefill_size": 100,
        "max_running_requests": 3,
        "prefill_attention_backend": "first",
    }.items():
        assert source(resolved, name) == (value, SettingSource.FLAG)
    assert source(resolved, "decode_attention_backend") == ("second", SettingSource.PLATFORM)


def test_the_general_attention_flag_serves_the_phase_without_its_own() -> None:
    resolved = plan(config(p={"attention_backend": "second", "decode_attention_backend": "first"}))
    assert resolved.value("prefill_attention_backend") == "second"
    assert resolved.value("decode_attention_backend") == "first"


def test_a_platform_that_attends_by_itself_has_no_backend_to_choose() -> None:
    on = replace(platform(), capabilities=Capabilities({"dtype:float32": NATIVE, "kv_dtype:float32": NATIVE}))
    assert plan(on=on).value("decode_attention_backend") is None
    with pytest.raises(UnsupportedError, match=r"--attention-backend has no choices on platform 'npu', got 'x'\. Drop"):
        plan(config(p={"attention_backend": "x"}), on=on)


def test_a_type_the_platform_lacks_is_replaced_with_the_reason() -> None:
    resolved = plan(facts=model(native_dtype="float16"))
    assert source(resolved, "dtype") == ("bfloat16", SettingSource.PLATFORM)
    assert "float16" in resolved.settings["dtype"].why
    resolved = plan(config(m={"dtype": "float32"}), on=platform({"kv_dtype:float32": LACKS}))
    assert source(resolved, "kv_cache_dtype") == ("bfloat16", SettingSource.PLATFORM)


def test_page_size_defaults_to_what_attention_needs() -> None:
    assert source(plan(on=platform(page_sizes=(64, 32))), "page_size") == (64, SettingSource.PLATFORM)


def test_large_pages_are_told() -> None:
    on = platform(page_sizes=(128,), notes=("a note of the platform",))
    assert plan(on=on).notes == (
        "a note of the platform",
        "prefixes are shared in whole pages of 128 tokens; shorter ones are computed again",
    )
    assert len(plan(config(c={"disable_radix_cache": True}), on=on).notes) == 1


def test_overlap_and_graph_fall_back_with_the_reason() -> None:
    resolved = plan(on=platform({"overlap": Capability(Support.UNSUPPORTED, "steps block")}))
    assert source(resolved, "overlap") == (False, SettingSource.PLATFORM)
    assert "steps block" in resolved.settings["overlap"].why
    resolved = plan(
        config(s={"disable_overlap_schedule": True}, p={"disable_graph": True}), on=platform({"graph": NATIVE})
    )
    assert source(resolved, "overlap") == (False, SettingSource.FLAG)
    assert source(resolved, "graph") == (False, SettingSource.FLAG)
    assert plan(on=platform({"graph": NATIVE})).value("graph") is True


def test_the_pool_is_cut_to_pages_and_bounds_the_rows() -> None:
    resolved = plan(config(c={"max_total_tokens": 50, "page_size": 16}))
    assert source(resolved, "max_total_tokens") == (48, SettingSource.FLAG)
    assert resolved.value("max_running_requests") == 3
    with pytest.raises(ConfigError, match=r"--max-running-requests must be at most 3.*got 4\. Lower it"):
        plan(config(c={"max_total_tokens": 50, "page_size": 16}, s={"max_running_requests": 4}))


def test_weight_formats_are_planned() -> None:
    facts = model(weight_formats={"Q4_1": 210, "F32": 61, "Q6_K": 3})
    on = platform({"weights:Q4_1": Capability(Support.NATIVE, "int4 GEMM"), "weights:Q6_K": LACKS})
    formats = {plan_.fmt: plan_ for plan_ in plan(facts=facts, on=on).formats}
    assert (formats["Q4_1"].native, formats["Q4_1"].tensors, formats["Q4_1"].why) == (True, 210, "int4 GEMM")
    assert formats["F32"].native
    assert not formats["Q6_K"].native
    assert "no kernel for it" in formats["Q6_K"].why


def test_refused_widening_names_formats_and_platforms_that_have_them() -> None:
    facts = model(weight_formats={"Q4_1": 210, "Q6_K": 3, "F32": 1})
    on = platform(claimed_elsewhere={"Q4_1": ("other", "third")})
    with pytest.raises(UnsupportedError) as caught:
        plan(config(m={"quantization_fallback": "refuse"}), facts, on)
    message = str(caught.value)
    assert "Q4_1 (210 tensors; taken by other, third)" in message
    assert "Q6_K (3 tensors; taken by no other)" in message
    assert "F32" not in message
    assert "Pass --quantization-fallback auto" in message


def test_quantization_names_the_format_of_most_weights() -> None:
    facts = model(weight_formats={"Q4_1": 210})
    assert plan(config(m={"quantization": "q4_1"}), facts).value("quantization") == "Q4_1"
    assert plan(config(m={"quantization": "bf16"})).value("quantization") == "BF16"
    offers = platform({"quantize:fast_q4": NATIVE})
    assert plan(config(m={"quantization": "FAST_q4"}), on=offers).value("quantization") == "fast_q4"
    with pytest.raises(UnsupportedError, match=r"or one that the platform makes at load \(fast_q4\), got 'awq'"):
        plan(config(m={"quantization": "awq"}), facts, on=offers)
    for other in ("q8_0", "awq"):
        with pytest.raises(UnsupportedError, match=rf"'tiny' is in \(Q4_1\).*got '{other}'\. Drop the flag"):
            plan(config(m={"quantization": other}), facts)


def test_the_seed() -> None:
    assert resolve(config(), model(), platform(), drawn_seed=77).settings["random_seed"].why == "drawn at start-up"
    assert resolve(config(s={"random_seed": 5}), model(), platform(), drawn_seed=77).value("random_seed") == 5


REFUSED: list[tuple[EngineConfig, dict[str, Any], type[CardanError], str]] = [
    (
        config(c={"page_size": 48}),
        {"page_sizes": (16, 32, 64)},
        UnsupportedError,
        "--page-size must be one of 16, 32, 64 on platform 'npu', got 48. Pass --page-size 64.",
    ),
    (
        config(c={"page_size": 128}),
        {"page_sizes": (16, 32, 64)},
        UnsupportedError,
        "--page-size must be one of 16, 32, 64 on platform 'npu', got 128. Pass --page-size 64.",
    ),
    (
        config(p={"tp_size": 2}),
        {"features": {"tensor_parallel": Capability(Support.UNSUPPORTED, "one chip")}},
        UnsupportedError,
        "--tp-size must be 1 on platform 'npu', got 2: one chip. Pass --tp-size 1",
    ),
    (
        config(p={"tp_size": 2}),
        {"features": {"tensor_parallel": NATIVE}},
        UnsupportedError,
        "got 2: the engine runs one rank.",
    ),
    (
        config(m={"dtype": "float16"}),
        {"features": {"dtype:float16": LACKS}},
        UnsupportedError,
        "--dtype must be one of bfloat16, float32 on platform 'npu', got 'float16' (no kernel for it). "
        "Pass --dtype bfloat16.",
    ),
    (
        config(m={"dtype": "float16"}),
        {"features": {"dtype:float16": replace(LACKS, alternative="Pass --dtype float32")}},
        UnsupportedError,
        "got 'float16' (no kernel for it). Pass --dtype float32.",
    ),
    (
        config(p={"kv_cache_dtype": "fp8_e4m3"}),
        {},
        UnsupportedError,
        "--kv-cache-dtype must be one of bfloat16, float32 on platform 'npu', got 'fp8_e4m3'. "
        "Pass --kv-cache-dtype bfloat16.",
    ),
    (
        config(p={"prefill_attention_backend": "flash"}),
        {},
        UnsupportedError,
        "--prefill-attention-backend must be one of first, second on platform 'npu', got 'flash'. "
        "Pass --prefill-attention-backend first.",
    ),
    (
        config(),
        {"recommendations": {"attention_backend": Recommendation("gone", "")}},
        UnsupportedError,
        "the recommended attention_backend must be one of first, second on platform 'npu', got 'gone'. "
        "Pass --attention-backend first.",
    ),
    (
        config(m={"context_length": 5000}),
        {},
        ConfigError,
        "--context-length must be at most 4096, the limit of model 'tiny', got 5000. Pass --context-length 4096",
    ),
    (
        config(m={"context_length": 6}),
        {},
        ConfigError,
        "--context-length must be at least 7 to admit any request, got 6.",
    ),
    (
        config(c={"max_total_tokens": 6}),
        {},
        ConfigError,
        "--max-total-tokens must be at least 7 with pages of 1 tokens to admit any request, got 6.",
    ),
    (
        config(c={"max_total_tokens": 17, "page_size": 16}),
        {},
        ConfigError,
        "--max-total-tokens must be at least 32 with pages of 16 tokens",
    ),
    (
        config(s={"chunked_prefill_size": 8}, c={"page_size": 16}),
        {},
        ConfigError,
        "--chunked-prefill-size must be at least the page size of 16, got 8.",
    ),
    (
        config(s={"enable_mixed_chunk": True}),
        {"features": {"mixed_batch": LACKS}},
        UnsupportedError,
        "--enable-mixed-chunk is not supported on platform 'npu': no kernel for it. Drop the flag",
    ),
    (
        config(p={"options": ("threads=2",)}),
        {},
        ConfigError,
        "--platform-option 'threads' is unknown on platform 'npu'; known: none.",
    ),
]


@pytest.mark.parametrize(("asked", "changes", "kind", "message"), REFUSED, ids=[row[3][:60] for row in REFUSED])
def test_refusals(asked: EngineConfig, changes: dict[str, Any], kind: type[CardanError], message: str) -> None:
    with pytest.raises(kind) as caught:
        plan(asked, on=platform(changes.pop("features", None), **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("needs", "feature"),
    [
        ({"window": 100, "kind": KVKind.SLIDING}, Feature.SLIDING_WINDOW),
        ({"softcap": 50.0}, Feature.ATTENTION_SOFTCAP),
        ({"sinks": True}, Feature.ATTENTION_SINKS),
        ({"kind": KVKind.LATENT}, "kv_kind:latent"),
        ({"kind": KVKind.STATE}, "kv_kind:state"),
    ],
)
def test_a_model_whose_attention_the_platform_lacks_is_refused(needs: dict[str, Any], feature: str) -> None:
    facts = model(layers=(layer(), layer(index=1, **needs)))
    on = platform({str(feature): LACKS})
    with pytest.raises(
        UnsupportedError, match=rf"needs {feature} in layers 1, which .*'npu'.*: no kernel for it\. Choose"
    ):
        plan(facts=facts, on=on)
    assert plan(facts=facts, on=platform({str(feature): NATIVE})).model is facts


def test_a_window_wider_than_the_context_needs_no_support() -> None:
    facts = model(layers=(layer(window=4096, kind=KVKind.SLIDING),))
    assert plan(facts=facts).context_length == 4096


OPTIONS = (
    OptionSpec(name="threads", kind=int, default=2, help=""),
    OptionSpec(name="share", kind=float, default=0.5, help=""),
    OptionSpec(name="pin", kind=bool, default=True, help=""),
    OptionSpec(name="isa", kind=str, default="best", help="", choices=("best", "plain")),
)


def test_platform_options_are_parsed_by_kind() -> None:
    on = platform(options=OPTIONS)
    assert plan(on=on).platform_options == {"threads": 2, "share": 0.5, "pin": True, "isa": "best"}
    given = ("threads=4", "share=0.25", "pin=off", "isa=plain")
    assert plan(config(p={"options": given}), on=on).platform_options == {
        "threads": 4,
        "share": 0.25,
        "pin": False,
        "isa": "plain",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("thread=4",), "'thread' is unknown on platform 'npu'; known: isa, pin, share, threads."),
        (("threads=four",), "threads must be of type int, got 'four'. The default is 2."),
        (("pin=maybe",), "pin must be of type bool, got 'maybe'. The default is True."),
        (("isa=fancy",), "isa must be one of best, plain, got 'fancy'. The default is 'best'."),
        (("threads",), "must be name=value, got 'threads'."),
        (("threads=1", "threads=2"), "'threads' was given twice."),
    ],
)
def test_platform_options_that_are_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(config(p={"options": given}), on=platform(options=OPTIONS))
    assert message in str(caught.value)


class Recommending(Platform):
    name = "npu"

    def __init__(self, values: dict[str, Recommendation]) -> None:
        self.values = values

    def probe(self) -> Availability:
        return Availability(1, "")

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(index=0, name="chip"),)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        return platform().capabilities

    def options(self) -> tuple[OptionSpec, ...]:
        return OPTIONS

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        return self.values

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> Any:
        raise AssertionError("asking a platform for facts must not open a device")


def test_platform_facts_asks_the_platform() -> None:
    plugin = Recommending({"page_size": Recommendation(16, "pages")})
    facts = platform_facts(plugin, plugin.devices()[0], model(), {"Q4_1": ("other",)})
    assert facts == PlatformFacts(
        name="npu",
        device=DeviceInfo(index=0, name="chip"),
        capabilities=platform().capabilities,
        options=OPTIONS,
        recommendations={"page_size": Recommendation(16, "pages")},
        claimed_elsewhere={"Q4_1": ("other",)},
    )


def test_a_recommendation_nobody_reads_is_refused() -> None:
    plugin = Recommending({"chunk_prefill": Recommendation(16, "")})
    with pytest.raises(PlatformApiError, match="'npu' recommends chunk_prefill, which no platform may"):
        platform_facts(plugin, plugin.devices()[0], model())


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    optional = lambda values: st.none() | values  # noqa: E731
    return config(
        m={
            "dtype": draw(st.sampled_from(["auto", "float32", "float16"])),
            "context_length": draw(optional(st.integers(1, 5000))),
            "quantization": draw(optional(st.sampled_from(["bf16", "q4_1", "awq"]))),
            "quantization_fallback": draw(st.sampled_from(["auto", "refuse"])),
        },
        p={
            "attention_backend": draw(optional(st.sampled_from(["first", "none"]))),
            "kv_cache_dtype": draw(st.sampled_from(["auto", "float32", "int8"])),
            "options": draw(st.sampled_from([(), ("a=1",)])),
        },
        c={
            "page_size": draw(optional(st.integers(1, 64))),
            "max_total_tokens": draw(optional(st.integers(1, 10000))),
        },
        s={
            "chunked_prefill_size": draw(optional(st.integers(1, 4096) | st.just(-1))),
            "max_running_requests": draw(optional(st.integers(1, 512))),
            "disable_overlap_schedule": draw(st.booleans()),
        },
    )


@given(configs(), st.sampled_from([(1, 16), (16, 32, 64), (1,)]), st.sampled_from(["Q4_1", "BF16"]))
def test_resolve_is_pure(asked: EngineConfig, pages: tuple[int, ...], fmt: str) -> None:
    """The same arguments give the same plan or the same refusal, and a plan keeps its promises."""
    facts, on = model(weight_formats={fmt: 3}), platform(page_sizes=pages)

    def outcome() -> Plan | tuple[type[CardanError], str]:
        try:
            return resolve(asked, facts, on)
        except (ConfigError, UnsupportedError) as error:
            return type(error), str(error)

    first = outcome()
    assert first == outcome()
    if isinstance(first, Plan):
        assert first.page_size in pages
        assert first.context_length <= facts.context_length
        assert first.chunked_prefill_size == -1 or first.chunked_prefill_size >= first.page_size
        if "max_total_tokens" in first.settings:
            assert first.value("max_total_tokens") % first.page_size == 0
            assert first.max_running_requests * first.page_size <= first.value("max_total_tokens")


FLOAT8 = {"kv_dtype:fp8_e4m3": NATIVE, "kv_dtype:fp8_e5m2": NATIVE}


@pytest.mark.parametrize(("dtype", "largest"), [("fp8_e4m3", "448"), ("fp8_e5m2", "57344")])
def test_keys_and_values_of_8_bits_without_scales_are_warned_of(dtype: str, largest: str) -> None:
    asked = config(p={"kv_cache_dtype": dtype})
    layers = (layer(k_scale=0.5, v_scale=0.25), layer(index=1), layer(index=2))
    (note,) = plan(asked, model(layers=layers), platform(FLOAT8)).notes
    assert f"become {dtype} with the scale 1.0 in 2 of 3 layers" in note
    assert f"larger ones than {largest} are cut" in note
    assert plan(asked, model(layers=layers[:1]), platform(FLOAT8)).notes == ()


def test_scales_that_nothing_uses_are_named_with_what_would_use_them() -> None:
    scaled = model(layers=(layer(v_scale=0.25),))
    (note,) = plan(facts=scaled, on=platform(FLOAT8)).notes
    assert "are for floats of 8 bits, and bfloat16 needs none; --kv-cache-dtype fp8_e4m3 uses them" in note
    (note,) = plan(facts=scaled).notes
    assert note.endswith("bfloat16 needs none")
    assert plan(facts=model()).notes == ()
