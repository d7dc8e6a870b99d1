"""Checkpoints whose linears are stored as affine groups: packed codes, scales and biases in three tensors each.

It knows no model and no GEMM: it shows each three as one tensor in one of the ``AFFINE`` formats, whose blocks are a
group's scale, its bias and its codes, so that rows stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.errors import CheckpointError
from cardan.quantization import AFFINE_BITS, AFFINE_GROUPS, AFFINE_SCALES, affine_format
from cardan.types import TensorView
from cardan.weights.checkpoint import TensorStore

CODES = "U32"
"""Type of the tensors that hold packed codes."""

Shape = tuple[int, ...]


class AffineStore:
    """Tensors of a store, its affine groups put together."""

    def __init__(self, store: TensorStore, config: Mapping[str, Any]) -> None:
        """Look through a store.

        Args:
            store: has the tensors.
            config: the model's, with ``quantization``: ``group_size``, and the same under the names of modules that
                differ.

        Raises:
            CheckpointError: groups are of a kind that Cardan does not read, or their tensors do not fit together.
        """
        self._store = store
        self._settings: Mapping[str, Any] = config["quantization"]
        _check_mode(self._settings)
        info = store.info()
        self._info: dict[str, tuple[str, Shape]] = {}
        self._affine: set[str] = set()
        for name, (dtype, _) in info.items():
            module = name.removesuffix(".weight")
            if dtype == CODES and module != name and f"{module}.scales" in info:
                self._info[name] = self._together(module, info)
                self._affine.add(name)
        parts = {f"{name.removesuffix('.weight')}.{part}" for name in self._affine for part in ("scales", "biases")}
        self._info |= {name: entry for name, entry in info.items() if name not in parts and name not in self._affine}

    def info(self) -> Mapping[str, tuple[str, Shape]]:
        """Format and logical shape of every tensor by name."""
        return self._info

    def tensor(self, name: str) -> TensorView:
        """A tensor; affine groups are copied into blocks."""
        if name not in self._affine:
            return self._store.tensor(name)
        fmt, shape = self._info[name]
        module = name.removesuffix(".weight")
        parts = [_grouped(self._store.tensor(f"{module}.{part}"), shape) for part in ("scales", "biases")]
        groups = parts[0].shape[1]
        codes = np.frombuffer(self._store.tensor(name).data, dtype=np.uint8).reshape(shape[0], groups, -1)
        blocks = np.concatenate((*parts, codes), axis=2)
        return TensorView(name, fmt, shape, blocks.reshape(-1).data)

    def close(self) -> None:
        """Give up the files."""
        self._store.close()

    def _together(self, module: str, info: Mapping[str, tuple[str, Shape]]) -> tuple[str, Shape]:
        """Format and logical shape of a module's weight."""
        codes, (scale, scales) = info[f"{module}.weight"][1], info[f"{module}.scales"]
        biases = info.get(f"{module}.biases")
        if biases != (scale, scales) or len(codes) != 2 or len(scales) != 2 or codes[0] != scales[0]:
            raise CheckpointError(
                f"{module}.weight {list(codes)}, .scales {list(scales)} and .biases "
                f"{'missing' if biases is None else list(biases[1])} do not belong together: expected as many rows, "
                "and scales and biases of one shape and type. Fetch the checkpoint again."
            )
        group = self._group(module)
        columns = scales[1] * group
        bits = 32 * codes[1] // columns if columns else 0
        if bits not in AFFINE_BITS or group not in AFFINE_GROUPS or scale not in AFFINE_SCALES:
            raise CheckpointError(
                f"{module} has affine groups of {group} with {bits} bits and {scale} scales; Cardan reads groups of "
                f"{_listed(AFFINE_GROUPS)} with {_listed(AFFINE_BITS)} bits and {_listed(AFFINE_SCALES)} scales. "
                "Choose a checkpoint of that kind, or one that is not quantized."
            )
        if bits * columns != 32 * codes[1]:
            raise CheckpointError(
                f"{module}.weight has {codes[1]} words a row, but {columns} codes of {bits} bits take "
                f"{bits * columns // 32}. Check that config.json belongs to these weights."
            )
        return affine_format(bits, group, scale), (codes[0], columns)

    def _group(self, module: str) -> int:
        own = self._settings.get(module)
        settings = own if isinstance(own, Mapping) else self._settings
        group = settings.get("group_size")
        if not isinstance(group, int) or group <= 0:
            raise CheckpointError(
                f"config.json: quantization.group_size must be a whole number above 0, got {group!r} for {module}. "
                "Fetch the config again."
            )
        return group


def has_affine_groups(config: Mapping[str, Any]) -> bool:
    """Whether a config says that linears are stored as affine groups."""
    settings = config.get("quantization")
    return isinstance(settings, Mapping) and "group_size" in settings and "bits" in settings


def _check_mode(settings: Mapping[str, Any]) -> None:
    mode = settings.get("mode", "affine")
    if mode != "affine":
        raise CheckpointError(
            f"config.json: quantization.mode is {mode!r}; Cardan reads affine groups only. "
            "Choose a checkpoint with affine groups, or one that is not quantized."
        )


def _grouped(view: TensorView, shape: Shape) -> npt.NDArray[np.uint8]:
    """Bytes of one number for each group: uint8 ``[rows, groups, bytes]``."""
    raw = np.frombuffer(view.data, dtype=np.uint8)
    return raw.reshape(shape[0], view.shape[1], -1)


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values)
