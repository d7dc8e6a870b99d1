"""Features of a plan that can be turned off one at a time, as ways of running a session.

They know no platform: what there is to turn off stands in the plan and in the capabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cardan.accuracy.cases import Case
from cardan.accuracy.session import Session, Way, changed_plan
from cardan.platform import Checkpoint, LoadedModel, Plan
from cardan.types import Float32Array, TensorView

DENSE = frozenset({"F32", "F16", "BF16"})
ALL_OFF = Way(
    name="eagerly, one by one, whole prompts, nothing cached, no overlap",
    batch=1,
    settings={"graph": False, "overlap": False, "radix_cache": False, "chunked_prefill_size": -1},
)
"""Every feature of the schedule off at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One feature and how to do without it.

    Attributes:
        feature: its name.
        how: what runs instead.
        make: the way of running so; weights that it needs are loaded when it is called.
    """

    feature: str
    how: str
    make: Callable[[], Way]


def switches(session: Session, cases: Sequence[Case]) -> Iterator[Switch]:
    """Everything that a session's plan has on, those that say most of where a fault is first.

    Args:
        session: that runs.
        cases: what will run; a pool of its own, for another type of keys and values, holds no more than these.
    """
    plan = session.plan
    for setting, feature, how in (
        ("graph", "graphs", "every step runs eagerly"),
        ("overlap", "overlap", "each step is read before the next is launched"),
        ("radix_cache", "prefix cache", "no prefix is reused"),
    ):
        if plan.value(setting):
            yield _setting(feature, how, {setting: False})
    if plan.chunked_prefill_size > 0:
        yield _setting("chunked prefill", "prompts run whole", {"chunked_prefill_size": -1})
    yield from _backends(session)
    yield from _types(session, room(session.plan, cases))
    if plan.value("quantization") is not None or set(plan.model.weight_formats) - DENSE:
        yield Switch(
            feature="quantized linears",
            how="weights are widened to float32 before they are loaded",
            make=lambda: Way(name="widened weights", loaded=_widened(session), settings={"quantization": None}),
        )
    if plan.max_running_requests > 1:
        yield Switch(feature="batching", how="requests run one by one", make=lambda: Way(name="batch size 1", batch=1))


def _setting(feature: str, how: str, settings: Mapping[str, Any]) -> Switch:
    return Switch(feature=feature, how=how, make=lambda: Way(name=how, settings=settings))


def _backends(session: Session) -> Iterator[Switch]:
    names = ("prefill_attention_backend", "decode_attention_backend")
    used = {session.plan.value(name) for name in names}
    for other in session.capabilities.family("attention"):
        if used != {other}:
            yield _setting(
                f"attention backend {' and '.join(sorted(map(str, used)))}",
                f"the attention backend {other} runs",
                dict.fromkeys(names, other),
            )


def room(plan: Plan, cases: Sequence[Case]) -> int:
    """Slots that hold all cases at once, with a page to spare for each; never more than the plan's."""
    pages = sum(-(-len(case.ids) // plan.page_size) + 1 for case in cases) + 1
    return min(pages * plan.page_size, int(plan.value("max_total_tokens")))


def _types(session: Session, slots: int) -> Iterator[Switch]:
    """Types that are narrower than float32, where the platform has that, over pools of so many slots."""
    plan, capabilities = session.plan, session.capabilities
    wide_kv = "float32" if capabilities.supports("kv_dtype:float32") else plan.dtype
    if plan.kv_cache_dtype != wide_kv and capabilities.supports(f"kv_dtype:{wide_kv}"):
        settings = {"kv_cache_dtype": wide_kv, "max_total_tokens": slots}
        yield _setting(f"keys and values in {plan.kv_cache_dtype}", f"they are kept in {wide_kv}", settings)
    if plan.dtype != "float32" and capabilities.supports("dtype:float32"):
        widest = {"dtype": "float32", "kv_cache_dtype": wide_kv, "max_total_tokens": slots}
        yield Switch(
            feature=f"activations in {plan.dtype}",
            how="they are float32",
            make=lambda: Way(name="float32", loaded=_loaded(session, widest), settings=widest),
        )


def _loaded(session: Session, settings: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> LoadedModel:
    opened = session.prepared.opened
    plan = changed_plan(session.plan, settings, "attribution")
    return session.prepared.device.load(opened.model, checkpoint or opened.checkpoint, plan)


def _widened(session: Session) -> LoadedModel:
    return _loaded(session, {"quantization": None}, WidenedCheckpoint(session.prepared.opened.checkpoint))


class WidenedCheckpoint:
    """A checkpoint whose quantized tensors come as float32; implements ``cardan.platform.Checkpoint``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's own."""
        return self._checkpoint.config

    def names(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._checkpoint.names()

    def tensor(self, name: str) -> TensorView:
        """One tensor, widened where it is quantized."""
        view = self._checkpoint.tensor(name)
        if view.dtype in DENSE:
            return view
        values = np.ascontiguousarray(self._checkpoint.dequantize(view), np.float32)
        return replace(view, dtype="F32", order=None, data=values.reshape(-1).view(np.uint8).data)

    def num_bytes(self, name: str) -> int:
        """Bytes as they stand in the file."""
        return self._checkpoint.num_bytes(name)

    def dequantize(self, view: TensorView) -> Float32Array:
        """See ``Checkpoint.dequantize``."""
        return self._checkpoint.dequantize(view)

    def close(self) -> None:
        """Nothing is held; the checkpoint stays open."""
