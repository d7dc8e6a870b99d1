"""Paged decode attention as a Metal kernel: one query a row, keys and values read in place from the pool and the tail.

It knows no model. It runs where Metal is; elsewhere the gather path does the same sums.

A threadgroup serves one query head of one row. Its SIMD groups take keys in turn; the lanes of a SIMD group share the
features of a head. Each SIMD group keeps a running softmax (greatest score, sum, weighted values), and the first one
merges them.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from cardan.types import LayerKV
from cardan_mlx.attention_plan import DecodePart
from cardan_mlx.kv_pool import MlxKVPool

LANES = 32
SIMD_GROUPS = 8

SOURCE = """
    constexpr int KEY_PER_LANE = K_DIM / 32;
    constexpr int VALUE_PER_LANE = V_DIM / 32;
    uint lane = thread_index_in_simdgroup;
    uint part = simdgroup_index_in_threadgroup;
    uint head = threadgroup_position_in_grid.y;
    uint row = threadgroup_position_in_grid.z;
    uint kv_head = head / (Q_HEADS / KV_HEADS);

    float query[KEY_PER_LANE];
    for (int i = 0; i < KEY_PER_LANE; ++i) {
        query[i] = float(q[(row * Q_HEADS + head) * K_DIM + lane * KEY_PER_LANE + i]) * scale_and_cap[0];
    }
    float cap = scale_and_cap[1];
    float greatest = -INFINITY;
    float total = 0.0f;
    float sums[VALUE_PER_LANE] = {0.0f};

    int pooled = pool_counts[row];
    int keys = pooled + tail_counts[row];
    int width = slots_shape[1];
    int tail_width = places_shape[1];
    for (int at = part; at < keys; at += SIMD_GROUPS) {
        bool in_pool = at < pooled;
        size_t token = in_pool ? slots[row * width + at] : places[row * tail_width + at - pooled];
        const device KV* key_row = (in_pool ? pool_keys : tail_keys) + (token * KV_HEADS + kv_head) * K_DIM;
        const device KV* value_row = (in_pool ? pool_values : tail_values) + (token * KV_HEADS + kv_head) * V_DIM;
        float score = 0.0f;
        for (int i = 0; i < KEY_PER_LANE; ++i) {
            score += query[i] * float(key_row[lane * KEY_PER_LANE + i]);
        }
        score = simd_sum(score);
        if (cap > 0.0f) {
            score = cap * precise::tanh(score / cap);
        }
        float higher = max(greatest, score);
        float shrink = fast::exp(greatest - higher);
        float weight = fast::exp(score - higher);
        total = total * shrink + weight;
        for (int i = 0; i < VALUE_PER_LANE; ++i) {
            sums[i] = sums[i] * shrink + weight * float(value_row[lane * VALUE_PER_LANE + i]);
        }
        greatest = higher;
    }

    threadgroup float all_greatest[SIMD_GROUPS];
    threadgroup float all_totals[SIMD_GROUPS];
    threadgroup float all_sums[SIMD_GROUPS * V_DIM];
    if (lane == 0) {
        all_greatest[part] = greatest;
        all_totals[part] = total;
    }
    for (int i = 0; i < VALUE_PER_LANE; ++i) {
        all_sums[part * V_DIM + lane * VALUE_PER_LANE + i] = sums[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (part == 0) {
        float top = -INFINITY;
        for (int g = 0; g < SIMD_GROUPS; ++g) {
            top = max(top, all_greatest[g]);
        }
        float sum = 0.0f;
        for (int g = 0; g < SIMD_GROUPS; ++g) {
            sum += all_totals[g] > 0.0f ? all_totals[g] * fast::exp(all_greatest[g] - top) : 0.0f;
        }
        for (int i = 0; i < VALUE_PER_LANE; ++i) {
            float value = 0.0f;
            for (int g = 0; g < SIMD_GROUPS; ++g) {
                if (all_totals[g] > 0.0f) {
                    value += all_sums[g * V_DIM + lane * VALUE_PER_LANE + i] * fast::exp(all_greatest[g] - top);
                }
            }
            out[(row * Q_HEADS + head) * V_DIM + lane * VALUE_PER_LANE + i] = T(value / sum);
        }
    }
"""


class MetalDecode:
    """The kernel, compiled by MLX for each layer shape when it is first met."""

    def __init__(self) -> None:
        self._kernel: Any = mx.fast.metal_kernel(
            name="cardan_paged_decode",
            input_names=[
                "q",
                "pool_keys",
                "pool_values",
                "tail_keys",
                "tail_values",
                "slots",
                "places",
                "pool_counts",
                "tail_counts",
                "scale_and_cap",
            ],
            output_names=["out"],
            source=SOURCE,
        )

    def takes(self, layer: LayerKV, sinks: mx.array | None) -> bool:
        """Heads whose width divides by the lanes of a SIMD group, without sinks."""
        return layer.k_dim % LANES == 0 and layer.v_dim % LANES == 0 and sinks is None

    def __call__(self, q: mx.array, pool: MlxKVPool, layer: LayerKV, part: DecodePart) -> mx.array:
        """Attend with ``q: [rows, q_heads, k_dim]``; returns ``[rows, q_heads * v_dim]``."""
        index, rows = layer.index, q.shape[0]
        out: mx.array = self._kernel(
            inputs=[
                q,
                pool.keys[index],
                pool.values[index],
                pool.tail_keys[index],
                pool.tail_values[index],
                part.slots,
                part.places,
                part.pool_counts,
                part.tail_counts,
                mx.array([layer.scale, layer.softcap or 0.0], dtype=mx.float32),
            ],
            template=[
                ("T", q.dtype),
                ("KV", pool.keys[index].dtype),
                ("Q_HEADS", layer.q_heads),
                ("KV_HEADS", layer.kv_heads),
                ("K_DIM", layer.k_dim),
                ("V_DIM", layer.v_dim),
                ("SIMD_GROUPS", SIMD_GROUPS),
            ],
            grid=(LANES * SIMD_GROUPS, layer.q_heads, rows),
            threadgroup=(LANES * SIMD_GROUPS, 1, 1),
            output_shapes=[(rows, layer.q_heads * layer.v_dim)],
            output_dtypes=[q.dtype],
        )[0]
        return out
