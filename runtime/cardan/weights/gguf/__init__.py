"""GGUF files: header, names and config as Hugging Face has them, and tensors in their own encoding.

It knows nothing of folders and hubs, and runs no model.
"""

from cardan.weights.gguf.config import architecture_of, gguf_config
from cardan.weights.gguf.header import GgufHeader, GgufTensor, read_header
from cardan.weights.gguf.rope import read_rope_factors
from cardan.weights.gguf.store import GgufStore

__all__ = [
    "GgufHeader",
    "GgufStore",
    "GgufTensor",
    "architecture_of",
    "gguf_config",
    "read_header",
    "read_rope_factors",
]
