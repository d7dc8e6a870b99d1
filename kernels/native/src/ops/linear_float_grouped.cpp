#include <algorithm>
#include <type_traits>

#include "ops/linear_expand.h"
#include "ops/linear_float.h"

namespace cardan_native {
namespace {

constexpr int64_t kChunk = 1024;  // inner elements whose scales are made ready at a time
constexpr int64_t kChunkUnits = kChunk / 16;

// Sums of the activations of each unit: what minimums are multiplied by.
struct UnitSums {
  float* data;
  int64_t stride;
};

struct Piece {
  const uint8_t* codes;
  int64_t groups;
  const float *scales, *minimums;
  int offset;
};

// totals += codes of one unit times x, times the unit's scales. Four sums, one for each byte of a lane, keep the
// additions from waiting for each other.
template <Codes kCodes, int kUnits, bool kMinimums, int kRows>
inline void add_unit(const Piece& piece, const uint8_t* group, int part, int64_t unit, const FloatRows& x,
                     const UnitSums& sums, vf (&totals)[kRows][kPanelVectors]) {
  constexpr int kSteps = 8 / kUnits;
  const vi offset = splat_int(piece.offset);
  for (int v = 0; v < kPanelVectors; ++v) {
    vf products[kRows][4] = {};
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 4
      for (int byte = 0; byte < 4; ++byte) {
        vi code = code_of<kCodes>(group, part * kSteps + step, byte, v);
        if constexpr (!kMinimums) code = code - offset;
        const vf value = __builtin_convertvector(code, vf);
        for (int row = 0; row < kRows; ++row)
          products[row][byte] =
              fused(value, splat(x.data[row * x.stride + (part * kSteps + step) * 4 + byte]), products[row][byte]);
      }
    const vf scale = load(piece.scales + unit * kPanel + v * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const vf product = (products[row][0] + products[row][1]) + (products[row][2] + products[row][3]);
      totals[row][v] = fused(product, scale, totals[row][v]);
      if constexpr (kMinimums) {
        const vf sum = splat(sums.data[row * sums.stride + unit]);
        totals[row][v] = fused(load(piece.minimums + unit * kPanel + v * kLanes), sum, totals[row][v]);
      }
    }
  }
}

template <Codes kCodes, int kUnits, bool kMinimums, int kRows>
void multiply(const Piece& piece, FloatRows x, const UnitSums& sums, float* acc) {
  vf totals[kRows][kPanelVectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kPanelVectors; ++v) totals[row][v] = load(acc + row * kPanel + v * kLanes);
  const uint8_t* codes = piece.codes;
  for (int64_t group = 0; group < piece.groups; ++group, codes += group_bytes(kCodes), x.data += kGroup)
#pragma GCC unroll 2
    for (int part = 0; part < kUnits; ++part)
      add_unit<kCodes, kUnits, kMinimums, kRows>(piece, codes, part, group * kUnits + part, x, sums, totals);
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kPanelVectors; ++v) store(acc + row * kPanel + v * kLanes, totals[row][v]);
}

using Multiply = void (*)(const Piece&, FloatRows, const UnitSums&, float*);

template <int kRows>
Multiply choose(const PackedLinear& weight) {
  switch (weight.codes) {
    case Codes::kNibble:
      if (weight.unit() == 32)
        return weight.has_minimums ? &multiply<Codes::kNibble, 1, true, kRows>
                                   : &multiply<Codes::kNibble, 1, false, kRows>;
      return weight.has_minimums ? &multiply<Codes::kNibble, 2, true, kRows>
                                 : &multiply<Codes::kNibble, 2, false, kRows>;
    case Codes::kFive:
      return weight.has_minimums ? &multiply<Codes::kFive, 1, true, kRows> : &multiply<Codes::kFive, 1, false, kRows>;
    case Codes::kSix:
      return &multiply<Codes::kSix, 2, false, kRows>;
    default:
      return weight.has_minimums ? &multiply<Codes::kByte, 1, true, kRows> : &multiply<Codes::kByte, 1, false, kRows>;
  }
}

void multiply_panel(const LinearCall& call, const FloatRows& x, const UnitSums& sums, int64_t panel, Multiply kernel) {
  alignas(64) float acc[2 * kPanel] = {}, scales[kChunkUnits * kPanel], minimums[kChunkUnits * kPanel];
  const PackedLinear& weight = *call.weight;
  const int64_t unit = weight.unit();
  for (int64_t column = 0; column < weight.columns; column += kChunk) {
    const int64_t count = std::min(kChunk, weight.columns - column);
    expand_scales(weight, panel, column / unit, count / unit, scales, minimums);
    const uint8_t* codes = weight.panel_codes(panel) + column / kGroup * group_bytes(weight.codes);
    kernel({codes, count / kGroup, scales, minimums, weight.offset}, {x.data + column, x.stride},
           {sums.data + column / unit, sums.stride}, acc);
  }
  finish(call, panel, 0, call.x.rows, acc);
}

UnitSums sums_of(const LinearCall& call, const FloatRows& x) {
  const int64_t unit = call.weight->unit(), units = call.weight->columns / unit;
  auto* data = reinterpret_cast<float*>(call.scratch + float_rows_bytes(call.x));
  if (!call.weight->has_minimums) return {data, units};
  for (int64_t row = 0; row < call.x.rows; ++row)
    for (int64_t index = 0; index < units; ++index) {
      const float* values = x.data + row * x.stride + index * unit;
      vf sum = load(values);
      for (int64_t at = kLanes; at < unit; at += kLanes) sum = sum + load(values + at);
      data[row * units + index] = sum_lanes(sum);
    }
  return {data, units};
}

}  // namespace

void linear_float_grouped(const LinearCall& call, const FloatRows& x, Pool& pool) {
  const UnitSums sums = sums_of(call, x);
  const Multiply kernel = call.x.rows == 1 ? choose<1>(*call.weight) : choose<2>(*call.weight);
  const int64_t panels = call.weight->panels();
  pool.parallel(panels, pool.even_grain(panels, 8), [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) multiply_panel(call, x, sums, panel, kernel);
  });
}

}  // namespace cardan_native
