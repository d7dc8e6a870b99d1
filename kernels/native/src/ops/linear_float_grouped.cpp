// Sums of float activations times codes of one unit are multiplied by the unit's scale: so each unit costs one product
// for each output row, whatever its size.
//
// A code is converted where it stands in its lane of 32 bits, so that it takes no shift: it comes out 2^8 or 2^16 times
// too large, and activations are made as much smaller beforehand. Both are exact, but where the smaller one falls below
// 2^-126.

#include <algorithm>
#include <type_traits>
#include <utility>

#include "ops/linear_expand.h"
#include "ops/linear_float.h"

namespace cardan_native {
namespace {

constexpr int64_t kChunk = 1024;  // inner elements whose scales are made ready at a time
constexpr int64_t kChunkUnits = kChunk / 16;
constexpr int kChains = 8;         // sums that do not wait for each other: two for each cycle, four cycles each
constexpr int64_t kAhead = 2048;  // bytes of codes, which no hardware asks for at the turn of a panel

// What the code of each byte of a lane comes out times.
constexpr float kPlace[4] = {1.0f, 256.0f, 65536.0f, 1.0f};

// Activations, smaller by their places, and the sums of each unit as they were: what minimums are multiplied by.
struct ScaledRows {
  const float *data, *sums;
  int64_t stride, sum_stride;
};

// One piece of a panel, its scales made ready.
struct Piece {
  const uint8_t* codes;
  int64_t groups;
  const float *scales, *minimums;
  float offset;
};

template <int kRows>
using Totals = vf[kRows][kPanelVectors];

// The codes of one byte of each lane, times kPlace.
template <int kByte>
inline vf widen_byte(vu words) {
  if constexpr (kByte == 3) return __builtin_convertvector((vi)(words >> 24), vf);
  return __builtin_convertvector((vi)(words & 255u << 8 * kByte), vf);
}

// products += the codes of one byte of each lane of some lines, each of another unit, times x.
template <int kByte, bool kMinimums, int kRows, int kLines>
inline void add_byte(const Line (&lines)[kLines], float offset, const float* x, int64_t unit, int64_t stride,
                     Totals<kRows>* products) {
  for (int i = 0; i < kLines; ++i) {
    vf weight[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) {
      weight[v] = widen_byte<kByte>((vu)lines[i].part[v]);
      if constexpr (!kMinimums) weight[v] = weight[v] - splat(offset * kPlace[kByte]);
    }
    for (int row = 0; row < kRows; ++row) {
      const vf value = splat(x[row * stride + i * unit + kByte]);
      for (int v = 0; v < kPanelVectors; ++v) products[i][row][v] = fused(weight[v], value, products[i][row][v]);
    }
  }
}

// totals += some groups times x. All their units are summed side by side.
template <Codes kCodes, int kUnits, bool kMinimums, int kRows, int kGroups>
inline void add_groups(const Piece& piece, int64_t group, const ScaledRows& x, Totals<kRows>& totals) {
  constexpr int kSteps = 8 / kUnits, kTogether = kGroups * kUnits, kUnit = 4 * kSteps;
  constexpr int kLines = std::min(kTogether, std::max(1, 4 / kPanelVectors));
  const uint8_t* codes = piece.codes + group * group_bytes(kCodes);
  const float* values = x.data + group * kGroup;
  Totals<kRows> products[kTogether] = {};
#pragma GCC unroll 8
  for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 8
    for (int first = 0; first < kTogether; first += kLines) {
      Line lines[kLines];
      for (int i = 0; i < kLines; ++i) {
        const int unit = first + i;
        lines[i] = load_line<kCodes>(codes + unit / kUnits * group_bytes(kCodes), unit % kUnits * kSteps + step);
      }
      const float* at = values + first * kUnit + 4 * step;
      add_byte<0, kMinimums, kRows>(lines, piece.offset, at, kUnit, x.stride, products + first);
      add_byte<1, kMinimums, kRows>(lines, piece.offset, at, kUnit, x.stride, products + first);
      add_byte<2, kMinimums, kRows>(lines, piece.offset, at, kUnit, x.stride, products + first);
      add_byte<3, kMinimums, kRows>(lines, piece.offset, at, kUnit, x.stride, products + first);
    }
#pragma GCC unroll 8
  for (int unit = 0; unit < kTogether; ++unit) {
    const int64_t index = group * kUnits + unit;
    for (int v = 0; v < kPanelVectors; ++v) {
      const vf scale = load(piece.scales + index * kPanel + v * kLanes);
      for (int row = 0; row < kRows; ++row) totals[row][v] = fused(products[unit][row][v], scale, totals[row][v]);
      if constexpr (kMinimums) {
        const vf minimum = load(piece.minimums + index * kPanel + v * kLanes);
        for (int row = 0; row < kRows; ++row)
          totals[row][v] = fused(minimum, splat(x.sums[row * x.sum_stride + index]), totals[row][v]);
      }
    }
  }
}

// acc[rows][16] += one piece of a panel times kRows rows. A function of its own, so that it has all registers.
template <Codes kCodes, int kUnits, bool kMinimums, int kRows>
[[gnu::noinline]] void multiply(const Piece& piece, const ScaledRows& x, float* acc) {
  constexpr int kGroups = std::max(1, kChains / (kUnits * kRows * kPanelVectors));
  Totals<kRows> totals;
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kPanelVectors; ++v) totals[row][v] = load(acc + row * kPanel + v * kLanes);
  int64_t group = 0;
  for (; group + kGroups <= piece.groups; group += kGroups) {
    for (int64_t at = 0; at < kGroups * group_bytes(kCodes); at += kLine)
      __builtin_prefetch(piece.codes + group * group_bytes(kCodes) + kAhead + at);
    add_groups<kCodes, kUnits, kMinimums, kRows, kGroups>(piece, group, x, totals);
  }
  if constexpr (kGroups > 1)
    for (; group < piece.groups; ++group) add_groups<kCodes, kUnits, kMinimums, kRows, 1>(piece, group, x, totals);
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kPanelVectors; ++v) store(acc + row * kPanel + v * kLanes, totals[row][v]);
}

using Multiply = void (*)(const Piece&, const ScaledRows&, float*);

template <Codes kCodes, int kUnits, bool kMinimums>
Multiply choose_rows(int64_t rows) {
  return [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    constexpr Multiply kKernels[] = {&multiply<kCodes, kUnits, kMinimums, kIndices + 1>...};
    return kKernels[rows - 1];
  }(std::make_integer_sequence<int, kFewGrouped>{});
}

Multiply choose(const PackedLinear& weight, int64_t rows) {
  const auto by_minimums = [&]<Codes kCodes, int kUnits>() {
    return weight.has_minimums ? choose_rows<kCodes, kUnits, true>(rows) : choose_rows<kCodes, kUnits, false>(rows);
  };
  switch (weight.codes) {
    case Codes::kNibble:
      return weight.unit() == kGroup ? by_minimums.template operator()<Codes::kNibble, 1>()
                                     : by_minimums.template operator()<Codes::kNibble, 2>();
    case Codes::kFive:
      return by_minimums.template operator()<Codes::kFive, 1>();
    case Codes::kSix:
      return choose_rows<Codes::kSix, 2, false>(rows);
    default:
      return by_minimums.template operator()<Codes::kByte, 1>();
  }
}

void multiply_panel(const LinearCall& call, const ScaledRows& x, int64_t panel, Multiply kernel) {
  alignas(64) float acc[kFewGrouped * kPanel] = {}, scales[kChunkUnits * kPanel], minimums[kChunkUnits * kPanel];
  const PackedLinear& weight = *call.weight;
  const int64_t unit = weight.unit();
  for (int64_t column = 0; column < weight.columns; column += kChunk) {
    const int64_t count = std::min(kChunk, weight.columns - column);
    expand_scales(weight, panel, column / unit, count / unit, scales, minimums);
    const uint8_t* codes = weight.panel_codes(panel) + column / kGroup * group_bytes(weight.codes);
    kernel({codes, count / kGroup, scales, minimums, static_cast<float>(weight.offset)},
           {x.data + column, x.sums + column / unit, x.stride, x.sum_stride}, acc);
  }
  finish(call, panel, 1, 0, call.x.rows, acc);
}

// Writes one row of activations, smaller by their places, and the sums of its units.
template <class T>
void scale_row(const T* from, int64_t width, int64_t unit, float* to, float* sums) {
  vf place;
  for (int lane = 0; lane < kLanes; ++lane) place[lane] = 1.0f / kPlace[lane % 4];
  for (int64_t first = 0; first < width; first += unit) {
    for (int64_t column = first; column < first + unit; column += kLanes)
      store(to + column, load(from + column) * place);
    *sums++ = unit_sum(from + first, unit);
  }
}

int64_t stride_of(int64_t width) { return width + 16; }  // not a power of two, which would all fall into one set

ScaledRows scaled_rows_of(const LinearCall& call, Pool& pool) {
  const Rows& x = call.x;
  const int64_t unit = call.weight->unit(), stride = stride_of(x.width), units = x.width / unit;
  auto* data = reinterpret_cast<float*>(call.scratch);
  float* sums = data + x.rows * stride;
  for_each_row(x.rows, x.width, pool, [&](int64_t row) {
    float *to = data + row * stride, *sums_to = sums + row * units;
    if (x.dtype == DType::kF32)
      scale_row(x.at<float>(row), x.width, unit, to, sums_to);
    else if (x.dtype == DType::kBF16)
      scale_row(x.at<bf16>(row), x.width, unit, to, sums_to);
    else
      scale_row(x.at<f16>(row), x.width, unit, to, sums_to);
  });
  return {data, sums, stride, units};
}

}  // namespace

int64_t few_grouped_bytes(const PackedLinear& weight, const Rows& x) {
  return 4 * x.rows * (stride_of(x.width) + x.width / weight.unit());
}

void linear_few_grouped(const LinearCall& call, Pool& pool) {
  const ScaledRows x = scaled_rows_of(call, pool);
  const Multiply kernel = choose(*call.weight, call.x.rows);
  const int64_t panels = call.weight->panels();
  pool.parallel(panels, pool.even_grain(panels, 8), [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) multiply_panel(call, x, panel, kernel);
  });
}

}  // namespace cardan_native
