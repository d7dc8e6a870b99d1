"""Scales that a checkpoint brings for keys and values that are kept as floats of 8 bits: two for each layer.

It knows no model and no KV cache: layers are told by the numbers in the names of tensors.

Names below ``layers.N.self_attn.``: ``k_scale`` and ``v_scale`` (compressed-tensors, FP8 checkpoints),
``k_proj.k_scale`` and ``v_proj.v_scale`` (ModelOpt), ``k_proj.output_scale`` and ``v_proj.output_scale`` (Quark, older
compressed-tensors), ``kv_scale`` for both (AutoFP8). A value is ``code * scale``.
Source: "Quantized KV Cache" in vLLM's documentation; the exports of the named tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cardan.errors import CheckpointError
from cardan.quantization import dequantize
from cardan.types import TensorView
from cardan.weights.checkpoint import TensorStore

CONFIG_KEY = "cardan_kv_scales"
"""Under which a checkpoint's config has the scales: ``{"0": [k_scale, v_scale], …}``."""

_ENDINGS: Mapping[str, str] = {
    **{f"{module}k_scale": "k" for module in ("", "attn.", "k_proj.", "qkv_proj.")},
    **{f"{module}v_scale": "v" for module in ("", "attn.", "v_proj.", "qkv_proj.")},
    "k_proj.output_scale": "k",
    "v_proj.output_scale": "v",
    "kv_scale": "kv",
}
"""What the names of scales end in, and what they are of."""
_NAME = re.compile(
    r"(?:model\.|language_model\.model\.|model\.language_model\.)?layers\.(\d+)\.self_attn\.("
    + "|".join(re.escape(ending) for ending in _ENDINGS)
    + ")"
)
_TYPES = ("F32", "F16", "BF16", "F64")
_WHAT = {"k": "keys", "v": "values"}


@dataclass(frozen=True, slots=True)
class KVScales:
    """What a checkpoint brings.

    Attributes:
        by_layer: scale of keys and scale of values, by the number of the layer.
        names: of the tensors that they stand in.
        per_head: whether some had several values, of which the largest is taken.
    """

    by_layer: Mapping[int, tuple[float, float]]
    names: frozenset[str]
    per_head: bool

    @property
    def config(self) -> dict[str, dict[str, list[float]]]:
        """What a checkpoint's config says of them; empty for none."""
        found = {str(layer): list(pair) for layer, pair in sorted(self.by_layer.items())}
        return {CONFIG_KEY: found} if found else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the plan should say of them."""
        if not self.per_head:
            return ()
        return (
            "the checkpoint has a scale of keys and values for each head; the largest of a layer is taken for all of "
            "its heads, which costs floats of 8 bits no precision but near zero",
        )


def read_kv_scales(store: TensorStore) -> KVScales:
    """Read the scales of a store.

    Raises:
        CheckpointError: one is no positive number, two contradict each other, or keys have one and values have none.
    """
    found: dict[int, dict[str, float]] = {}
    names: set[str] = set()
    per_head = False
    for name, (dtype, _) in store.info().items():
        match = _NAME.fullmatch(name)
        if match is None or dtype not in _TYPES:
            continue
        scale, count = _largest(store.tensor(name))
        names.add(name)
        per_head |= count > 1
        of_layer = found.setdefault(int(match[1]), {})
        for kind in _ENDINGS[match[2]]:
            if of_layer.setdefault(kind, scale) != scale:
                raise CheckpointError(
                    f"{name} says that {_WHAT[kind]} have the scale {scale:g}, and another tensor of layer {match[1]} "
                    f"says {of_layer[kind]:g}. Fetch the checkpoint again, or choose another."
                )
    return KVScales({layer: _pair(layer, kinds) for layer, kinds in found.items()}, frozenset(names), per_head)


class WithoutScales:
    """A ``TensorStore`` that does not show the scales of keys and values of another."""

    def __init__(self, store: TensorStore, scales: KVScales) -> None:
        self._store = store
        self._info = {name: entry for name, entry in store.info().items() if name not in scales.names}

    def info(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Format and shape of the other tensors by name."""
        return self._info

    def tensor(self, name: str) -> TensorView:
        """A tensor that ``info`` lists."""
        return self._store.tensor(name)

    def close(self) -> None:
        """Give up the files."""
        self._store.close()


def _largest(view: TensorView) -> tuple[float, int]:
    """The largest of a tensor's values, and how many there are."""
    values = dequantize(view)
    if not values.size or not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(
            f"{view.name} must hold finite numbers above 0, by which keys or values are divided, got "
            f"{values.reshape(-1)[:4].tolist()}. Fetch the checkpoint again, or choose another."
        )
    return float(values.max()), values.size


def _pair(layer: int, kinds: Mapping[str, float]) -> tuple[float, float]:
    for kind, what in _WHAT.items():
        if kind not in kinds:
            other = next(name for name in _WHAT.values() if name != what)
            raise CheckpointError(
                f"Layer {layer} has a scale for {other} and none for {what}. The checkpoint is incomplete; fetch it "
                "again, or choose another."
            )
    return kinds["k"], kinds["v"]
