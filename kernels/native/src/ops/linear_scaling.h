// What a unit's sum of integers stands for.
#pragma once

#include "ops/linear_call.h"
#include "ops/linear_lines.h"

namespace cardan_native {

inline Int8Rows from_column(const Int8Rows& x, int64_t column, int64_t unit) {
  Int8Rows out = x;
  out.codes += column;
  out.scales += column / kGroup;
  out.sums = static_cast<const char*>(x.sums) + column / unit * 4;
  return out;
}

// What a unit's minimum is multiplied by.
template <bool kMinimums>
inline float unit_sum(const Int8Rows& x, int row, int64_t unit) {
  if constexpr (!kMinimums) return 0.0f;
  return static_cast<const float*>(x.sums)[row * x.sum_stride + unit];
}

// totals[16] += sums times the scales of the weight and the step of the activations, plus minimums times `unit_sum`.
// Always in this order, so that all kernels give the same.
template <bool kMinimums>
inline void add_unit(const vi (&sums)[kPanelVectors], const float* scales, const float* minimums, float step,
                     float unit_sum, float* totals) {
  for (int v = 0; v < kPanelVectors; ++v) {
    const vf scale = load(scales + v * kLanes) * splat(step);
    vf total = fused(__builtin_convertvector(sums[v], vf), scale, load(totals + v * kLanes));
    if constexpr (kMinimums) total = fused(load(minimums + v * kLanes), splat(unit_sum), total);
    store(totals + v * kLanes, total);
  }
}

}  // namespace cardan_native
