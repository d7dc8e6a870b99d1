// Many rows of quantized activations times codes widened to int16, in pairs: where the processor multiplies pairs of
// int16 but has no dot products of four bytes, that takes activations of int16 in one go, and codes of 8 bits too.
// Sums of a unit are the same integers as those of `linear_int8`, and so are results.

#include <algorithm>
#include <type_traits>

#include "ops/linear_call.h"
#include "ops/linear_expand.h"
#include "ops/linear_lines.h"
#include "ops/linear_scaling.h"

namespace cardan_native {

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace {

constexpr int64_t kFewRows = 4;  // up to so many, taking codes apart in registers is faster
constexpr int kMostRows = 6;     // that share codes in registers
constexpr int64_t kChunk = 512;  // inner elements widened at a time: 16 KiB, half a first-level cache
constexpr int64_t kChunkUnits = kChunk / 16;

// Quantized rows, each four codes in the order 0, 2, 1, 3, as widening leaves those of the weight.
struct Int16Rows {
  const int16_t* codes;
  int64_t stride;
};

// One piece of a panel, widened: codes less the offset, [units][unit / 2][16][2].
struct Piece {
  const int16_t* codes;
  const float *scales, *minimums;
  int64_t units, unit;
};

int64_t stride_of(int64_t columns) { return columns + 32; }  // not a power of two, which would all fall into one set

Int16Rows join_planes(const LinearCall& call, const Int8Rows& x, Pool& pool) {
  const PackedLinear& weight = *call.weight;
  const int64_t columns = weight.columns, stride = stride_of(columns);
  const bool two_planes = weight.activations == Activations::kInt16;
  auto* data = reinterpret_cast<int16_t*>(call.scratch + int8_rows_bytes(weight, call.x.rows));
  for_each_row(call.x.rows, columns, pool, [&](int64_t row) {
    const int8_t* low = x.codes + row * x.code_stride;
    const int8_t* high = low + x.plane_stride;
    int16_t* to = data + row * stride;
    for (int64_t column = 0; column < columns; column += 4)
      for (int i = 0; i < 4; ++i) {
        const int64_t from = column + (i >> 1) + (i & 1) * 2;
        to[column + i] = static_cast<int16_t>(low[from] + (two_planes ? 256 * high[from] : 0));
      }
  });
  return {data, stride};
}

template <Codes kCodes>
void widen_groups(const uint8_t* group, int64_t count, int offset, int16_t* out) {
  const vw offsets = vw{} + static_cast<uint16_t>(offset);
  for (int64_t i = 0; i < count; ++i, group += group_bytes(kCodes))
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step, out += 4 * kPanel) {
      const Line line = load_line<kCodes>(group, step);
      for (int v = 0; v < kPanelVectors; ++v) {
        const vw even = (line.part[v] & 255) - offsets, odd = (line.part[v] >> 8) - offsets;
        std::memcpy(out + v * kLanes * 2, &even, sizeof even);
        std::memcpy(out + 2 * kPanel + v * kLanes * 2, &odd, sizeof odd);
      }
    }
}

void expand_pairs(const PackedLinear& weight, int64_t panel, int64_t first, int64_t count, int16_t* out) {
  const uint8_t* groups = weight.panel_codes(panel) + first * group_bytes(weight.codes);
  switch (weight.codes) {
    case Codes::kNibble:
      return widen_groups<Codes::kNibble>(groups, count, weight.offset, out);
    case Codes::kFive:
      return widen_groups<Codes::kFive>(groups, count, weight.offset, out);
    case Codes::kSix:
      return widen_groups<Codes::kSix>(groups, count, weight.offset, out);
    default:
      return widen_groups<Codes::kByte>(groups, count, weight.offset, out);
  }
}

// acc[kRows][16] += kRows rows times a piece.
template <bool kMinimums, int kRows>
[[gnu::noinline]] void multiply(const Piece& piece, const Int16Rows& x, const Int8Rows& scaling, float* acc) {
  const int16_t *codes = piece.codes, *values = x.codes;
  for (int64_t unit = 0; unit < piece.units; ++unit) {
    vi sums[kRows][kPanelVectors] = {};
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < piece.unit; pair += 2, codes += 2 * kPanel, values += 2) {
      vw code[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) code[v] = load_words(codes + v * kLanes * 2);
      for (int row = 0; row < kRows; ++row) {
        const vw value = broadcast_four(reinterpret_cast<const int8_t*>(values + row * x.stride));
        for (int v = 0; v < kPanelVectors; ++v) sums[row][v] += dot_pairs(code[v], value);
      }
    }
    const int64_t group = unit * piece.unit / kGroup;
    for (int row = 0; row < kRows; ++row)
      add_unit<kMinimums>(sums[row], piece.scales + unit * kPanel, piece.minimums + unit * kPanel,
                          scaling.scales[row * scaling.scale_stride + group],
                          unit_sum<kMinimums>(scaling, row, unit), acc + row * kPanel);
  }
}

template <bool kMinimums>
void multiply_rows(const Piece& piece, const Int16Rows& x, const Int8Rows& scaling, int64_t rows, float* acc) {
  int64_t row = 0;
  const auto take = [&]<int kRows>(std::integral_constant<int, kRows>) {
    for (; row + kRows <= rows; row += kRows)
      multiply<kMinimums, kRows>(piece, {x.codes + row * x.stride, x.stride}, rows_from(scaling, row),
                                 acc + row * kPanel);
  };
  take(std::integral_constant<int, kMostRows>{});
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

void multiply_block(const LinearCall& call, const Int16Rows& x, const Int8Rows& scaling, int64_t panel, int64_t first,
                    int64_t last) {
  alignas(64) float acc[kRowBlock * kPanel], scales[kChunkUnits * kPanel], minimums[kChunkUnits * kPanel];
  alignas(64) int16_t codes[kChunk * kPanel];
  const PackedLinear& weight = *call.weight;
  const int64_t rows = last - first, unit = weight.unit();
  std::fill(acc, acc + rows * kPanel, 0.0f);
  for (int64_t column = 0; column < weight.columns; column += kChunk) {
    const int64_t count = std::min(kChunk, weight.columns - column);
    expand_scales(weight, panel, column / unit, count / unit, scales, minimums);
    expand_pairs(weight, panel, column / kGroup, count / kGroup, codes);
    const Piece piece{codes, scales, minimums, count / unit, unit};
    const Int16Rows from{x.codes + first * x.stride + column, x.stride};
    const Int8Rows with = from_column(rows_from(scaling, first), column, unit);
    if (weight.has_minimums)
      multiply_rows<true>(piece, from, with, rows, acc);
    else
      multiply_rows<false>(piece, from, with, rows, acc);
  }
  finish(call, panel, first, rows, acc);
}

}  // namespace

bool takes_int16_pairs(const PackedLinear& weight, int64_t rows) {
  return rows > kFewRows && (weight.activations == Activations::kInt16 || weight.codes == Codes::kByte);
}

int64_t int16_rows_bytes(const PackedLinear& weight, int64_t rows) {
  return int8_rows_bytes(weight, rows) + 2 * rows * stride_of(weight.columns);
}

void linear_int16_pairs(const LinearCall& call, Pool& pool) {
  const Int8Rows scaling = quantize_rows_of(call, pool);
  const Int16Rows x = join_planes(call, scaling, pool);
  for_each_block(call, pool, [&](int64_t panel, int64_t first, int64_t last) {
    multiply_block(call, x, scaling, panel, first, last);
  });
}

#else

bool takes_int16_pairs(const PackedLinear&, int64_t) { return false; }

int64_t int16_rows_bytes(const PackedLinear&, int64_t) { return 0; }

void linear_int16_pairs(const LinearCall&, Pool&) {}

#endif

}  // namespace cardan_native
