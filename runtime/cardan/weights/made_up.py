"""Random weights of given shapes, for benchmarks of models whose weights are not here.

It knows no model: shapes come from outside. The same seed gives the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from cardan.errors import ConfigError
from cardan.quantization import FORMATS, WRITABLE_FORMATS, quantize
from cardan.types import TensorView
from cardan.weights.checkpoint import ModelDescription, OpenedCheckpoint

_DEVIATION = 0.02


class RandomCheckpoint(OpenedCheckpoint):
    """A checkpoint whose tensors are made when they are asked for.

    Args:
        description: what ``open_description`` gave.
        shapes: shape of each tensor by its Hugging Face name.
        seed: gives the values.
        dtype: format of the matrices; vectors are F32, and so are matrices whose rows are no whole blocks.
    """

    def __init__(
        self, description: ModelDescription, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: str = "BF16"
    ) -> None:
        super().__init__(description, _RandomStore(shapes, seed, dtype))


class _RandomStore:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: str) -> None:
        if dtype not in WRITABLE_FORMATS:
            raise ConfigError(f"Random weights can be {', '.join(WRITABLE_FORMATS)}, got {dtype!r}.")
        if seed < 0:
            raise ConfigError(f"--random-weights must be 0 or more, got {seed}.")
        self._seed = seed
        self._info = {name: (_format(shape, dtype), tuple(shape)) for name, shape in shapes.items()}

    def info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return self._info

    def tensor(self, name: str) -> TensorView:
        fmt, shape = self._info[name]
        if name.endswith("norm.weight"):
            values = np.ones(shape, dtype=np.float32)
        elif name.endswith(".bias"):
            values = np.zeros(shape, dtype=np.float32)
        else:
            key = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
            generator = np.random.Generator(np.random.Philox(int.from_bytes(key[:16], "little")))
            values = generator.standard_normal(shape, dtype=np.float32) * np.float32(_DEVIATION)
        return TensorView(name, fmt, shape, memoryview(quantize(values, fmt)))

    def close(self) -> None:
        return


def _format(shape: tuple[int, ...], dtype: str) -> str:
    if len(shape) < 2 or shape[-1] % FORMATS[dtype].block_elements:
        return "F32"
    return dtype
