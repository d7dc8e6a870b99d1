"""What the parts of the check of a GPU share: the time that is left, and small models without weights.

It knows no part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cardan.config import EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine import preparation
from cardan.engine.preparation import Prepared, prepare
from cardan.platform import Platform
from cardan.types import TensorView
from cardan.weights import RandomCheckpoint

TILE = 1 << 25
"""Drawn values that are repeated through all weights: drawing billions would take longer than the whole check."""

SHAPES: Mapping[str, dict[str, Any]] = {
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 48,
        "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 160, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
    },
    "small": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 512,
        "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0,
    },
}  # fmt: skip
"""Configs of models whose weights are made up."""


class OutOfTimeError(Exception):
    """A part has used its time up; what it measured before is kept."""


@dataclass(slots=True)
class Clock:
    """The time that a run may take.

    Attributes:
        end_s: monotonic seconds at which it is over.
    """

    end_s: float

    @classmethod
    def of(cls, seconds: float) -> Clock:
        """A clock that starts now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end_s - time.monotonic()

    def part(self, share: float) -> Clock:
        """A clock for a part that may take a share of what is left."""
        return Clock(time.monotonic() + max(self.left_s, 0.0) * share)

    def check(self) -> None:
        """Stop a part that has used its time up.

        Raises:
            OutOfTimeError: it has.
        """
        if self.left_s <= 0:
            raise OutOfTimeError


class _TiledStore:
    """Weights of a made-up model that repeat one stretch of drawn values."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        drawn = np.random.default_rng(seed).standard_normal(TILE, dtype=np.float32) * np.float32(0.02)
        self._tile = (drawn.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        self._shapes = shapes

    def info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {name: ("F32" if len(shape) < 2 else "BF16", tuple(shape)) for name, shape in self._shapes.items()}

    def tensor(self, name: str) -> TensorView:
        shape = tuple(self._shapes[name])
        if len(shape) < 2:
            return TensorView(name, "F32", shape, memoryview(np.ones(shape, np.float32)).cast("B"))
        values = np.resize(self._tile, shape)
        return TensorView(name, "BF16", shape, memoryview(values).cast("B"))

    def close(self) -> None:
        return


class TiledCheckpoint(RandomCheckpoint):
    """A made-up checkpoint of billions of weights, made in seconds."""

    def __init__(self, description: Any, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        super(RandomCheckpoint, self).__init__(description, _TiledStore(shapes, seed))


def folder_of(shape: str, parent: Path) -> Path:
    """A folder that holds the config of a made-up model."""
    folder = parent / shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    return folder


def open_engine(
    platform: Platform, folder: Path, settings: Mapping[str, Any], options: tuple[str, ...] = ()
) -> Prepared:
    """Everything that an engine runs on, in this process.

    Args:
        platform: that it runs on.
        folder: with weights, or with a config alone: then weights are made up from seed 1.
        settings: ``dtype``, ``max_running_requests``, ``context_length``, ``disable_graph``.
        options: of the platform.
    """
    made_up = not any(folder.glob("*.safetensors")) if folder.is_dir() else False
    preparation.RandomCheckpoint = TiledCheckpoint  # type: ignore[attr-defined,misc]
    config = EngineConfig(
        model=ModelConfig(
            model=str(folder),
            dtype=settings.get("dtype", "bfloat16"),
            context_length=settings.get("context_length"),
            random_weights=1 if made_up else None,
        ),
        platform=PlatformConfig(
            platform=platform.name, options=options, disable_graph=bool(settings.get("disable_graph", False))
        ),
        scheduler=SchedulerConfig(max_running_requests=settings.get("max_running_requests"), random_seed=1),
    )
    return prepare(config, platform=platform)
