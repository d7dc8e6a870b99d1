// Many rows of float activations times codes in groups, widened once for a block of rows. Sums go unit by unit as they
// do where rows are few, so that a row's result does not depend on how many others there are.

#include <algorithm>
#include <type_traits>

#include "ops/linear_expand.h"
#include "ops/linear_float.h"

namespace cardan_native {
namespace {

constexpr int64_t kChunk = 256;  // inner elements widened at a time: 16 KiB, half a first-level cache
constexpr int64_t kChunkUnits = kChunk / 16;

// One piece of a panel, widened: codes less the offset, [units][unit][16].
struct Piece {
  const float *codes, *scales, *minimums;
  int64_t units, unit;
};

// acc[kRows][16] += kRows rows times a piece.
template <bool kMinimums, int kRows>
[[gnu::noinline]] void multiply(const Piece& piece, const FloatRows& x, const UnitSums& sums, float* acc) {
  const float *codes = piece.codes, *values = x.data;
  for (int64_t unit = 0; unit < piece.units; ++unit) {
    vf products[kRows][kPanelVectors] = {};
#pragma GCC unroll 4
    for (int64_t at = 0; at < piece.unit; ++at, codes += kPanel, ++values) {
      vf code[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) code[v] = load(codes + v * kLanes);
      for (int row = 0; row < kRows; ++row) {
        const vf value = splat(values[row * x.stride]);
        for (int v = 0; v < kPanelVectors; ++v) products[row][v] = fused(code[v], value, products[row][v]);
      }
    }
    for (int v = 0; v < kPanelVectors; ++v) {
      const vf scale = load(piece.scales + unit * kPanel + v * kLanes);
      const vf minimum = kMinimums ? load(piece.minimums + unit * kPanel + v * kLanes) : scale;
      for (int row = 0; row < kRows; ++row) {
        float* to = acc + row * kPanel + v * kLanes;
        vf total = fused(products[row][v], scale, load(to));
        if constexpr (kMinimums) total = fused(minimum, splat(sums.data[row * sums.stride + unit]), total);
        store(to, total);
      }
    }
  }
}

template <bool kMinimums>
void multiply_rows(const Piece& piece, const FloatRows& x, const UnitSums& sums, int64_t rows, float* acc) {
  int64_t row = 0;
  const auto take = [&]<int kRows>(std::integral_constant<int, kRows>) {
    for (; row + kRows <= rows; row += kRows)
      multiply<kMinimums, kRows>(piece, {x.data + row * x.stride, x.stride},
                                 {sums.data + row * sums.stride, sums.stride}, acc + row * kPanel);
  };
  take(std::integral_constant<int, kRowsOfCodes>{});
  if constexpr (kRowsOfCodes > 4) take(std::integral_constant<int, 4>{});
  if constexpr (kRowsOfCodes > 2) take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

void multiply_block(const LinearCall& call, const FloatRows& x, const UnitSums& sums, int64_t panel, int64_t first,
                    int64_t last) {
  alignas(64) float acc[kRowBlock * kPanel], codes[kChunk * kPanel];
  alignas(64) float scales[kChunkUnits * kPanel], minimums[kChunkUnits * kPanel];
  const PackedLinear& weight = *call.weight;
  const int64_t rows = last - first, unit = weight.unit();
  std::fill(acc, acc + rows * kPanel, 0.0f);
  for (int64_t column = 0; column < weight.columns; column += kChunk) {
    const int64_t count = std::min(kChunk, weight.columns - column);
    expand_scales(weight, panel, column / unit, count / unit, scales, minimums);
    expand_float_codes(weight, panel, column / kGroup, count / kGroup, codes);
    const Piece piece{codes, scales, minimums, count / unit, unit};
    const FloatRows from{x.data + first * x.stride + column, x.stride};
    const UnitSums sums_from{sums.data + first * sums.stride + column / unit, sums.stride};
    if (weight.has_minimums)
      multiply_rows<true>(piece, from, sums_from, rows, acc);
    else
      multiply_rows<false>(piece, from, sums_from, rows, acc);
  }
  finish(call, panel, 1, first, rows, acc);
}

UnitSums sums_of(const LinearCall& call, const FloatRows& x, Pool& pool) {
  const int64_t unit = call.weight->unit(), units = call.weight->columns / unit;
  auto* data = reinterpret_cast<float*>(call.scratch + float_rows_bytes(call.x));
  if (call.weight->has_minimums)
    for_each_row(call.x.rows, call.x.width, pool, [&](int64_t row) {
      for (int64_t index = 0; index < units; ++index)
        data[row * units + index] = unit_sum(x.data + row * x.stride + index * unit, unit);
    });
  return {data, units};
}

}  // namespace

int64_t many_grouped_bytes(const PackedLinear& weight, const Rows& x) {
  return float_rows_bytes(x) + (weight.has_minimums ? 4 * x.rows * (x.width / weight.unit()) : 0);
}

void linear_many_grouped(const LinearCall& call, Pool& pool) {
  const FloatRows x = widen_rows_of(call, pool);
  const UnitSums sums = sums_of(call, x, pool);
  for_each_block(call, pool, [&](int64_t panel, int64_t first, int64_t last) {
    multiply_block(call, x, sums, panel, first, last);
  });
}

}  // namespace cardan_native
