"""A model around a model: whoever listens sees each operation that uses a parameter, its inputs and its result.

It knows no array library and no model family. A listener may put another result in the place of the one it saw.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cardan.platform import LoadedModel, Model
from cardan.runner.device import NeutralModel
from cardan.types import Array, LayerKV

WATCHED = (
    "embed",
    "linear",
    "linear_add",
    "linear_float32",
    "rms_norm",
    "layer_norm",
    "add_rms_norm",
    "silu_mul",
    "gelu_mul",
    "silu",
    "gelu",
    "mul",
    "add",
    "tanh_softcap",
)
"""Operations of models that compute something, as opposed to moving it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation as a model called it.

    Attributes:
        op: its name; ``attend`` and ``rope`` stand for attention and rotation.
        key: name of the parameter that was looked up last, which is its own where it has one.
        ops: the device's operations.
        arguments: what it was given; of ``attend`` and ``rope`` the tokens' positions are the last.
        result: what it gave.
    """

    op: str
    key: str
    ops: Any
    arguments: tuple[Any, ...]
    result: Any


Listener = Callable[[Call], Any]
"""Gets a call; gives the result that the model goes on with, or None to leave it."""


class _Weights(Mapping[str, Any]):
    """Weights that remember which one was asked for last."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights
        self.last = ""

    def __getitem__(self, key: str) -> Any:
        found = self._weights[key]
        self.last = key
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _Ops:
    """Operations that tell of themselves."""

    def __init__(self, ops: Any, weights: _Weights, listener: Listener) -> None:
        self._ops = ops
        self._weights = weights
        self._listener = listener

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return self._told(name, found) if name in WATCHED else found

    def _told(self, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = found(*arguments)
            other = self._listener(Call(name, self._weights.last, self._ops, arguments, result))
            return result if other is None else other

        return call


class _Forward:
    """A step whose rotations and attention tell of themselves."""

    def __init__(self, forward: Any, ops: Any, weights: _Weights, listener: Listener) -> None:
        self._forward = forward
        self._ops = ops
        self._weights = weights
        self._listener = listener
        self.input_ids = forward.input_ids
        self.positions = forward.positions
        self.given_embeds = forward.given_embeds

    def rope(self, x: Array, rope_id: int) -> Array:
        """See ``Forward.rope``."""
        return self._tell("rope", (x, rope_id, self.positions), self._forward.rope(x, rope_id))

    def attend(self, q: Array, k: Array, v: Array, layer: LayerKV, sinks: Array | None = None) -> Array:
        """See ``Forward.attend``."""
        given = (q, k, v, layer, sinks, self.positions)
        return self._tell("attend", given, self._forward.attend(q, k, v, layer, sinks))

    def rope_and_attend(self, q: Array, k: Array, v: Array, layer: LayerKV, sinks: Array | None = None) -> Array:
        """See ``RotatingForward.rope_and_attend``: both tell of themselves."""
        return self.attend(self.rope(q, layer.rope_id), self.rope(k, layer.rope_id), v, layer, sinks)

    def _tell(self, op: str, arguments: tuple[Any, ...], result: Any) -> Any:
        other = self._listener(Call(op, self._weights.last, self._ops, arguments, result))
        return result if other is None else other


class WatchedModel:
    """Runs a model and tells a listener of its operations; sizes and parameters are the model's own."""

    def __init__(self, model: Model, listener: Listener) -> None:
        self._model = model
        self._listener = listener

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, ops: Any, weights: Mapping[str, Any], forward: Any) -> Array:
        """See ``Model.hidden``."""
        seen = _Weights(weights)
        watched = _Ops(ops, seen, self._listener)
        return self._model.hidden(watched, seen, _Forward(forward, ops, seen, self._listener))

    def logits(self, ops: Any, weights: Mapping[str, Any], hidden: Array) -> Array:
        """See ``Model.logits``."""
        seen = _Weights(weights)
        return self._model.logits(_Ops(ops, seen, self._listener), seen, hidden)


def watch(loaded: LoadedModel, listener: Listener) -> LoadedModel | None:
    """The same weights with a listener; None for a device that runs models by itself and shows nothing of them."""
    if not isinstance(loaded, NeutralModel):
        return None
    watched = copy.copy(loaded)
    watched.model = WatchedModel(loaded.model, listener)
    return watched
