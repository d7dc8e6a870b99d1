"""What the repaired interpreter leaves out: what it makes of each call within a kernel, and answers nobody reads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def _multiplied(values, factor):
    return values * factor


@triton.jit
def _multiply_kernel(x, factor):
    at = tl.arange(0, 4)
    values = _multiplied(tl.load(x + at), factor)
    tl.store(x + at, _multiplied(values, 1) + _multiplied(values, 0))


def test_overflows_are_looked_for_where_triton_debugs_and_wrap_around_elsewhere(monkeypatch):
    def multiplied(values, factor):
        x = torch.tensor(values, dtype=torch.int32)
        _multiply_kernel[(1,)](x, factor)
        return x.tolist()

    assert multiplied([1, 2, 3, 2**30], 4) == [4, 8, 12, 0]
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    with pytest.raises(interpreter.InterpreterError, match="int32 overflow detected for operation mul"):
        multiplied([1, 2, 3, 2**30], 4)
    assert multiplied([1, 2, 3, 2**30], -2) == [-2, -4, -6, -(2**31)]


def test_functions_of_a_kernel_find_the_language_prepared(monkeypatch):
    prepare, times = interpreter._patch_lang, []

    def counted(function):
        times.append(function.__name__)
        return prepare(function)

    monkeypatch.setattr(interpreter, "_patch_lang", counted)
    x = torch.ones(4, dtype=torch.int32)
    for _ in range(2):
        _multiply_kernel[(3,)](x, 3)
    assert times == ["_multiply_kernel", "_multiplied"] * 2
    assert x.tolist() == [3**6] * 4
