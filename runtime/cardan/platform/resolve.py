"""Turns what the user asked for, what the model needs and what the platform offers into a plan, or refuses.

It is pure: it reads nothing but its arguments, starts nothing and touches no device. It knows no platform by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cardan.config import EngineConfig
from cardan.errors import ConfigError, PlatformApiError, UnsupportedError
from cardan.platform.api import OptionSpec, Platform, Recommendation
from cardan.platform.capabilities import Capabilities, Capability, Feature
from cardan.platform.device import DeviceInfo
from cardan.platform.model import ModelFacts
from cardan.platform.plan import Plan, Setting, SettingSource
from cardan.platform.refusals import (
    check_chunk,
    check_layers,
    check_ranks,
    parse_options,
    plan_formats,
    refuse_choice,
    resolve_quantization,
)

RECOMMENDABLE = frozenset(
    {
        "attention_backend",
        "chunked_prefill_size",
        "decode_attention_backend",
        "dtype",
        "kv_cache_dtype",
        "max_running_requests",
        "mem_fraction_static",
        "page_size",
        "prefill_attention_backend",
    }
)
"""Settings that ``Platform.recommend`` may name."""

DEFAULT_CHUNK = 2048
"""Tokens of a prefill pass where neither the user nor the platform says."""

DEFAULT_ROWS = 64
"""Running requests where neither the user nor the platform says."""

MIN_TOKENS = 7
"""Least context and pool in which a request of one token is admitted (limits of one request: ``n - 1 - 5``)."""

KV_LARGEST: Mapping[str, float] = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
"""Largest value of the KV types whose elements are floats of 8 bits, which a layer's scales are for."""

LARGE_PAGE = 64
"""From this page size on the plan warns that only whole pages of a prefix are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformFacts:
    """What a platform says of itself for one device and one model, as plain data.

    Attributes:
        name: of the platform.
        device: the device that was chosen.
        capabilities: what works on it.
        options: the platform's own flags.
        recommendations: values for neutral settings.
        claimed_elsewhere: for a weight format, the other installed platforms that take it as it is.
    """

    name: str
    device: DeviceInfo
    capabilities: Capabilities
    options: tuple[OptionSpec, ...] = ()
    recommendations: Mapping[str, Recommendation] = field(default_factory=dict)
    claimed_elsewhere: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def platform_facts(
    platform: Platform,
    device: DeviceInfo,
    facts: ModelFacts,
    claimed_elsewhere: Mapping[str, tuple[str, ...]] | None = None,
) -> PlatformFacts:
    """Ask a platform everything that ``resolve`` needs.

    Raises:
        PlatformApiError: it recommends a setting that no platform may recommend.
    """
    recommendations = dict(platform.recommend(facts, device))
    unknown = sorted(set(recommendations) - RECOMMENDABLE)
    if unknown:
        raise PlatformApiError(
            f"Platform {platform.name!r} recommends {', '.join(unknown)}, which no platform may. "
            f"Platform.recommend may name {', '.join(sorted(RECOMMENDABLE))}."
        )
    return PlatformFacts(
        name=platform.name,
        device=device,
        capabilities=platform.capabilities(device),
        options=platform.options(),
        recommendations=recommendations,
        claimed_elsewhere=claimed_elsewhere or {},
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    config: EngineConfig
    model: ModelFacts
    platform: PlatformFacts

    @property
    def capabilities(self) -> Capabilities:
        return self.platform.capabilities

    def answer(self, feature: Feature) -> Capability:
        return self.platform.capabilities.get(feature)

    def recommended(self, *names: str) -> Setting | None:
        for name in names:
            found = self.platform.recommendations.get(name)
            if found is not None:
                return Setting(found.value, SettingSource.PLATFORM, found.why)
        return None


def resolve(config: EngineConfig, facts: ModelFacts, platform: PlatformFacts, *, drawn_seed: int | None = None) -> Plan:
    """Decide every setting, or refuse with what is unsupported and what would work.

    Args:
        config: what the user asked for.
        facts: the model's sizes, formats and layers.
        platform: what the platform offers.
        drawn_seed: a seed the caller drew for when the user gave none; 0 is taken without one.

    Raises:
        ConfigError: settings contradict the model or each other.
        UnsupportedError: the platform cannot do what was asked or what the model needs.
    """
    inputs = _Inputs(config, facts, platform)
    check_ranks(config.platform.tp_size, platform.name, platform.capabilities)
    settings: dict[str, Setting] = {"context_length": _context_length(inputs)}
    check_layers(facts.layers, settings["context_length"].value, platform.name, platform.capabilities)
    settings |= _types(inputs)
    settings |= _attention(inputs)
    settings |= _paging(inputs)
    settings |= _sizes(inputs, settings)
    settings |= _loop(inputs)
    settings |= _rest(inputs, drawn_seed)
    settings["quantization"] = resolve_quantization(config.model.quantization, facts, platform.capabilities)
    formats = plan_formats(
        facts, platform.capabilities, platform.claimed_elsewhere, refuse=config.model.quantization_fallback == "refuse"
    )
    return Plan(
        platform=platform.name,
        device=platform.device,
        model=facts,
        settings=settings,
        formats=formats,
        platform_options=parse_options(config.platform.options, platform.options, platform.name),
        notes=_notes(inputs, settings),
    )


def _context_length(inputs: _Inputs) -> Setting:
    limit, asked = inputs.model.context_length, inputs.config.model.context_length
    if asked is None:
        return Setting(limit, SettingSource.MODEL, "the longest sequence that the model was made for")
    if asked > limit:
        raise ConfigError(
            f"--context-length must be at most {limit}, the limit of model {inputs.model.name!r}, got {asked}. "
            f"Pass --context-length {limit} or less."
        )
    if asked < MIN_TOKENS:
        raise ConfigError(
            f"--context-length must be at least {MIN_TOKENS} to admit any request, got {asked}. Pass a larger one."
        )
    return Setting(asked, SettingSource.FLAG, f"--context-length; the model's limit is {limit}")


def _types(inputs: _Inputs) -> dict[str, Setting]:
    dtype = _dtype(inputs)
    return {"dtype": dtype, "kv_cache_dtype": _kv_dtype(inputs, dtype.value)}


def _dtype(inputs: _Inputs) -> Setting:
    known = inputs.capabilities.family("dtype")
    asked, native = inputs.config.model.dtype, inputs.model.native_dtype
    if asked != "auto":
        _check_choice(inputs, "--dtype", asked, "dtype")
        return Setting(asked, SettingSource.FLAG, "--dtype")
    recommended = inputs.recommended("dtype")
    if recommended is not None:
        _check_choice(inputs, "the recommended dtype", recommended.value, "dtype")
        return recommended
    if native in known:
        return Setting(native, SettingSource.MODEL, "what the checkpoint was made for")
    if not known:
        _check_choice(inputs, "--dtype", native, "dtype")
    return Setting(known[0], SettingSource.PLATFORM, f"the checkpoint suggests {native}, which the platform lacks")


def _kv_dtype(inputs: _Inputs, dtype: str) -> Setting:
    asked = inputs.config.platform.kv_cache_dtype
    if asked != "auto":
        _check_choice(inputs, "--kv-cache-dtype", asked, "kv_dtype")
        return Setting(asked, SettingSource.FLAG, "--kv-cache-dtype")
    recommended = inputs.recommended("kv_cache_dtype")
    if recommended is not None:
        _check_choice(inputs, "the recommended kv_cache_dtype", recommended.value, "kv_dtype")
        return recommended
    known = inputs.capabilities.family("kv_dtype")
    if dtype in known:
        return Setting(dtype, SettingSource.DEFAULT, "the type of the activations")
    if not known:
        _check_choice(inputs, "--kv-cache-dtype", dtype, "kv_dtype")
    return Setting(known[0], SettingSource.PLATFORM, f"activations are {dtype}, which the platform's KV pool lacks")


def _check_choice(inputs: _Inputs, flag: str, got: str, family: str) -> None:
    if got not in inputs.capabilities.family(family):
        refuse_choice(flag, got, family, inputs.platform.name, inputs.capabilities)


def _attention(inputs: _Inputs) -> dict[str, Setting]:
    asked = inputs.config.platform
    return {
        "prefill_attention_backend": _backend(inputs, "prefill", asked.prefill_attention_backend),
        "decode_attention_backend": _backend(inputs, "decode", asked.decode_attention_backend),
    }


def _backend(inputs: _Inputs, phase: str, specific: str | None) -> Setting:
    general = inputs.config.platform.attention_backend
    asked = specific or general
    if asked is not None:
        flag = f"--{phase}-attention-backend" if specific else "--attention-backend"
        _check_choice(inputs, flag, asked, "attention")
        return Setting(asked, SettingSource.FLAG, flag)
    recommended = inputs.recommended(f"{phase}_attention_backend", "attention_backend")
    if recommended is not None:
        _check_choice(inputs, "the recommended attention_backend", recommended.value, "attention")
        return recommended
    known = inputs.capabilities.family("attention")
    if known:
        return Setting(known[0], SettingSource.PLATFORM, "the first that the platform offers")
    return Setting(None, SettingSource.PLATFORM, "the platform attends inside its own runner")


def _paging(inputs: _Inputs) -> dict[str, Setting]:
    cache, offered = inputs.config.cache, inputs.capabilities.page_sizes
    recommended = inputs.recommended("page_size")
    if cache.page_size is not None:
        page = Setting(cache.page_size, SettingSource.FLAG, "--page-size")
    elif recommended is not None:
        page = recommended
    elif offered[:1] == (1,):
        page = Setting(1, SettingSource.DEFAULT, "prefixes are shared token by token")
    else:
        page = Setting(offered[0], SettingSource.PLATFORM, "the page size its attention prefers")
    if page.value not in offered:
        nearest = min((size for size in offered if size >= page.value), default=max(offered))
        listed = ", ".join(str(size) for size in sorted(offered))
        raise UnsupportedError(
            f"--page-size must be one of {listed} on platform {inputs.platform.name!r}, got {page.value}. "
            f"Pass --page-size {nearest}."
        )
    off = cache.disable_radix_cache
    radix = (
        Setting(False, SettingSource.FLAG, "--disable-radix-cache")
        if off
        else Setting(True, SettingSource.DEFAULT, "prefixes are reused")
    )
    return {"page_size": page, "radix_cache": radix}


def _sizes(inputs: _Inputs, so_far: Mapping[str, Setting]) -> dict[str, Setting]:
    page = so_far["page_size"].value
    sizes = {
        "chunked_prefill_size": _chunk(inputs, page),
        "max_prefill_tokens": _flag_or_default(
            inputs.config.scheduler.max_prefill_tokens, 16384, "--max-prefill-tokens", "bounds one prefill pass"
        ),
        "max_running_requests": _rows(inputs),
        "mem_fraction_static": _fraction(inputs),
    }
    pool = _pool(inputs, page)
    if pool is not None:
        sizes["max_total_tokens"] = pool
        sizes["max_running_requests"] = _fit_rows(sizes["max_running_requests"], pool, page)
    return sizes


def _chunk(inputs: _Inputs, page: int) -> Setting:
    asked = inputs.config.scheduler.chunked_prefill_size
    if asked is not None:
        chunk = Setting(asked, SettingSource.FLAG, "--chunked-prefill-size")
    else:
        chunk = inputs.recommended("chunked_prefill_size") or Setting(
            DEFAULT_CHUNK, SettingSource.DEFAULT, "the platform recommends none"
        )
    check_chunk(chunk.value, page)
    return chunk


def _rows(inputs: _Inputs) -> Setting:
    asked = inputs.config.scheduler.max_running_requests
    if asked is not None:
        return Setting(asked, SettingSource.FLAG, "--max-running-requests")
    return inputs.recommended("max_running_requests") or Setting(
        DEFAULT_ROWS, SettingSource.DEFAULT, "the platform recommends none"
    )


def _fraction(inputs: _Inputs) -> Setting:
    asked = inputs.config.cache.mem_fraction_static
    if asked is not None:
        return Setting(asked, SettingSource.FLAG, "--mem-fraction-static")
    return inputs.recommended("mem_fraction_static") or Setting(
        None, SettingSource.PLATFORM, "the platform's memory policy decides"
    )


def _pool(inputs: _Inputs, page: int) -> Setting | None:
    asked = inputs.config.cache.max_total_tokens
    if asked is None:
        return None
    floored = asked // page * page
    least = -(-max(MIN_TOKENS, page + 3) // page) * page
    if floored < least:
        raise ConfigError(
            f"--max-total-tokens must be at least {least} with pages of {page} tokens to admit any request, "
            f"got {asked}. Pass --max-total-tokens {least} or more."
        )
    why = "--max-total-tokens" if floored == asked else f"--max-total-tokens {asked}, cut to whole pages of {page}"
    return Setting(floored, SettingSource.FLAG, why)


def _fit_rows(rows: Setting, pool: Setting, page: int) -> Setting:
    most = pool.value // page
    if rows.value <= most:
        return rows
    if rows.source is SettingSource.FLAG:
        raise ConfigError(
            f"--max-running-requests must be at most {most}, since each running request holds a page of {page} tokens "
            f"and --max-total-tokens gives {pool.value}, got {rows.value}. Lower it, or raise --max-total-tokens."
        )
    return Setting(most, SettingSource.DEFAULT, f"one page of {page} tokens each in a pool of {pool.value}")


def _loop(inputs: _Inputs) -> dict[str, Setting]:
    scheduler, platform = inputs.config.scheduler, inputs.config.platform
    mixed = inputs.answer(Feature.MIXED_BATCH)
    if scheduler.enable_mixed_chunk and not inputs.capabilities.supports(Feature.MIXED_BATCH):
        raise UnsupportedError(
            f"--enable-mixed-chunk is not supported on platform {inputs.platform.name!r}: {mixed.reason}. "
            f"{mixed.alternative.rstrip('.') or 'Drop the flag; prefill and decode then run as separate passes'}."
        )
    return {
        "overlap": _switch(
            inputs, Feature.OVERLAP, "--disable-overlap-schedule", off=scheduler.disable_overlap_schedule
        ),
        "graph": _switch(inputs, Feature.GRAPH, "--disable-graph", off=platform.disable_graph),
        "enable_mixed_chunk": _flag_or_default(
            scheduler.enable_mixed_chunk, False, "--enable-mixed-chunk", "prefill and decode run as separate passes"
        ),
    }


def _switch(inputs: _Inputs, feature: Feature, flag: str, *, off: bool) -> Setting:
    answer = inputs.answer(feature)
    if off:
        return Setting(False, SettingSource.FLAG, flag)
    if not inputs.capabilities.supports(feature):
        return Setting(False, SettingSource.PLATFORM, f"not supported: {answer.reason}")
    return Setting(True, SettingSource.PLATFORM, answer.reason or answer.support.value)


_PLAIN: tuple[tuple[str, Callable[[EngineConfig], Any], Any, str], ...] = (
    ("quantization_fallback", lambda c: c.model.quantization_fallback, "auto", "formats no GEMM takes are widened"),
    ("radix_eviction_policy", lambda c: c.cache.radix_eviction_policy, "lru", "least recently used prefix goes first"),
    ("schedule_policy", lambda c: c.scheduler.schedule_policy, "fcfs", "first come, first served"),
    ("schedule_conservativeness", lambda c: c.scheduler.schedule_conservativeness, 1.0, "room reserved for output"),
    ("max_queued_requests", lambda c: c.scheduler.max_queued_requests, None, "no limit"),
    ("prefill_decode_interval", lambda c: c.scheduler.prefill_decode_interval, 0, "prefill goes before decode"),
    (
        "enable_priority_scheduling",
        lambda c: c.scheduler.enable_priority_scheduling,
        False,
        "priorities are not honoured",
    ),
    (
        "priority_scheduling_preemption_threshold",
        lambda c: c.scheduler.priority_scheduling_preemption_threshold,
        10,
        "least difference of priority that preempts",
    ),
    ("allow_auto_truncate", lambda c: c.scheduler.allow_auto_truncate, False, "prompts that are too long are refused"),
)
"""Settings that take the flag's value as it is: name, reader, default, why the default."""


def _rest(inputs: _Inputs, drawn_seed: int | None) -> dict[str, Setting]:
    settings = {
        name: _flag_or_default(read(inputs.config), default, "--" + name.replace("_", "-"), why)
        for name, read, default, why in _PLAIN
    }
    asked = inputs.config.scheduler.random_seed
    if asked is not None:
        settings["random_seed"] = Setting(asked, SettingSource.FLAG, "--random-seed")
    elif drawn_seed is not None:
        settings["random_seed"] = Setting(drawn_seed, SettingSource.DEFAULT, "drawn at start-up")
    else:
        settings["random_seed"] = Setting(0, SettingSource.DEFAULT, "the same at every start")
    return settings


def _flag_or_default(value: Any, default: Any, flag: str, why: str) -> Setting:
    if value == default:
        return Setting(value, SettingSource.DEFAULT, why)
    return Setting(value, SettingSource.FLAG, flag)


def _notes(inputs: _Inputs, settings: Mapping[str, Setting]) -> tuple[str, ...]:
    notes = list(inputs.capabilities.notes)
    page = settings["page_size"].value
    if page >= LARGE_PAGE and settings["radix_cache"].value:
        notes.append(f"prefixes are shared in whole pages of {page} tokens; shorter ones are computed again")
    notes.extend(_scale_notes(inputs, settings["kv_cache_dtype"].value))
    return tuple(notes)


def _scale_notes(inputs: _Inputs, kv_dtype: str) -> Iterator[str]:
    """What is to be known of a checkpoint's scales of keys and values: where they lack, and where nothing uses them."""
    layers = inputs.model.layers
    scaled = sum((layer.k_scale, layer.v_scale) != (1.0, 1.0) for layer in layers)
    if kv_dtype not in KV_LARGEST:
        usable = [name for name in KV_LARGEST if name in inputs.capabilities.family("kv_dtype")]
        if scaled:
            hint = f"; --kv-cache-dtype {usable[0]} uses them" if usable else ""
            yield (
                f"the checkpoint's scales of keys and values are for floats of 8 bits, and {kv_dtype} needs none{hint}"
            )
    elif scaled < len(layers):
        yield (
            f"keys and values become {kv_dtype} with the scale 1.0 in {len(layers) - scaled} of {len(layers)} layers, "
            f"since the checkpoint brings no other: larger ones than {KV_LARGEST[kv_dtype]:g} are cut, small ones "
            "rounded off, and answers may get worse"
        )
