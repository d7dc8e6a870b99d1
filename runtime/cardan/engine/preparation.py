"""Everything between a config and an engine that can take its first request, with the time that each part took.

It knows no socket: the scheduler process calls it and tells the frontend how far it is.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from cardan.config import EngineConfig, cache_dir
from cardan.engine.extensions import apply_installed_plugins
from cardan.engine.grammars import with_grammars
from cardan.engine.model_files import open_model, open_weightless
from cardan.engine.sampling_defaults import with_sampling_defaults
from cardan.errors import UnsupportedModelError
from cardan.models import DecoderModel, build_model
from cardan.platform import Device, KVPool, LoadedModel, MemoryRequest, Model, Plan, Platform, Runner, SettingSource
from cardan.platform.discovery import choose_platform, platforms_claiming
from cardan.platform.refusals import main_format, parse_options
from cardan.platform.resolve import platform_facts, resolve
from cardan.platform.tuned_tables import tuned_platform
from cardan.runner import open_device
from cardan.scheduler import SchedulerSettings
from cardan.scheduler.settings import check_policies
from cardan.types import KVLayout
from cardan.weights import OpenedCheckpoint, RandomCheckpoint

Progress = Callable[[str, int, int], None]
"""Called with a part of the start, how much of it is done, and how much there is (0 when unknown)."""

_MIN_SLOTS = 7
"""Least pool in which a prompt of one token is admitted (``n - 1 - 5``)."""


def _silent(part: str, done: int, total: int) -> None:
    """No one listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What is known before a device is opened.

    Attributes:
        checkpoint: the model's files.
        model: built from them.
        platform: the chosen platform.
        plan: every setting, resolved.
    """

    checkpoint: OpenedCheckpoint
    model: Model
    platform: Platform
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that an ``EngineCore`` runs on.

    Attributes:
        opened: checkpoint, model and platform.
        plan: with what was measured.
        device: open.
        loaded: the weights on it.
        pool: the KV pool.
        runner: ready, warmed up.
        settings: of the scheduler.
        started_s: seconds by part.
    """

    opened: Opened
    plan: Plan
    device: Device
    loaded: LoadedModel
    pool: KVPool
    runner: Runner
    settings: SchedulerSettings
    started_s: dict[str, float]

    def close(self) -> None:
        """Give everything back."""
        self.runner.close()
        self.device.close()
        self.opened.checkpoint.close()


@dataclass(slots=True)
class _Parts:
    """Times of the parts of a start, and who is told."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.progress(name, 0, 0)
        start_s = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start_s
        self.progress(name, 1, 1)


def open_and_resolve(config: EngineConfig, progress: Progress = _silent, platform: Platform | None = None) -> Opened:
    """Open the model's files, choose the platform and resolve the plan; no device is touched.

    Args:
        config: what was asked for.
        progress: told how far it is.
        platform: taken instead of the one that the config names, such as one that is not installed.

    Raises:
        CardanError: the model, the platform or a setting is refused.
    """
    apply_installed_plugins()
    check_policies(config.scheduler.schedule_policy, config.cache.radix_eviction_policy)
    platform = platform or choose_platform(config.platform.platform, options=config.platform.options)
    platform = platform.configured(parse_options(config.platform.options, platform.options(), platform.name))
    device = platform.devices()[0]
    tuning = tuned_platform(platform, device, cache_dir())
    platform = tuning.platform
    if config.model.random_weights is not None or not platform.reads_weights:
        checkpoint, model = _without_weights(config, platform.reads_weights, progress)
    else:
        checkpoint = open_model(config.model, progress)
        model = build_model(checkpoint.config, checkpoint.name, checkpoint.tensor_info())
    config = _with_format_for_method(config, checkpoint.quantized_by, model)
    refused = config.model.quantization_fallback == "refuse"
    elsewhere = platforms_claiming(model.facts.weight_formats, but=platform.name) if refused else {}
    facts = platform_facts(platform, device, model.facts, elsewhere)
    plan = resolve(config, model.facts, facts, drawn_seed=secrets.randbits(32)).with_notes(*checkpoint.notes)
    plan = with_sampling_defaults(
        plan, config.model.sampling_defaults, checkpoint.generation_config, facts.capabilities
    )
    plan = tuning.shown_in(with_grammars(plan, config.grammar, facts.capabilities))
    return Opened(checkpoint=checkpoint, model=model, platform=platform, plan=plan)


def _with_format_for_method(config: EngineConfig, quantized_by: tuple[str, ...], model: Model) -> EngineConfig:
    """The config with the checkpoint's format, where ``--quantization`` names the method that it is quantized by."""
    asked = config.model.quantization
    if asked is None or asked.lower() not in quantized_by:
        return config
    return replace(config, model=replace(config.model, quantization=main_format(model.facts.weight_formats)))


def resolve_plan(config: EngineConfig, progress: Progress = _silent) -> Plan:
    """The plan of a config, without what only a device can measure; no device is touched.

    Raises:
        CardanError: the model, the platform or a setting is refused.
    """
    opened = open_and_resolve(config, progress)
    opened.checkpoint.close()
    return opened.plan


def _without_weights(config: EngineConfig, reads_weights: bool, progress: Progress) -> tuple[OpenedCheckpoint, Model]:
    """A checkpoint whose tensors are made up, or has none for a platform that reads none."""
    description = open_weightless(config.model, progress)
    model = build_model(description.config, description.name, None)
    if not reads_weights:
        return RandomCheckpoint(description, {}, 0), model
    if not isinstance(model, DecoderModel):
        raise UnsupportedModelError(
            f"--random-weights needs the shapes of the tensors, which {model.facts.architecture} does not list. "
            "Drop the flag and pass a model with weights."
        )
    checkpoint = RandomCheckpoint(description, model.expected_tensors(), config.model.random_weights or 0)
    return checkpoint, build_model(description.config, description.name, checkpoint.tensor_info())


def prepare(config: EngineConfig, progress: Progress = _silent, platform: Platform | None = None) -> Prepared:
    """Do everything that is needed before the first request.

    Args:
        config: what was asked for.
        progress: told how far it is.
        platform: taken instead of the one that the config names, such as one that is not installed.

    Raises:
        CardanError: the model, the platform, a setting or the memory is refused.
    """
    parts = _Parts(progress)
    with parts.part("open"):
        opened = open_and_resolve(config, progress, platform)
    with parts.part("device"):
        device = open_device(opened.platform, opened.plan.device, opened.plan.platform_options)
    try:
        return _prepare_on(device, opened, config, parts)
    except BaseException:
        device.close()
        opened.checkpoint.close()
        raise


def _prepare_on(device: Device, opened: Opened, config: EngineConfig, parts: _Parts) -> Prepared:
    plan = opened.plan
    with parts.part("weights"):
        loaded = device.load(
            opened.model, opened.checkpoint, plan, lambda done, total: parts.progress("weights", done, total)
        )
    layout = KVLayout(layers=plan.model.layers, page_size=plan.page_size, dtype=plan.kv_cache_dtype)
    with parts.part("memory"):
        plan = _plan_memory(device, loaded, layout, plan, config)
    settings = scheduler_settings(plan, layout.num_groups)
    with parts.part("pool"):
        num_slots = settings.num_slots + settings.page_size
        pool = device.allocate_kv(layout, num_slots, settings.num_rows, settings.context_length)
    with parts.part("warm-up"):
        runner = device.runner(loaded, pool, plan)
        runner.warm_up(decode_buckets(settings.max_running_requests, captured=bool(plan.value("graph"))))
    return Prepared(
        opened=opened,
        plan=plan.with_notes(*loaded.notes),
        device=device,
        loaded=loaded,
        pool=pool,
        runner=runner,
        settings=settings,
        started_s=parts.seconds,
    )


def _plan_memory(device: Device, loaded: LoadedModel, layout: KVLayout, plan: Plan, config: EngineConfig) -> Plan:
    page = plan.page_size

    def whole_pages(tokens: int) -> int:
        return -(-tokens // page) * page

    fraction = plan.value("mem_fraction_static")
    flagged = plan.settings.get("max_total_tokens")
    activation_bytes = device.activation_bytes(loaded, plan)
    divided = device.plan_memory(
        MemoryRequest(
            memory=device.memory(),
            weight_bytes=loaded.weight_bytes,
            activation_bytes=activation_bytes,
            graph_bytes=0,
            bytes_per_slot=layout.bytes_per_slot,
            page_size=page,
            min_slots=whole_pages(max(_MIN_SLOTS, page + 3)),
            useful_slots=whole_pages(plan.max_running_requests * plan.context_length),
            fraction=None if fraction is None else float(fraction),
            max_total_tokens=None if flagged is None else int(flagged.value),
        )
    )
    plan = replace(plan, memory=divided.lines)
    if flagged is not None and flagged.value == divided.num_slots:
        return plan
    return plan.with_setting(
        "max_total_tokens", divided.num_slots, SettingSource.MEASURED, "what weights and activations leave"
    )


def scheduler_settings(plan: Plan, num_groups: int) -> SchedulerSettings:
    """The scheduler's numbers from a plan whose memory was measured."""
    return SchedulerSettings(
        num_slots=int(plan.value("max_total_tokens")),
        page_size=plan.page_size,
        num_groups=num_groups,
        context_length=plan.context_length,
        vocab_size=plan.model.vocab_size,
        max_running_requests=plan.max_running_requests,
        chunked_prefill_size=plan.chunked_prefill_size,
        max_prefill_tokens=int(plan.value("max_prefill_tokens")),
        max_queued_requests=plan.value("max_queued_requests"),
        schedule_policy=str(plan.value("schedule_policy")),
        schedule_conservativeness=float(plan.value("schedule_conservativeness")),
        enable_mixed_chunk=bool(plan.value("enable_mixed_chunk")),
        prefill_decode_interval=int(plan.value("prefill_decode_interval")),
        enable_priority_scheduling=bool(plan.value("enable_priority_scheduling")),
        priority_scheduling_preemption_threshold=int(plan.value("priority_scheduling_preemption_threshold")),
        allow_auto_truncate=bool(plan.value("allow_auto_truncate")),
        disable_radix_cache=not plan.value("radix_cache"),
        radix_eviction_policy=str(plan.value("radix_eviction_policy")),
        random_seed=int(plan.value("random_seed")),
        mixed_batch=bool(plan.value("mixed_batch")),
        jump_forward=bool(plan.value("jump_forward")),
    )


def decode_buckets(max_rows: int, *, captured: bool) -> tuple[int, ...]:
    """Row counts that decode steps are tried with before the first request, smallest first.

    Where steps are captured, those that they are padded to: powers of two, then steps of 16. Where they run
    eagerly, the smallest and the largest.
    """
    if not captured:
        return tuple(sorted({1, max_rows}))
    small = [rows for rows in (1, 2, 4, 8) if rows < max_rows]
    return (*small, *range(16, max_rows, 16), max_rows)
