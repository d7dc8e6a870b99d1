"""Model code never looks into an array: it runs on handles that allow nothing but being passed on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_forward import DenseForward, dense_weights, read_folder, tensor_info
from tiny_models import FAMILIES, make_tiny

from cardan.models import build_model
from cardan.ops import Ops, ReferenceOps


class Handle:
    """An array that nobody may look into; comparing, adding, testing or measuring it is an error."""

    __slots__ = ("_hidden",)

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "_hidden", value)

    def __bool__(self) -> bool:
        raise AssertionError("model code tested an array")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("model code compared an array")

    __hash__ = None  # type: ignore[assignment]


def closed(value: Any) -> Any:
    return tuple(map(closed, value)) if isinstance(value, tuple) else Handle(value)


def opened(value: Any) -> Any:
    return value._hidden if isinstance(value, Handle) else value


class HandleOps:
    """``ReferenceOps`` behind handles."""

    def __init__(self) -> None:
        self._ops = ReferenceOps("float32")

    def __getattr__(self, name: str) -> Any:
        assert hasattr(Ops, name), f"model code called {name}, which is no operation"
        return lambda *arguments: closed(getattr(self._ops, name)(*map(opened, arguments)))


class HandleForward:
    def __init__(self, forward: DenseForward) -> None:
        self._forward = forward
        self.input_ids, self.positions = Handle(forward.input_ids), Handle(forward.positions)
        self.given_embeds = None

    def rope(self, x: Any, rope_id: int) -> Any:
        return Handle(self._forward.rope(opened(x), rope_id))

    def attend(self, q: Any, k: Any, v: Any, layer: Any, sinks: Any = None) -> Any:
        return Handle(self._forward.attend(opened(q), opened(k), opened(v), layer))


class HandleRotatingForward(HandleForward):
    def rope_and_attend(self, q: Any, k: Any, v: Any, layer: Any, sinks: Any = None) -> Any:
        return Handle(self._forward.rope_and_attend(opened(q), opened(k), opened(v), layer))


def run_on_handles(family, folder, make_forward):
    """Logits of three tokens."""
    config, tensors = read_folder(make_tiny(family, folder / "model"))
    model = build_model(config, "tiny", tensor_info(tensors))
    ops = ReferenceOps("float32")
    weights = {name: Handle(value) for name, value in dense_weights(model, tensors, ops).items()}
    forward = make_forward(DenseForward(ops, [5, 6, 7], model.rope_tables(3)))
    logits = opened(model.logits(HandleOps(), weights, model.hidden(HandleOps(), weights, forward)))
    assert logits.shape == (3, model.facts.vocab_size)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_models_run_on_handles(family, tmp_path):
    assert np.isfinite(run_on_handles(family, tmp_path, HandleRotatingForward)).all()


def test_a_step_that_does_not_rotate_as_it_attends_is_asked_for_both(tmp_path):
    """As that of a plugin which was written before ``RotatingForward`` was there."""
    assert not hasattr(HandleForward, "rope_and_attend")
    logits = [
        run_on_handles("llama", tmp_path / each.__name__, each) for each in (HandleForward, HandleRotatingForward)
    ]
    assert np.array_equal(*logits)
