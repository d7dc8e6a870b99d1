"""What a user can set, in a few frozen groups that the CLI turns into flags.

It resolves nothing: None means "choose for me", and ``cardan.platform.resolve`` does, saying why.
This is the only module that reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cardan.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how its weights are read.

    Attributes:
        model: folder, ``.gguf`` or ``.safetensors`` file, Hugging Face hub id, or the alias ``smollm2-135m``.
        tokenizer: where the tokenizer is, if not with the model.
        chat_template: a Jinja file or the name of a template, if not the model's own.
        tool_call_parser: how the model writes calls of tools; ``auto`` looks at its chat template, ``none`` finds none.
        reasoning_parser: how the model marks its reasoning; ``auto`` looks at its chat template, ``none`` finds none.
        served_model_name: the name that requests use; the model's by default.
        dtype: type of activations: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        context_length: longest sequence; the model's own limit by default.
        quantization: quantize weights at load to a format that the platform makes, or name the checkpoint's own.
        quantization_fallback: what happens to a weight format no GEMM of the platform takes.
        revision: branch, tag or commit on the hub.
        sampling_defaults: temperature, top-p, top-k, min-p and repetition penalty of requests that do not state them:
            ``model`` takes the model's generation_config.json, ``openai`` temperature 1.0 and no filter or penalty.
        is_embedding: serve embeddings of texts instead of generating.
        embedding_pooling: which hidden states stand for a text: that of its ``last`` token, or the ``mean`` of all.
        random_weights: fill the weights at random from this seed (benchmarks of shapes without weights).
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    context_length: int | None = None
    quantization: str | None = None
    quantization_fallback: Literal["auto", "refuse"] = "auto"
    revision: str | None = None
    sampling_defaults: Literal["model", "openai"] = "model"
    is_embedding: bool = False
    embedding_pooling: Literal["last", "mean"] = "last"
    random_weights: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformConfig:
    """Which platform, and how it runs.

    Attributes:
        platform: name of a platform plugin, or ``auto``.
        attention_backend: for prefill and decode alike.
        prefill_attention_backend: for prefill only.
        decode_attention_backend: for decode only.
        kv_cache_dtype: element type of the KV pool; ``auto`` is the activations' type.
        disable_graph: never replay captured steps.
        tp_size: number of ranks a model is split over.
        options: the platform's own options, ``name=value`` (``cardan platforms`` lists them).
    """

    platform: str = "auto"
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    kv_cache_dtype: str = "auto"
    disable_graph: bool = False
    tp_size: int = 1
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV pool and prefix cache.

    Attributes:
        mem_fraction_static: share of the memory that may be used for weights and KV pool together.
        max_total_tokens: size of the KV pool in tokens, instead of what memory allows.
        page_size: tokens per page.
        disable_radix_cache: never reuse a prefix.
        radix_eviction_policy: which unlocked prefix goes first when the pool is full: ``lru``, ``lfu``, ``fifo``,
            ``mru``, ``slru``, ``priority``, ``tlru``, or one that a plugin adds.
    """

    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    page_size: int | None = None
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs when.

    Attributes:
        schedule_policy: order of the waiting queue: ``fcfs``, ``lpm``, ``dfs-weight``, ``lof``, ``hrrn``,
            ``shortest-prefill-first``, ``random``, ``priority``, ``routing-key``, or one that a plugin adds.
        schedule_conservativeness: above 1 reserves more room for output, below 1 less.
        chunked_prefill_size: most tokens of one prefill pass; -1 for no chunking.
        max_prefill_tokens: most uncached prompt tokens of one prefill pass.
        max_running_requests: most requests in the running set.
        max_queued_requests: most waiting requests; more get a 503. None for no limit.
        enable_mixed_chunk: decode rows ride in the prefill pass.
        prefill_decode_interval: decode passes that run between two prefill passes.
        enable_priority_scheduling: honour the request's ``priority``.
        priority_scheduling_preemption_threshold: least difference of priority that preempts.
        disable_overlap_schedule: read each step before the next is launched.
        allow_auto_truncate: cut prompts that are too long instead of refusing them.
        random_seed: seed for requests that bring none, and for the ``random`` policy.
        enable_return_hidden_states: requests may ask for hidden states (``return_hidden_states``), of which a prompt's
            alone can take gigabytes on their way to the client.
        enable_custom_logit_processor: requests may name a logit processor of an installed package
            (``custom_logit_processor``); no request can bring one.
    """

    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int = 16384
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    enable_mixed_chunk: bool = False
    prefill_decode_interval: int = 0
    enable_priority_scheduling: bool = False
    priority_scheduling_preemption_threshold: int = 10
    disable_overlap_schedule: bool = False
    allow_auto_truncate: bool = False
    random_seed: int | None = None
    enable_return_hidden_states: bool = False
    enable_custom_logit_processor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Output that must match a grammar.

    Attributes:
        grammar_backend: what compiles grammars: ``auto``, ``llguidance``, ``xgrammar``, ``none``, or one that a plugin
            adds.
        grammar_compile_timeout_s: longest time that one grammar may take to compile.
        json_whitespace: white space between the tokens of JSON that a schema constrains: ``any`` or ``none``.
        disable_jump_forward: sample every token, also where a grammar leaves one way to go on. The tokens stay the
            same.
    """

    grammar_backend: str = "auto"
    grammar_compile_timeout_s: float = 10.0
    json_whitespace: Literal["any", "none"] = "any"
    disable_jump_forward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        api_key: requests must carry it as a bearer token, or as ``X-API-Key``.
        admin_api_key: the routes that change the server (flush, abort, profile, logging) need this key instead; it
            opens all others as well.
        cors_allow_origins: web pages of these origins may ask this server; ``*`` allows all. None by default.
        ssl_certfile: PEM file with the certificate chain; serves HTTPS.
        ssl_keyfile: PEM file with its private key, where that is not in the same file.
        ssl_keyfile_password: of an encrypted private key.
        stream_interval: tokens between two chunks of a stream.
        enable_cache_report: report cached tokens in OpenAI's usage.
        enable_metrics: serve ``/metrics``.
        max_body_bytes: larger request bodies get a 413.
        drain_timeout_s: how long SIGTERM waits for running requests.
        request_timeout_s: longest time of one request, waiting included; what runs longer is aborted with a 504.
        client_timeout_s: a connection is closed when its client, for so long, neither sends on what it began nor reads
            what it is sent.
        log_requests: log each request's lengths and times.
        log_request_contents: with the above, log prompts and answers too. They are in no log otherwise.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: ``text`` for people, ``json`` for one object a line.
        crash_dump_folder: when a process of the engine dies, write the requests of the last minutes there, with their
            prompts, as JSON that ``cardan replay`` sends again.
        profile_folder: ``/start_profile`` records the steps of the scheduler, and writes them there as a Chrome trace.
        otlp_traces_endpoint: send a trace of each request to this OpenTelemetry collector (OTLP over HTTP).
    """

    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    admin_api_key: str | None = None
    cors_allow_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    stream_interval: int = 1
    enable_cache_report: bool = True
    enable_metrics: bool = True
    max_body_bytes: int = 64 * 2**20
    drain_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    client_timeout_s: float = 60.0
    log_requests: bool = False
    log_request_contents: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    crash_dump_folder: str | None = None
    profile_folder: str | None = None
    otlp_traces_endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that ``Engine`` and ``cardan serve`` take."""

    model: ModelConfig = field(default_factory=ModelConfig)
    platform: PlatformConfig = field(default_factory=PlatformConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        check_config(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """Values that a numeric setting may have.

    Attributes:
        low: the least, itself included unless ``is_open``.
        high: the greatest, likewise.
        is_open: the bounds themselves are outside.
        besides: one value more that is taken, because it means something else.
        whole: whether only whole numbers are taken.
        words: the range as a message says it; made from the bounds where it is not given.
    """

    low: float
    high: float
    is_open: bool = False
    besides: float | None = None
    whole: bool = True
    words: str = ""

    def holds(self, value: float) -> bool:
        """Whether a value is inside; NaN never is."""
        inside = self.low < value < self.high if self.is_open else self.low <= value <= self.high
        return inside or value == self.besides

    def describe(self) -> str:
        """The range in words."""
        return self.words or f"between {self.low} and {self.high}"


_INT32 = 2**31 - 1
_UINT64 = 2**64 - 1

RANGES: Mapping[str, NumberRange] = {
    # Positions and slots are 32-bit numbers.
    "model.context_length": NumberRange(low=1, high=_INT32),
    # Seeds are what a message between processes can carry, and no two of them mean the same.
    "model.random_weights": NumberRange(low=0, high=_UINT64),
    "platform.tp_size": NumberRange(low=1, high=1024),
    "cache.mem_fraction_static": NumberRange(
        low=0, high=1, is_open=True, whole=False, words="between 0 and 1, neither of them"
    ),
    "cache.max_total_tokens": NumberRange(low=1, high=2**30),
    "cache.page_size": NumberRange(low=1, high=65536),
    "scheduler.schedule_conservativeness": NumberRange(
        low=0, high=1000, is_open=True, whole=False, words="above 0 and below 1000"
    ),
    "scheduler.chunked_prefill_size": NumberRange(
        low=1, high=_INT32, besides=-1, words=f"between 1 and {_INT32}, or -1 for no chunking"
    ),
    "scheduler.max_prefill_tokens": NumberRange(low=1, high=_INT32),
    # Each running request has a row of a table that is as wide as the context.
    "scheduler.max_running_requests": NumberRange(low=1, high=65536),
    "scheduler.max_queued_requests": NumberRange(low=1, high=_INT32),
    "scheduler.prefill_decode_interval": NumberRange(low=0, high=_INT32),
    # Below 0, requests of one priority would take each other's place for ever. Priorities are 32-bit numbers.
    "scheduler.priority_scheduling_preemption_threshold": NumberRange(low=0, high=2**32),
    "scheduler.random_seed": NumberRange(low=0, high=_UINT64),
    "grammar.grammar_compile_timeout_s": NumberRange(
        low=0, high=3600, is_open=True, whole=False, words="above 0 and below 3600 (an hour)"
    ),
    "server.port": NumberRange(low=0, high=65535),
    "server.stream_interval": NumberRange(low=1, high=_INT32),
    "server.max_body_bytes": NumberRange(low=1, high=2**40),
    "server.request_timeout_s": NumberRange(
        low=0, high=86400, is_open=True, whole=False, words="above 0 and below 86400 (a day)"
    ),
    "server.client_timeout_s": NumberRange(
        low=0, high=86400, is_open=True, whole=False, words="above 0 and below 86400 (a day)"
    ),
    "server.drain_timeout_s": NumberRange(low=0, high=86400, whole=False, words="between 0 and 86400 (a day)"),
}
"""What every numeric setting may be, by group and field."""


def check_config(config: EngineConfig) -> None:
    """Check what can be checked without a model or a platform.

    Raises:
        ConfigError: a value is out of range, or two flags contradict each other.
    """
    for name, bounds in RANGES.items():
        group, _, field_name = name.partition(".")
        value = getattr(getattr(config, group), field_name)
        if value is not None:
            _check_number("--" + field_name.replace("_", "-"), value, bounds)
    _check_choices(config)
    _check_texts(config)
    _check_contradictions(config)
    _check_embedding(config)


def _check_number(flag: str, value: object, bounds: NumberRange) -> None:
    if isinstance(value, bool) or not isinstance(value, int if bounds.whole else int | float):
        raise ConfigError(f"{flag} must be a {'whole ' if bounds.whole else ''}number, got {value!r}.")
    if not bounds.holds(value):
        # Python refuses to write whole numbers of thousands of digits.
        huge = isinstance(value, int) and abs(value) >= 10**30
        shown = "a number of more than 30 digits" if huge else value
        raise ConfigError(f"{flag} must be {bounds.describe()}, got {shown}.")


def _choices(group: type[Any]) -> Mapping[str, tuple[str, ...]]:
    """Fields of a group that have one of a few values, and those values."""
    hints = get_type_hints(group)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def _check_choices(config: EngineConfig) -> None:
    """The command line does so by itself; whoever makes a config in Python would hear of it from a dead process."""
    for group in fields(config):
        values = getattr(config, group.name)
        for name, known in _choices(type(values)).items():
            if (value := getattr(values, name)) not in known:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be one of {', '.join(known)}, got {value!r}.")


def _check_texts(config: EngineConfig) -> None:
    """An empty text is a slip of a shell: as a host it would mean every address, as a key none."""
    for group in fields(config):
        values = getattr(config, group.name)
        for item in fields(values):
            if getattr(values, item.name) == "":
                flag = "--" + item.name.replace("_", "-")
                raise ConfigError(f"{flag} must not be empty, got ''. Leave it out, or give it a value.")


def _check_embedding(config: EngineConfig) -> None:
    model = config.model
    if model.embedding_pooling != ModelConfig().embedding_pooling and not model.is_embedding:
        raise ConfigError(
            f"--embedding-pooling {model.embedding_pooling} has no effect without --is-embedding. Drop the one, or add "
            "the other."
        )


def _check_contradictions(config: EngineConfig) -> None:
    cache, scheduler, platform = config.cache, config.scheduler, config.platform
    policy = scheduler.schedule_policy
    threshold = scheduler.priority_scheduling_preemption_threshold
    if cache.disable_radix_cache and cache.radix_eviction_policy != CacheConfig().radix_eviction_policy:
        raise ConfigError(
            f"--radix-eviction-policy {cache.radix_eviction_policy} has no effect with --disable-radix-cache. "
            "Drop one of the two."
        )
    if (
        threshold != SchedulerConfig().priority_scheduling_preemption_threshold
        and not scheduler.enable_priority_scheduling
    ):
        raise ConfigError(
            f"--priority-scheduling-preemption-threshold {threshold} has no effect without "
            "--enable-priority-scheduling. Drop the one, or add the other."
        )
    if cache.disable_radix_cache and policy in ("lpm", "dfs-weight"):
        raise ConfigError(
            f"--schedule-policy {policy} orders by cached prefixes, but --disable-radix-cache keeps none. "
            "Drop one of the two."
        )
    if policy == "priority" and not scheduler.enable_priority_scheduling:
        raise ConfigError("--schedule-policy priority needs --enable-priority-scheduling.")
    if scheduler.enable_mixed_chunk and scheduler.chunked_prefill_size == -1:
        raise ConfigError("--enable-mixed-chunk needs chunked prefill, but --chunked-prefill-size is -1.")
    if config.server.log_request_contents and not config.server.log_requests:
        raise ConfigError("--log-request-contents has no effect without --log-requests. Add it.")
    both = platform.attention_backend is not None
    either = platform.prefill_attention_backend or platform.decode_attention_backend
    if both and platform.prefill_attention_backend and platform.decode_attention_backend:
        raise ConfigError(
            f"--attention-backend {platform.attention_backend} has no effect beside both "
            f"--prefill-attention-backend and --decode-attention-backend ({either}). Drop it."
        )


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where fetched models and tables of ``cardan tune`` are kept.

    That is ``CARDAN_CACHE``, else ``$XDG_CACHE_HOME/cardan``, else ``~/.cache/cardan``.
    """
    env = os.environ if environ is None else environ
    if explicit := env.get("CARDAN_CACHE"):
        return Path(explicit)
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cardan"


def hub_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where the Hugging Face hub keeps its downloads."""
    env = os.environ if environ is None else environ
    if explicit := env.get("HF_HUB_CACHE"):
        return Path(explicit)
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(home) / "hub"


def hub_offline(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``HF_HUB_OFFLINE`` forbids asking the hub."""
    env = os.environ if environ is None else environ
    return env.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
