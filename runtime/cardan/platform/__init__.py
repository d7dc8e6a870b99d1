"""The seam: what a platform plugin implements and what the engine asks of it.

It knows no platform by name and no array library. Everything that a plugin may use is exported here and from
``cardan.ops``, ``cardan.types`` and ``cardan.errors``.
"""

from cardan.platform.api import (
    PLATFORM_API,
    Availability,
    OptionSpec,
    Platform,
    Recommendation,
)
from cardan.platform.capabilities import Capabilities, Capability, Evidence, Feature, Requantized, Support
from cardan.platform.communicator import Communicator, RankPlace
from cardan.platform.device import Device, DeviceInfo, KVPool, LoadedModel, Runner, Step
from cardan.platform.memory import (
    Memory,
    MemoryPlan,
    MemoryPolicy,
    MemoryRequest,
    SharedMemoryPolicy,
    host_memory,
)
from cardan.platform.model import (
    Checkpoint,
    Forward,
    Model,
    ModelFacts,
    Parameter,
    ParameterKind,
    RopeTable,
    RotatingForward,
    Shard,
    Source,
)
from cardan.platform.ops_device import (
    ActivationCodes,
    AttentionBackend,
    AttentionMeta,
    CapturedStep,
    Fetch,
    GraphRunner,
    LinearMethod,
    LinearSpec,
    OpsDevice,
    OpsKVPool,
    PackedWeight,
    Recorder,
    Recording,
    RotatingAttention,
)
from cardan.platform.plan import FormatPlan, Plan, Setting, SettingSource
from cardan.platform.tuning import Tunable, TunedLinear, Tuner, TuningProgress

__all__ = [
    "PLATFORM_API",
    "ActivationCodes",
    "AttentionBackend",
    "AttentionMeta",
    "Availability",
    "Capabilities",
    "Capability",
    "CapturedStep",
    "Checkpoint",
    "Communicator",
    "Device",
    "DeviceInfo",
    "Evidence",
    "Feature",
    "Fetch",
    "FormatPlan",
    "Forward",
    "GraphRunner",
    "KVPool",
    "LinearMethod",
    "LinearSpec",
    "LoadedModel",
    "Memory",
    "MemoryPlan",
    "MemoryPolicy",
    "MemoryRequest",
    "Model",
    "ModelFacts",
    "OpsDevice",
    "OpsKVPool",
    "OptionSpec",
    "PackedWeight",
    "Parameter",
    "ParameterKind",
    "Plan",
    "Platform",
    "RankPlace",
    "Recommendation",
    "Recorder",
    "Recording",
    "Requantized",
    "RopeTable",
    "RotatingAttention",
    "RotatingForward",
    "Runner",
    "Setting",
    "SettingSource",
    "Shard",
    "SharedMemoryPolicy",
    "Source",
    "Step",
    "Support",
    "Tunable",
    "TunedLinear",
    "Tuner",
    "TuningProgress",
    "host_memory",
]
