// Products with activations quantized to int8, or to int16 as two planes of int8: integers within a unit (32 inner
// elements, or 16 where scales are that close), float32 between units, in the same order whatever the number of rows.

#include <algorithm>
#include <type_traits>

#include "ops/linear_call.h"
#include "ops/linear_choice.h"
#include "ops/linear_expand.h"
#include "ops/linear_lines.h"
#include "ops/linear_scaling.h"
#include "ops/linear_tiles.h"

namespace cardan_native {
namespace {

constexpr int kMostRows = kDotFour ? 8 : 4;  // that share a line of codes in registers; two planes count twice
constexpr int64_t kChunk = 1024;             // inner elements whose codes and scales are made ready at a time
constexpr int64_t kChunkUnits = kChunk / 16;

// Codes of a panel end where those of the next begin, but scales lie apart: hardware alone waits at each turn.
constexpr int64_t kAhead = 2048;  // bytes

inline void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at);
}

// One piece of a panel, its scales made ready.
struct Piece {
  const uint8_t* codes;
  int64_t groups;
  const float *scales, *minimums;
};

template <int kRows>
using Sums = vi[kRows][kPanelVectors];

// What a kernel is compiled for.
struct Kernel {
  Codes codes;
  bool expanded;  // codes are bytes already
  int units;      // of a group
  bool minimums;
  int planes;  // of activations
};

// Adds the products of some lines, four inner elements each, for each row. The planes of activations count as rows: all
// of the first plane, then all of the second.
template <Kernel kKernel, int kLines, int kRows>
inline void add_lines(const uint8_t* group, int first, const int8_t* x, const Int8Rows& from, Sums<kRows>& sums) {
  constexpr int kEach = kRows / kKernel.planes;
  const auto values_of = [&](int row, int step) {
    return broadcast_four(x + row % kEach * from.code_stride + row / kEach * from.plane_stride + 4 * step);
  };
  constexpr Codes kCodes = kKernel.codes, kStored = kKernel.expanded ? Codes::kByte : kCodes;
#if defined(__AVX512VNNI__)
  // Two chains where rows are few: one would wait for itself.
  Sums<kRows> others = {};
#pragma GCC unroll 8
  for (int step = first; step < first + kLines; ++step) {
    const Line line = load_line<kStored>(group, step);
    for (int row = 0; row < kRows; ++row) {
      const vw values = values_of(row, step);
      for (int v = 0; v < kPanelVectors; ++v) {
        vi& sum = kRows <= 2 && step % 2 ? others[row][v] : sums[row][v];
        sum = dot_four(sum, line.part[v], values);
      }
    }
  }
  if constexpr (kRows <= 2)
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kPanelVectors; ++v) sums[row][v] += others[row][v];
#else
  // Sums of two products of 4-bit codes are at most 3,840: eight of them fit 16 bits, and four of 5-bit codes, two of
  // 6-bit ones. Codes of 8 bits are taken as two of 4.
  constexpr bool kSplit = kCodes == Codes::kByte;
  constexpr int kLinesThatFit = std::min(kLines, kCodes == Codes::kSix ? 2 : kCodes == Codes::kFive ? 4 : 8);
  vw low[kRows][kPanelVectors] = {}, high[kRows][kPanelVectors] = {};
#pragma GCC unroll 8
  for (int step = first; step < first + kLines; ++step) {
    const Line line = load_line<kStored>(group, step);
    for (int row = 0; row < kRows; ++row) {
      const vw values = values_of(row, step);
      for (int v = 0; v < kPanelVectors; ++v) {
        low[row][v] += dot_two(kSplit ? line.part[v] & 0x0f0f : line.part[v], values);
        pin(low[row][v]);
        if constexpr (kSplit) {
          high[row][v] += dot_two(line.part[v] >> 4 & 0x0f0f, values);
          pin(high[row][v]);
        }
      }
    }
    if ((step + 1) % kLinesThatFit == 0)
      for (int row = 0; row < kRows; ++row)
        for (int v = 0; v < kPanelVectors; ++v) {
          sums[row][v] = fold(sums[row][v], low[row][v], 1);
          if constexpr (kSplit) sums[row][v] = fold(sums[row][v], high[row][v], 16);
          low[row][v] = high[row][v] = vw{};
        }
  }
#endif
}

// totals += what the sums of one unit stand for.
template <bool kMinimums, int kRows>
inline void add_unit(const Piece& piece, int64_t unit, int64_t group, const Int8Rows& x, const Sums<kRows>& sums,
                     vf (&totals)[kRows][kPanelVectors]) {
  for (int row = 0; row < kRows; ++row) {
    const vf step = splat(x.scales[row * x.scale_stride + group]);
    for (int v = 0; v < kPanelVectors; ++v) {
      const vf scale = load(piece.scales + unit * kPanel + v * kLanes) * step;
      totals[row][v] = fused(__builtin_convertvector(sums[row][v], vf), scale, totals[row][v]);
      if constexpr (kMinimums) {
        const float sum = static_cast<const float*>(x.sums)[row * x.sum_stride + unit];
        totals[row][v] = fused(load(piece.minimums + unit * kPanel + v * kLanes), splat(sum), totals[row][v]);
      }
    }
  }
}

// What the sums of one unit begin with.
template <bool kMinimums>
inline int32_t start_of(const Int8Rows& x, int row, int64_t unit) {
  if constexpr (kMinimums) return 0;
  return static_cast<const int32_t*>(x.sums)[row * x.sum_stride + unit];
}

// acc[rows][16] += one piece of a panel times kRows rows. A function of its own, so that it has all registers.
template <Kernel kKernel, int kRows>
[[gnu::noinline]] void multiply(const Piece& piece, const Int8Rows& x, float* acc) {
  vf totals[kRows][kPanelVectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kPanelVectors; ++v) totals[row][v] = load(acc + row * kPanel + v * kLanes);
  const uint8_t* codes = piece.codes;
  const int8_t* values = x.codes;
  constexpr int kLines = 8 / kKernel.units;
  for (int64_t group = 0; group < piece.groups; ++group, values += kGroup) {
    if constexpr (!kKernel.expanded) prefetch(codes + kAhead, group_bytes(kKernel.codes));
#pragma GCC unroll 2
    for (int part = 0; part < kKernel.units; ++part) {
      const int64_t unit = group * kKernel.units + part;
      Sums<kRows * kKernel.planes> planes = {};
      add_lines<kKernel, kLines>(codes, kLines * part, values, x, planes);
      Sums<kRows> sums;
      for (int row = 0; row < kRows; ++row)
        for (int v = 0; v < kPanelVectors; ++v) {
          sums[row][v] = planes[row][v] + splat_int(start_of<kKernel.minimums>(x, row, unit));
          if constexpr (kKernel.planes == 2) sums[row][v] += planes[row + kRows][v] << 8;
        }
      add_unit<kKernel.minimums, kRows>(piece, unit, group, x, sums, totals);
    }
    codes += group_bytes(kKernel.expanded ? Codes::kByte : kKernel.codes);
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kPanelVectors; ++v) store(acc + row * kPanel + v * kLanes, totals[row][v]);
}

#if defined(__AMX_INT8__)

// As multiply, for 16 rows: tiles for the activations of a unit, for its codes, and for the sums of each plane.
template <Kernel kKernel>
void multiply_tile(const Piece& piece, const Int8Rows& x, float* acc) {
  constexpr int kRows = static_cast<int>(kTileRows);
  constexpr int64_t kUnit = kGroup / kKernel.units;
  static_assert(kPanelVectors == 1);
  const TileScope scope{{kTileRows, kTileBytes}, {kTileRows, kTileBytes}, {kTileRows, kUnit}, {kTileRows, kUnit},
                        {kUnit / 4, kTileBytes}};
  vf totals[kRows][kPanelVectors];
  for (int row = 0; row < kRows; ++row) totals[row][0] = load(acc + row * kPanel);
  for (int64_t unit = 0; unit < piece.groups * kKernel.units; ++unit) {
    alignas(64) Sums<kRows> sums = {}, upper = {};
    tiles_see_memory();
    _tile_loadd(4, piece.codes + unit * kUnit * kPanel, kTileBytes);
    if constexpr (kKernel.planes == 2) {
      _tile_zero(1);
      _tile_loadd(3, x.codes + x.plane_stride + unit * kUnit, x.code_stride);
      _tile_dpbsud(1, 3, 4);
      _tile_stored(1, upper, kTileBytes);
    }
    _tile_zero(0);
    _tile_loadd(2, x.codes + unit * kUnit, x.code_stride);
    _tile_dpbsud(0, 2, 4);
    _tile_stored(0, sums, kTileBytes);
    tiles_see_memory();
    for (int row = 0; row < kRows; ++row)
      sums[row][0] += (upper[row][0] << 8) + splat_int(start_of<kKernel.minimums>(x, row, unit));
    add_unit<kKernel.minimums, kRows>(piece, unit, unit / kKernel.units, x, sums, totals);
  }
  for (int row = 0; row < kRows; ++row) store(acc + row * kPanel, totals[row][0]);
}

#endif

// All rows of a block: by tiles and by kMostRows, then by what is left of 4, 2 and 1.
template <Kernel kKernel>
void multiply_rows(const Piece& piece, const Int8Rows& x, int64_t rows, float* acc) {
  int64_t row = 0;
  const auto take = [&]<int kRows>(std::integral_constant<int, kRows>) {
    for (; row + kRows <= rows; row += kRows)
      multiply<kKernel, kRows>(piece, rows_from(x, row), acc + row * kPanel);
  };
#if defined(__AMX_INT8__)
  if constexpr (kKernel.expanded)
    for (; row + kTileRows <= rows; row += kTileRows)
      multiply_tile<kKernel>(piece, rows_from(x, row), acc + row * kPanel);
#endif
  // Codes of 8 bits need twice the registers where they are taken as two.
  constexpr int kMost = kMostRows / kKernel.planes / (!kDotFour && kKernel.codes == Codes::kByte ? 2 : 1);
  if constexpr (kMost >= 8) take(std::integral_constant<int, 8>{});
  if constexpr (kMost >= 4) take(std::integral_constant<int, 4>{});
  if constexpr (kMost >= 2) take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

using MultiplyRows = void (*)(const Piece&, const Int8Rows&, int64_t, float*);

template <bool kExpanded, int kPlanes>
MultiplyRows choose_codes(const PackedLinear& weight) {
  const auto by_minimums = [&]<Codes kCodes, int kUnits>() -> MultiplyRows {
    return weight.has_minimums ? &multiply_rows<Kernel{kCodes, kExpanded, kUnits, true, kPlanes}>
                               : &multiply_rows<Kernel{kCodes, kExpanded, kUnits, false, kPlanes}>;
  };
  switch (weight.codes) {
    case Codes::kNibble:
      return weight.unit() == kGroup ? by_minimums.template operator()<Codes::kNibble, 1>()
                                     : by_minimums.template operator()<Codes::kNibble, 2>();
    case Codes::kFive:
      return by_minimums.template operator()<Codes::kFive, 1>();
    case Codes::kSix:
      return &multiply_rows<Kernel{Codes::kSix, kExpanded, 2, false, kPlanes}>;
    default:
      return by_minimums.template operator()<Codes::kByte, 1>();
  }
}

MultiplyRows choose(const PackedLinear& weight, bool expanded) {
  if (weight.activations == Activations::kInt16)
    return expanded ? choose_codes<true, 2>(weight) : choose_codes<false, 2>(weight);
  return expanded ? choose_codes<true, 1>(weight) : choose_codes<false, 1>(weight);
}

// A block of rows times one panel, piece by piece.
void multiply_block(const LinearCall& call, const Int8Rows& x, int64_t panel, int64_t first, int64_t last,
                    MultiplyRows kernel) {
  alignas(64) float acc[kRowBlock * kPanel], scales[kChunkUnits * kPanel], minimums[kChunkUnits * kPanel];
  alignas(64) uint8_t codes[kChunk * kPanel];
  const PackedLinear& weight = *call.weight;
  const bool expanded = !takes_few(*call.weight, call.x.rows);
  const int64_t rows = last - first, unit = weight.unit();
  std::fill(acc, acc + rows * kPanel, 0.0f);
  for (int64_t column = 0; column < weight.columns; column += kChunk) {
    const int64_t count = std::min(kChunk, weight.columns - column), groups = count / kGroup;
    expand_scales(weight, panel, column / unit, count / unit, scales, minimums);
    const uint8_t* from = weight.panel_codes(panel) + column / kGroup * group_bytes(weight.codes);
    if (!expanded) prefetch(weight.panel_scales(panel + 1) + weight.scale_bytes * column / weight.columns,
                            weight.scale_bytes * count / weight.columns);
    if (expanded) expand_codes(weight, panel, column / kGroup, groups, codes);
    const Piece piece{expanded ? codes : from, groups, scales, minimums};
    kernel(piece, from_column(rows_from(x, first), column, unit), rows, acc);
  }
  finish(call, panel, 1, first, rows, acc);
}

}  // namespace

void linear_int8(const LinearCall& call, Pool& pool) {
  const Int8Rows x = quantize_rows_of(call, pool);
  const MultiplyRows kernel = choose(*call.weight, !takes_few(*call.weight, call.x.rows));
  for_each_block(call, pool, [&](int64_t panel, int64_t first, int64_t last) {
    multiply_block(call, x, panel, first, last, kernel);
  });
}

}  // namespace cardan_native
