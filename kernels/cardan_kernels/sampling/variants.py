"""Variants of the kernels that sample.

It compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cardan_kernels.compiled.variant import Variant, empty
from cardan_kernels.sampling.adjust import Penalties, SparseBias, add_at, adjust_logits
from cardan_kernels.sampling.draw import DrawInputs, draw_tokens
from cardan_kernels.sampling.noise import gumbel

ROWS, VOCAB, LINES = 16, 151936, 8


def variants(name: str) -> tuple[Variant, ...]:
    """Variants for one chip; all take the same."""
    return (
        *(Variant("draw_tokens", {"logits": which}, _drawer(which == "adjusted")) for which in ("own", "adjusted")),
        *(
            Variant("adjust_logits", {"penalties": penalties, "mask": mask}, _adjuster(penalties, mask))
            for penalties in ("penalties", "no penalties")
            for mask in ("mask", "no mask")
        ),
        Variant("adjust_logits", {"penalties": "no penalties", "mask": "bias"}, _biaser()),
        Variant("add_at", {}, lambda: add_at(_floats(LINES, VOCAB), _ints(ROWS), _ints(ROWS), _floats(ROWS))),
        Variant("gumbel", {"ids": "all ids"}, lambda: gumbel(_ints(ROWS, 2), _ints(ROWS), VOCAB)),
        Variant("gumbel", {"ids": "some ids"}, lambda: gumbel(_ints(ROWS, 2), _ints(ROWS), _ints(ROWS, 64))),
    )


def _ints(*shape: int) -> torch.Tensor:
    return empty(shape, torch.int32)


def _floats(*shape: int) -> torch.Tensor:
    return empty(shape, torch.float32)


def _drawer(adjusted: bool) -> Callable[[], object]:
    def run() -> object:
        inputs = DrawInputs(
            temperature=_floats(ROWS),
            top_k=_ints(ROWS),
            top_p=_floats(ROWS),
            min_p=_floats(ROWS),
            seeds=_ints(ROWS, 2),
            positions=_ints(ROWS),
        )
        return draw_tokens(_floats(ROWS, VOCAB), inputs, logits=_floats(ROWS, VOCAB) if adjusted else None)

    return run


def _adjuster(penalties: str, mask: str) -> Callable[[], object]:
    def run() -> object:
        wanted = Penalties(
            lines=_ints(ROWS),
            prompt=_floats(LINES, VOCAB),
            output=_floats(LINES, VOCAB),
            repetition=_floats(ROWS),
            frequency=_floats(ROWS),
            presence=_floats(ROWS),
        )
        words = _ints(ROWS, (VOCAB + 31) // 32) if mask == "mask" else None
        return adjust_logits(_floats(ROWS, VOCAB), penalties=wanted if penalties == "penalties" else None, mask=words)

    return run


def _biaser() -> Callable[[], object]:
    def run() -> object:
        bias = SparseBias(rows=_ints(64), ids=_ints(64), values=_floats(64))
        return adjust_logits(_floats(ROWS, VOCAB), bias=bias)

    return run
