"""Model families, each written once against the ops table.

It knows no array library and no platform.
"""

from cardan.models.decoder import DecoderModel
from cardan.models.parameters import TensorInfo
from cardan.models.registry import MODEL_FAMILIES, ModelBuilder, build_model, register_model
from cardan.models.spec import DecoderSpec

__all__ = [
    "MODEL_FAMILIES",
    "DecoderModel",
    "DecoderSpec",
    "ModelBuilder",
    "TensorInfo",
    "build_model",
    "register_model",
]
