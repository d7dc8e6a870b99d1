"""Checkpoints whose linears other tools quantized: recognised by their config, shown as tensors of neutral formats.

It knows no model and no GEMM. Each method's several tensors become one tensor of whole rows in a format of
``cardan.quantization``, put together when it is asked for. Plugins add methods as ``CheckpointMethod``.
"""

from cardan.weights.quantized.module import SCALES, Entry, Groups, Module, Packed, groups_of
from cardan.weights.quantized.reader import Reader
from cardan.weights.quantized.recognition import (
    METHODS,
    SETTINGS,
    CheckpointMethod,
    NotedStore,
    names_of,
    quantization_settings,
    quantized_store,
)
from cardan.weights.quantized.settings import Settings

__all__ = [
    "METHODS",
    "SCALES",
    "SETTINGS",
    "CheckpointMethod",
    "Entry",
    "Groups",
    "Module",
    "NotedStore",
    "Packed",
    "Reader",
    "Settings",
    "groups_of",
    "names_of",
    "quantization_settings",
    "quantized_store",
]
