"""Which models and layers an attention library takes, and the reason where it does not.

It imports neither torch nor a library: what a library takes is a platform's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cardan.platform import ModelFacts
from cardan.types import KVKind, LayerKV


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryLimits:
    """What the paged attention of a library takes.

    Attributes:
        name: of the library's module, and of the backend.
        dtypes: of activations.
        kv_dtypes: of keys and values in the pool; None where they must have the activations' own.
        head_sizes: that its kernels are compiled for; keys and values are as wide as each other.
        kinds: of layers.
    """

    name: str
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...] | None
    head_sizes: tuple[int, ...]
    kinds: tuple[KVKind, ...]

    def why_not_layer(self, layer: LayerKV) -> str | None:
        """Why it does not take a layer; None where it does."""
        if layer.kind not in self.kinds:
            return f"layers of kind {layer.kind.value} need another kernel"
        if layer.sinks:
            return "its kernels take no attention sinks"
        if layer.k_dim != layer.v_dim or layer.k_dim not in self.head_sizes:
            heads = _listed([str(size) for size in self.head_sizes])
            return (
                f"its kernels take heads of {heads}, the layers have keys of {layer.k_dim} and values of {layer.v_dim}"
            )
        return None

    def why_not_model(self, facts: ModelFacts) -> str | None:
        """Why a model attends otherwise where the library is installed; None where it takes all layers."""
        if facts.native_dtype not in self.dtypes:
            return f"{self.name} computes in {_listed(self.dtypes)}, the model is {facts.native_dtype}"
        for layer in facts.layers:
            reason = self.why_not_layer(layer)
            if reason is not None:
                return f"{self.name} is installed, but {reason}"
        return None

    def takes(self, layer: LayerKV, dtype: str, kv_dtype: str) -> bool:
        """Whether it attends for a layer with activations and a pool of these types."""
        fits = kv_dtype == dtype if self.kv_dtypes is None else kv_dtype in self.kv_dtypes
        return dtype in self.dtypes and fits and self.why_not_layer(layer) is None


def _listed(words: Sequence[str]) -> str:
    """``64, 128 and 256``."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
