"""Checkpoints: found, opened, checked, and handed out as names, shapes, formats and bytes.

It runs no model and knows no device. Names and configs are Hugging Face's, whatever the file calls them.
"""

from cardan.weights.bundled import BUNDLED, fetch_bundled
from cardan.weights.checkpoint import ModelDescription, OpenedCheckpoint, TensorStore, TokenizerSource
from cardan.weights.locate import Located, locate_model, locate_tokenizer
from cardan.weights.made_up import RandomCheckpoint
from cardan.weights.opening import Progress, open_checkpoint, open_description

__all__ = [
    "BUNDLED",
    "Located",
    "ModelDescription",
    "OpenedCheckpoint",
    "Progress",
    "RandomCheckpoint",
    "TensorStore",
    "TokenizerSource",
    "fetch_bundled",
    "locate_model",
    "locate_tokenizer",
    "open_checkpoint",
    "open_description",
]
