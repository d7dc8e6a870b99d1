"""The Metal kernel's source, run lane by lane on host threads: its indexing and sums, not its speed or its compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from dense_attention import dense_attention

from cardan.types import LayerKV
from cardan_mlx.metal_decode import SIMD_GROUPS, SOURCE, MetalDecode

POINTERS = ("q", "pool_keys", "pool_values", "tail_keys", "tail_values", "scale_and_cap")
INDICES = ("slots", "places", "pool_counts", "tail_counts")


def emulate(folder, layer, arrays, out):
    """Compile the kernel's body for a layer's shape and run it over every row and head."""
    constants = {
        "Q_HEADS": layer.q_heads,
        "KV_HEADS": layer.kv_heads,
        "K_DIM": layer.k_dim,
        "V_DIM": layer.v_dim,
        "SIMD_GROUPS": SIMD_GROUPS,
    }
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines += ["typedef float T;", "typedef float KV;", "struct Inputs {"]
    lines += [f"    const float* {name};" for name in POINTERS] + [f"    const int* {name};" for name in INDICES]
    lines += ["    int slots_shape[2];", "    int places_shape[2];", "};"]
    lines += [
        "void body(Inputs& in, float* out, uint thread_index_in_simdgroup, uint simdgroup_index_in_threadgroup,",
        "          uint3 threadgroup_position_in_grid) {",
    ]
    lines += [f"    auto {name} = in.{name};" for name in (*POINTERS, *INDICES, "slots_shape", "places_shape")]
    (folder / "body.inc").write_text("\n".join([*lines, SOURCE, "}"]))
    shutil.copy(Path(__file__).with_name("metal_emulation.cpp"), folder)
    library = folder / "kernel.so"
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "metal_emulation.cpp", "-o", library]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)

    class Inputs(ctypes.Structure):
        _fields_ = (
            [(name, ctypes.c_void_p) for name in (*POINTERS, *INDICES)]
            + [(name, ctypes.c_int * 2) for name in ("slots_shape", "places_shape")]
        )  # fmt: skip

    given = Inputs(
        *(arrays[name].ctypes.data for name in (*POINTERS, *INDICES)),
        *((ctypes.c_int * 2)(*arrays[name].shape) for name in ("slots", "places")),
    )
    run = ctypes.CDLL(str(library)).run
    run(ctypes.byref(given), out.ctypes.data_as(ctypes.c_void_p), layer.q_heads, len(out), SIMD_GROUPS)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the kernel's body is compiled with g++")
@pytest.mark.parametrize(
    "changes", [{"q_heads": 4, "kv_heads": 2, "k_dim": 64, "v_dim": 32}, {"softcap": 3.0, "kv_heads": 1}], ids=str
)
def test_the_kernel_attends_over_pool_and_tail(tmp_path, changes):
    sizes = {"index": 0, "q_heads": 2, "kv_heads": 2, "k_dim": 32, "v_dim": 32, "scale": 0.2}
    layer = LayerKV(**{**sizes, **changes})
    rng = np.random.default_rng(0)
    pooled, tailed = np.array([19, 0, 3], np.int32), np.array([2, 1, 5], np.int32)
    rows, width, tail_width, slots, tail = 3, 21, 6, 60, 20

    def values(*shape):
        return np.ascontiguousarray(rng.normal(size=shape), dtype=np.float32)

    arrays = {
        "q": values(rows, layer.q_heads, layer.k_dim),
        "pool_keys": values(slots, layer.kv_heads, layer.k_dim),
        "pool_values": values(slots, layer.kv_heads, layer.v_dim),
        "tail_keys": values(tail, layer.kv_heads, layer.k_dim),
        "tail_values": values(tail, layer.kv_heads, layer.v_dim),
        "scale_and_cap": np.array([layer.scale, layer.softcap or 0.0], np.float32),
        "slots": rng.integers(0, slots, (rows, width)).astype(np.int32),
        "places": rng.integers(0, tail, (rows, tail_width)).astype(np.int32),
        "pool_counts": pooled,
        "tail_counts": tailed,
    }
    out = np.full((rows, layer.q_heads * layer.v_dim), np.nan, np.float32)
    emulate(tmp_path, layer, arrays, out)
    for row in range(rows):
        at, there = arrays["slots"][row, : pooled[row]], arrays["places"][row, : tailed[row]]
        keys = np.concatenate((arrays["pool_keys"][at], arrays["tail_keys"][there]))
        held = np.concatenate((arrays["pool_values"][at], arrays["tail_values"][there]))
        want = dense_attention(arrays["q"][row : row + 1], keys, held, layer)
        np.testing.assert_allclose(out[row : row + 1], want, rtol=2e-5, atol=2e-5)


def test_heads_that_lanes_cannot_share_go_the_gather_path():
    kernel = MetalDecode.__new__(MetalDecode)
    sizes = {"index": 0, "q_heads": 2, "kv_heads": 2, "v_dim": 64, "scale": 1.0}
    assert kernel.takes(LayerKV(**sizes, k_dim=64), None)
    assert not kernel.takes(LayerKV(**sizes, k_dim=80), None)
    assert not kernel.takes(LayerKV(**sizes, k_dim=64), np.zeros(2))
