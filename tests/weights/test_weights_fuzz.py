"""Damaged files: an error of ours or a correct read, never another exception, a crash or a large allocation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cardan.config import ModelConfig
from cardan.errors import ModelError
from cardan.weights import open_checkpoint

MUTATIONS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 2), st.binary(min_size=1, max_size=8)),
    min_size=1,
    max_size=4,
)
LARGEST_ALLOCATION = 8 << 20
FUZZ = settings(
    max_examples=200,
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


def mutate(raw: bytes, mutations: list[tuple[float, int, bytes]], head: int) -> bytes:
    """Overwrite, insert or remove a few bytes, mostly in the first ``head``."""
    for place, action, piece in mutations:
        at = int(place * min(len(raw), head))
        end = at + len(piece) if action != 1 else at
        raw = raw[:at] + (piece if action != 2 else b"") + raw[end:]
    return raw


def open_and_read(path: Path) -> None:
    """Open a file and read everything it announces; only the errors of the contract may come out."""
    message = ""
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(ModelConfig(model=str(path)))
        for name, (fmt, shape) in checkpoint.tensor_info().items():
            view = checkpoint.tensor(name)
            assert (view.dtype, view.shape) == (fmt, shape)
            assert checkpoint.dequantize(view).shape == shape
        checkpoint.close()
    except ModelError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < LARGEST_ALLOCATION
    assert len(message) < 3000


@pytest.fixture(params=["llama", "gemma3"])
def whole_gguf(request: pytest.FixtureRequest, tiny_gguf: Callable[..., Path]) -> tuple[Path, bytes]:
    path = tiny_gguf(request.param)
    return path, path.read_bytes()


@given(mutations=MUTATIONS, cut=st.one_of(st.none(), st.floats(0, 1)))
@FUZZ
def test_mutated_gguf(
    whole_gguf: tuple[Path, bytes], mutations: list[tuple[float, int, bytes]], cut: float | None
) -> None:
    path, whole = whole_gguf
    raw = mutate(whole, mutations, 4000)
    path.write_bytes(raw if cut is None else raw[: int(cut * len(raw))])
    open_and_read(path)


@given(mutations=MUTATIONS, cut=st.one_of(st.none(), st.floats(0, 1)))
@FUZZ
def test_mutated_safetensors(tiny_folder: Path, mutations: list[tuple[float, int, bytes]], cut: float | None) -> None:
    path = tiny_folder / "model.safetensors"
    original = path.read_bytes()
    raw = mutate(original, mutations, len(original))
    try:
        path.write_bytes(raw if cut is None else raw[: int(cut * len(raw))])
        open_and_read(tiny_folder)
    finally:
        path.write_bytes(original)


HEADER_NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])


@given(at=st.integers(4, 3900), value=HEADER_NUMBERS, width=st.sampled_from([4, 8]))
@FUZZ
def test_gguf_with_another_number_somewhere(whole_gguf: tuple[Path, bytes], at: int, value: int, width: int) -> None:
    path, whole = whole_gguf
    raw = bytearray(whole)
    raw[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    path.write_bytes(raw)
    open_and_read(path)


@given(name=st.sampled_from(["config.json", "generation_config.json"]), content=st.binary(max_size=60))
@FUZZ
def test_any_bytes_as_json(tiny_folder: Path, name: str, content: bytes) -> None:
    path = tiny_folder / name
    original = path.read_bytes()
    try:
        path.write_bytes(content)
        open_and_read(tiny_folder)
    finally:
        path.write_bytes(original)
