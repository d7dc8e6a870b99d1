"""Checkpoints whose linears other tools quantized: recognised by their config, shown as tensors of neutral formats.

It knows no model and no GEMM. Each method's several tensors become one tensor of whole rows in a format of
``cardan.quantization``, put together when it is asked for.
"""

from cardan.weights.quantized.recognition import METHODS, NotedStore, quantization_settings, quantized_store

__all__ = ["METHODS", "NotedStore", "quantization_settings", "quantized_store"]
