"""Holds every operation of a running model to its float64 reference, or puts the reference in its place.

They know no platform. Both need runs of one sequence at a time with nothing cached, since keys and values are followed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from cardan.accuracy.attribution_report import Deviation, layer_of
from cardan.accuracy.references import GROUP_OF, Allowance, References, error
from cardan.accuracy.watching import Call
from cardan.ops.definitions import NumpyArray


class Checker:
    """A listener that holds each call to its reference.

    Attributes:
        deviations: in the order of the calls.
        calls: how many were looked at.
    """

    def __init__(self, references: References, allowance: Allowance) -> None:
        self._references = references
        self._allowance = allowance
        self.deviations: list[Deviation] = []
        self.calls = 0

    def __call__(self, call: Call) -> None:
        """Look at a call."""
        allowed = self._allowance.of(call)
        results = call.result if call.op == "add_rms_norm" else (call.result,)
        wanted = [self._references.result(call)]
        if call.op == "add_rms_norm":
            wanted.append(self._references.stream(call))
        found = max(error(_values(call, got), want) for got, want in zip(results, wanted, strict=True))
        if found > allowed:
            size = self._references.size(call)
            if size is not None:
                found = error(_values(call, call.result), wanted[0], size)
        self.calls += 1
        if found > allowed:
            self.deviations.append(
                Deviation(
                    op=call.op,
                    group=GROUP_OF[call.op],
                    key=call.key,
                    layer=layer_of(call.key),
                    error=found,
                    allowed=allowed,
                )
            )


class Replacer:
    """A listener that gives the model references in the place of some groups' results."""

    def __init__(self, references: References, groups: Collection[str], dtype: str) -> None:
        """Bind it.

        Args:
            references: what results should be.
            groups: names in ``references.GROUPS``.
            dtype: of the activations.
        """
        self._references = references
        self._groups = groups
        self._dtype = dtype

    def __call__(self, call: Call) -> Any:
        """The result that the model goes on with."""
        if GROUP_OF[call.op] not in self._groups:
            return None
        result = self._place(call, self._references.result(call))
        if call.op == "add_rms_norm":
            return result, self._place(call, self._references.stream(call))
        return result

    def _place(self, call: Call, values: NumpyArray) -> Any:
        dtype = "float32" if call.op == "linear_float32" else self._dtype
        return call.ops.from_host(np.ascontiguousarray(values, np.float32), dtype)


def _values(call: Call, result: Any) -> NumpyArray:
    return np.asarray(call.ops.to_host(result), np.float64)
