"""A platform without hardware: it fakes tokens, steps as long as it is told to, and fails when it is told to.

It knows no weights and no arrays beyond numpy. Engine, scheduler and server are tested and benchmarked on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cardan.errors import MemoryPlanError
from cardan.platform import (
    Availability,
    Capabilities,
    Capability,
    Checkpoint,
    Device,
    DeviceInfo,
    Evidence,
    Feature,
    KVPool,
    LoadedModel,
    Memory,
    MemoryPlan,
    MemoryRequest,
    Model,
    ModelFacts,
    OptionSpec,
    Plan,
    Platform,
    Recommendation,
    Runner,
    Support,
)
from cardan.testing.null_runner import NullKVPool, NullRunner, NullTiming
from cardan.testing.null_tokens import Vocabulary
from cardan.types import DTYPE_BYTES, KVLayout

_WEIGHT_FORMATS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
_MAX_POOL_TOKENS = 1 << 20
_HEAD_ROOM_BYTES = 64 << 20


def _features() -> dict[str, Capability]:
    fake = Capability(Support.NATIVE, "faked", Evidence.SIMULATOR)
    features: dict[str, Capability] = {str(feature): fake for feature in Feature}
    features[Feature.GRAPH] = Capability(Support.UNSUPPORTED, "there is nothing to capture", Evidence.SIMULATOR)
    features[Feature.TENSOR_PARALLEL] = Capability(
        Support.UNSUPPORTED, "it has one device", Evidence.SIMULATOR, "Run with --tp-size 1."
    )
    families = {"dtype": DTYPE_BYTES, "kv_dtype": DTYPE_BYTES, "weights": _WEIGHT_FORMATS, "attention": ("null",)}
    for family, names in families.items():
        features.update({f"{family}:{name}": fake for name in names})
    return features


def _budget(request: MemoryRequest) -> int | None:
    """Bytes for the pool, or None where memory is unknown."""
    if request.memory.free is None:
        return None
    head_room = _HEAD_ROOM_BYTES if request.memory.shared else 0
    return request.memory.free - request.activation_bytes - request.graph_bytes - head_room


class NullLoadedModel(LoadedModel):
    """A model of which only the vocabulary is kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @property
    def weight_bytes(self) -> int:
        """Nothing was loaded."""
        return 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Says that tokens are fake."""
        return ("The null platform reads no weights: every token is made up.",)


class NullDevice(Device):
    """The one device of the null platform."""

    def __init__(self, info: DeviceInfo, options: Mapping[str, Any]) -> None:
        self._info = info
        self._options = options

    @property
    def info(self) -> DeviceInfo:
        """Which device this is."""
        return self._info

    def memory(self) -> Memory:
        """The memory that the option ``memory_mb`` claims, all of it free."""
        num_bytes = int(self._options["memory_mb"]) << 20
        return Memory(total=num_bytes, free=num_bytes)

    def load(self, model: Model, checkpoint: Checkpoint, plan: Plan, progress: Any = None) -> LoadedModel:
        """Keep the vocabulary; no tensor is read."""
        eos = checkpoint.config.get("eos_token_id")
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
        if progress is not None:
            progress(1, 1)
        probability = float(self._options["eos_probability"])
        return NullLoadedModel(Vocabulary(size=model.facts.vocab_size, eos_ids=eos_ids, eos_probability=probability))

    def activation_bytes(self, loaded: LoadedModel, plan: Plan) -> int:
        """Nothing is computed."""
        return 0

    def plan_memory(self, request: MemoryRequest) -> MemoryPlan:
        """Give what steps leave to the pool, up to a million tokens.

        Raises:
            MemoryPlanError: ``memory_mb`` is too little for one request, or memory is unknown.
        """
        page, wanted = request.page_size, request.max_total_tokens
        free = _budget(request)
        if free is None and wanted is None:
            raise MemoryPlanError(
                "The memory of the null device is unknown. Pass --max-total-tokens N to state a size."
            )
        room = _MAX_POOL_TOKENS if free is None else free // max(request.bytes_per_slot, 1) - page
        if wanted is None:
            wanted = min(room, -(-request.useful_slots // page) * page, _MAX_POOL_TOKENS)
        num_slots = max(wanted, 0) // page * page
        if free is not None and num_slots > room:
            raise MemoryPlanError(
                f"--max-total-tokens {wanted} needs {num_slots * request.bytes_per_slot} bytes on the null platform, "
                f"which has {free}. Pass a smaller one, or a larger --platform-option memory_mb=."
            )
        if num_slots < request.min_slots:
            raise MemoryPlanError(
                f"The pool must hold at least {request.min_slots} tokens, the null platform has room for {num_slots}. "
                "Pass a larger --max-total-tokens or --platform-option memory_mb=."
            )
        pool_bytes = (num_slots + page) * request.bytes_per_slot
        lines = (("free", free or 0, "claimed by memory_mb"), ("KV pool", pool_bytes, "never really allocated"))
        return MemoryPlan(num_slots=num_slots, pool_bytes=pool_bytes, lines=lines)

    def allocate_kv(self, layout: KVLayout, num_slots: int, num_rows: int, max_length: int) -> KVPool:
        """A pool that holds token ids."""
        return NullKVPool(layout, num_slots, num_rows, max_length)

    def runner(self, loaded: LoadedModel, pool: KVPool, plan: Plan) -> Runner:
        """A runner that fakes tokens.

        Raises:
            TypeError: the model or the pool is another device's.
        """
        if not isinstance(loaded, NullLoadedModel):
            raise TypeError(f"the model must come from this device's load, got {type(loaded).__name__}")
        if not isinstance(pool, NullKVPool):
            raise TypeError(f"the pool must come from this device's allocate_kv, got {type(pool).__name__}")
        timing = NullTiming(
            step_s=float(self._options["step_ms"]) / 1e3,
            token_s=float(self._options["token_us"]) / 1e6,
            crash_after=int(self._options["crash_after"]),
            nan_token=int(self._options["nan_token"]),
        )
        return NullRunner(pool, loaded.vocabulary, timing)

    def close(self) -> None:
        """Nothing is held."""


class NullPlatform(Platform):
    """Fakes a device; never chosen by ``auto``."""

    name = "null"
    reads_weights = False

    def probe(self) -> Availability:
        """Usable anywhere, chosen only by name."""
        return Availability(0, "fakes tokens; for tests and for measuring the engine alone")

    def devices(self) -> tuple[DeviceInfo, ...]:
        """One device."""
        return (DeviceInfo(index=0, name="null device", detail="no hardware"),)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        """Everything but graphs and tensor parallelism, faked."""
        return Capabilities(_features(), page_sizes=(1, 2, 4, 8, 16, 32, 64, 128))

    def options(self) -> tuple[OptionSpec, ...]:
        """Simulated speed, memory, ends of sequence and faults."""
        return (
            OptionSpec(name="step_ms", kind=float, default=0.0, help="simulated milliseconds of each step"),
            OptionSpec(name="token_us", kind=float, default=0.0, help="simulated microseconds of each token"),
            OptionSpec(name="memory_mb", kind=int, default=1024, help="memory that the device claims to have"),
            OptionSpec(name="eos_probability", kind=float, default=0.0, help="chance that a sequence ends here"),
            OptionSpec(name="crash_after", kind=int, default=0, help="fail after this many steps; 0 never"),
            OptionSpec(name="nan_token", kind=int, default=-1, help="rows that end with this id give NaN; -1 never"),
        )

    def recommend(self, facts: ModelFacts, device: DeviceInfo) -> Mapping[str, Recommendation]:
        """Sizes of a small server."""
        return {
            "chunked_prefill_size": Recommendation(2048, "any size costs the same"),
            "max_running_requests": Recommendation(256, "rows cost nothing"),
            "dtype": Recommendation("float32", "nothing is computed"),
            "attention_backend": Recommendation("null", "the only one"),
        }

    def open(self, device: DeviceInfo, options: Mapping[str, Any]) -> Device:
        """Open the device."""
        return NullDevice(device, options)


platform = NullPlatform()
