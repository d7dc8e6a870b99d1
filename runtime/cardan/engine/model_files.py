"""Opens what a model's processes need: the checkpoint, its description, and the tokenizer from it.

It knows no platform and reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cardan.config import ModelConfig
from cardan.text.tokenizer import Tokenizer, load_tokenizer
from cardan.weights import ModelDescription, OpenedCheckpoint, open_checkpoint, open_description

NULL_MODEL = "null"
"""The model name that stands for a tiny folder without weights, which only the null platform can serve."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""


def _located(config: ModelConfig) -> ModelConfig:
    if config.model != NULL_MODEL:
        return config
    from cardan.testing import null_model_folder

    return replace(config, model=str(null_model_folder()))


def open_model(config: ModelConfig, progress: Progress | None = None) -> OpenedCheckpoint:
    """Find, fetch where needed, and open the checkpoint of a model.

    Raises:
        ModelError: there is no such model, or its files are wrong.
    """
    return open_checkpoint(_located(config), progress)


def open_weightless(config: ModelConfig, progress: Progress | None = None) -> ModelDescription:
    """Find, fetch where needed, and describe a model; a folder needs no weights for this.

    Raises:
        ModelError: there is no such model, or its files are wrong.
    """
    return open_description(_located(config), progress)


def load_model_tokenizer(
    config: ModelConfig, progress: Progress | None = None, *, renders_chat: bool = True
) -> Tokenizer:
    """The tokenizer of a model, with its chat templates where they are to be rendered.

    Raises:
        ModelError: there is no such model, or its files are wrong.
    """
    description = open_weightless(config, progress)
    return load_tokenizer(
        description.tokenizer,
        generation_config=description.generation_config,
        chat_template=config.chat_template,
        renders_chat=renders_chat,
    )
