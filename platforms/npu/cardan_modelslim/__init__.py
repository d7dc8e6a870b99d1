"""Checkpoints that Ascend's ModelSlim quantized, for every platform of Cardan: a general plugin.

It knows no device. Importing it imports no torch.
"""

from __future__ import annotations

from cardan.plugins import Register, hookimpl
from cardan.weights.quantized import CheckpointMethod
from cardan_modelslim.reader import DESCRIPTION, ModelSlimReader

__all__ = ["DESCRIPTION", "ModelSlimReader", "register_checkpoint_methods"]


@hookimpl
def register_checkpoint_methods(register: Register) -> None:
    """Add the method under the name of the tool, and that of its format."""
    method = CheckpointMethod(reader=ModelSlimReader, settings_file=DESCRIPTION, aliases=("ascend",))
    register("modelslim", method)
