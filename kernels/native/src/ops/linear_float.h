// Float activations times weights that are widened to float32: dense ones, and codes in groups.
#pragma once

#include "ops/linear_call.h"
#include "ops/linear_lines.h"

namespace cardan_native {

// Up to how many rows at most are multiplied by codes, and by dense weights, that are widened in registers. With more,
// they are widened into the first-level cache, and kRowsOfCodes rows share codes at a time.
inline constexpr int kFewDense = 4;
inline constexpr int kFewGrouped = kLanes == 4 ? 2 : 6;
inline constexpr int kRowsOfCodes = kLanes == 16 ? 12 : kFewGrouped;

// Sums of the activations of each unit, what minimums are multiplied by; rows are `stride` apart.
struct UnitSums {
  const float* data;
  int64_t stride;
};

// In one order whatever the number of rows.
template <class T>
inline float unit_sum(const T* from, int64_t unit) {
  vf sum = load(from);
  for (int64_t at = kLanes; at < unit; at += kLanes) sum = sum + load(from + at);
  return sum_lanes(sum);
}

// Bytes of scratch, and the product, for up to kFewGrouped rows and for more.
int64_t few_grouped_bytes(const PackedLinear& weight, const Rows& x);
int64_t many_grouped_bytes(const PackedLinear& weight, const Rows& x);
void linear_few_grouped(const LinearCall& call, Pool& pool);
void linear_many_grouped(const LinearCall& call, Pool& pool);

// As these, for dense weights and more than a few rows.
int64_t many_dense_bytes(const Rows& x);
void linear_many_dense(const LinearCall& call, Pool& pool);

}  // namespace cardan_native
