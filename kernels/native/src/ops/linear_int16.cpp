// Many rows of quantized activations times codes widened to int16, in pairs: that takes activations of int16 in one go,
// for which dot products of four bytes need two. Where the processor has none of those, it takes codes of 8 bits too.
//
// Sums of a unit fit 32 bits, so they are the same integers as those of `linear_int8`, and so are results.

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "ops/linear_blocks.h"
#include "ops/linear_call.h"
#include "ops/linear_expand.h"
#include "ops/linear_lines.h"
#include "ops/linear_rounding.h"

namespace cardan_native {

#if defined(__AVX2__) && !defined(__AMX_INT8__)

namespace {

// With 16 columns, twelve sums: as many rows where a vector has sixteen lanes, which leaves registers free; half as many
// where it has eight, with two vectors of codes, one of activations and a product beside them.
constexpr int kTileRows = 12 / kPanelVectors;
constexpr int64_t kMostInner = 640;  // of a piece: 20 KiB of codes, with which a tile fits the first-level cache
constexpr int64_t kMostUnits = kMostInner / 16;

// What a row's unit goes with: the scale of its codes; that times their sum, which minimums are multiplied by; and what
// sums of integers begin with, which takes the offset of the weight's codes off.
struct RowUnit {
  float scale, sum;
  int32_t start;
};

// Quantized rows. Tiles follow each other; in a tile stand four codes of each row, in the order 0, 2, 1, 3, as widening
// leaves those of the weight, then the next four of each; and a unit of each row, then the next.
struct Rounded {
  const int16_t* codes;
  const RowUnit* units;
};

// One piece of a panel, widened: codes, [inner / 4][2][16][2] of inner elements 0 and 2, then 1 and 3, of four, and for
// each unit scales and minimums, each [units][16].
struct Piece {
  const int16_t* codes;
  const float *scales, *minimums;
  int64_t units;
};

#if defined(__AVX512F__)
template <size_t... kWord>
vw lower_words(vw low, vw high, std::index_sequence<kWord...>) {
  constexpr int kOrder[] = {0, 2, 1, 3};
  return __builtin_shufflevector(low, high, static_cast<int>(2 * (kWord / 4 * 4 + kOrder[kWord % 4]))...);
}
#endif

// Two vectors of codes as int16, each four in the order 0, 2, 1, 3.
vw narrow_codes(vi low, vi high) {
#if defined(__AVX512F__)
  return lower_words((vw)low, (vw)high, std::make_index_sequence<2 * kLanes>());
#else
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)low, (__m256i)high), 0xd8);
  return (vw)_mm256_shufflehi_epi16(_mm256_shufflelo_epi16(packed, 0xd8), 0xd8);
#endif
}

// The sum of the vectors of one half of a group.
vi half_of(const vi (&all)[kGroupVectors], int half) {
  constexpr int kEach = kGroupVectors / 2;
  vi sum = all[half * kEach];
  for (int v = 1; v < kEach; ++v) sum += all[half * kEach + v];
  return sum;
}

// One row of a tile of `height`.
template <class T>
void round_row(const T* from, const PackedLinear& weight, int64_t height, int16_t* codes, RowUnit* units) {
  const bool whole = weight.unit() == kGroup;
  const float steps = steps_of(weight.activations);
  for (int64_t group = 0; group < weight.columns / kGroup; ++group, from += kGroup) {
    const RoundedGroup rounded = round_group(from, steps);
    const vi(&all)[kGroupVectors] = rounded.codes;
    for (int half = 0; half < kGroupVectors; half += 2) {
      const vw narrowed = narrow_codes(all[half], all[half + 1]);
      for (int four = 0; four < kLanes / 2; ++four, codes += 4 * height)
        std::memcpy(codes, reinterpret_cast<const int16_t*>(&narrowed) + 4 * four, 8);
    }
    const vi low = half_of(all, 0), high = half_of(all, 1);
    const int32_t sums[2] = {sum_lanes(whole ? low + high : low), whole ? 0 : sum_lanes(high)};
    for (int i = 0; i < (whole ? 1 : 2); ++i, units += height)
      *units = {rounded.scale, rounded.scale * static_cast<float>(sums[i]), offset_of(weight, sums[i])};
  }
}

int64_t code_bytes_of(const PackedLinear& weight, int64_t rows) { return 2 * rows * weight.columns; }

Rounded round_rows_of(const LinearCall& call, const Tiles& tiles, Pool& pool) {
  const PackedLinear& weight = *call.weight;
  const int64_t units_of_row = weight.columns / weight.unit();
  auto* codes = reinterpret_cast<int16_t*>(call.scratch);
  auto* units = reinterpret_cast<RowUnit*>(call.scratch + code_bytes_of(weight, call.x.rows));
  for_each_tile(tiles, call.x.width, pool, [&](int64_t tile) {
    const int64_t first = tiles.first(tile), height = tiles.height(tile);
    for (int64_t row = 0; row < height; ++row)
      with_float(call.x.dtype, "linear", [&]<class T>(T) {
        round_row(call.x.at<T>(first + row), weight, height, codes + first * weight.columns + 4 * row,
                  units + first * units_of_row + row);
      });
  });
  return {codes, units};
}

template <Codes kCodes>
void widen_groups(const uint8_t* group, int64_t count, int16_t* out) {
  for (int64_t i = 0; i < count; ++i, group += group_bytes(kCodes))
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step, out += 4 * kPanel) {
      const Line line = load_line<kCodes>(group, step);
      for (int v = 0; v < kPanelVectors; ++v) {
        const vw even = line.part[v] & 255, odd = line.part[v] >> 8;
        std::memcpy(out + v * kLanes * 2, &even, sizeof even);
        std::memcpy(out + 2 * kPanel + v * kLanes * 2, &odd, sizeof odd);
      }
    }
}

void widen_codes(const PackedLinear& weight, const uint8_t* groups, int64_t count, int16_t* out) {
  switch (weight.codes) {
    case Codes::kNibble:
      return widen_groups<Codes::kNibble>(groups, count, out);
    case Codes::kFive:
      return widen_groups<Codes::kFive>(groups, count, out);
    case Codes::kSix:
      return widen_groups<Codes::kSix>(groups, count, out);
    default:
      return widen_groups<Codes::kByte>(groups, count, out);
  }
}

// acc[kRows][16] += a tile times a piece of a panel. Each unit is scaled as `add_unit` does it.
template <bool kMinimums, int kUnit, int kRows>
[[gnu::noinline]] void multiply(const Piece& piece, const Rounded& x, float* acc) {
  const Piece from = piece;
  const int16_t *codes = from.codes, *values = x.codes;
  const RowUnit* row_units = x.units;
  for (int64_t unit = 0; unit < from.units; ++unit, row_units += kRows) {
    vi sums[kRows][kPanelVectors];
    for (int row = 0; row < kRows; ++row)
      for (vi& sum : sums[row]) sum = kMinimums ? vi{} : splat_int(row_units[row].start);
#pragma GCC unroll 16
    for (int pair = 0; pair < kUnit / 2; ++pair, codes += 2 * kPanel) {
      vw code[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) code[v] = load_words(codes + v * kLanes * 2);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const int16_t* at = values + pair / 2 * 4 * kRows + row * 4 + pair % 2 * 2;
        const vw value = broadcast_four(reinterpret_cast<const int8_t*>(at));
        for (int v = 0; v < kPanelVectors; ++v) {
          sums[row][v] = add_pairs(sums[row][v], code[v], value);
          pin(sums[row][v]);
        }
      }
    }
    values += kUnit * kRows;
    __asm__ volatile("" ::: "memory");  // or totals are kept in memory twice
    for (int row = 0; row < kRows; ++row) {
      const vf step = splat(row_units[row].scale), sum = splat(row_units[row].sum);
      for (int v = 0; v < kPanelVectors; ++v) {
        float* to = acc + row * kPanel + v * kLanes;
        const vf scale = load(from.scales + unit * kPanel + v * kLanes) * step;
        vf total = fused(__builtin_convertvector(sums[row][v], vf), scale, load(to));
        if constexpr (kMinimums) total = fused(load(from.minimums + unit * kPanel + v * kLanes), sum, total);
        store(to, total);
      }
    }
  }
}

// The kernel for a tile of one row, of two, and so on.
using Kernels = std::array<void (*)(const Piece&, const Rounded&, float*), kTileRows>;

template <bool kMinimums, int kUnit, int... kRows>
constexpr Kernels kernels_of(std::integer_sequence<int, kRows...>) {
  return {&multiply<kMinimums, kUnit, kRows + 1>...};
}

Kernels choose(const PackedLinear& weight) {
  constexpr std::make_integer_sequence<int, kTileRows> kHeights;
  if (weight.unit() < kGroup)
    return weight.has_minimums ? kernels_of<true, 16>(kHeights) : kernels_of<false, 16>(kHeights);
  return weight.has_minimums ? kernels_of<true, 32>(kHeights) : kernels_of<false, 32>(kHeights);
}

void multiply_block(const LinearCall& call, const Rounded& x, const Tiles& tiles, const Block& block) {
  alignas(64) float acc[kBlockPanels * kBlockRows * kPanel];
  alignas(64) float scales[kMostUnits * kPanel], minimums[kMostUnits * kPanel];
  alignas(64) int16_t codes[kMostInner * kPanel];
  const PackedLinear& weight = *call.weight;
  const Kernels kernels = choose(weight);
  const int64_t unit = weight.unit(), units_of_row = weight.columns / unit;
  const int64_t step = inner_piece(weight.columns, kMostInner), panel_sums = block.rows * kPanel;
  std::fill(acc, acc + block.panels * panel_sums, 0.0f);
  for (int64_t column = 0; column < weight.columns; column += step) {
    const int64_t count = std::min(step, weight.columns - column);
    for (int64_t panel = 0; panel < block.panels; ++panel) {
      expand_scales(weight, block.panel + panel, column / unit, count / unit, scales, minimums);
      const uint8_t* groups = weight.panel_codes(block.panel + panel) + column / kGroup * group_bytes(weight.codes);
      widen_codes(weight, groups, count / kGroup, codes);
      const Piece piece{codes, scales, minimums, count / unit};
      for (int64_t tile = block.tile; tile < block.tile + block.tiles; ++tile) {
        const int64_t first = tiles.first(tile), height = tiles.height(tile);
        const Rounded from{x.codes + first * weight.columns + height * column,
                           x.units + first * units_of_row + height * (column / unit)};
        kernels[static_cast<size_t>(height - 1)](piece, from,
                                                 acc + panel * panel_sums + (first - block.row) * kPanel);
      }
    }
  }
  finish(call, block.panel, block.panels, block.row, block.rows, acc, panel_sums);
}

}  // namespace

bool has_int16_pairs(const PackedLinear& weight) {
  return weight.activations == Activations::kInt16 ||
         (!kDotFour && weight.activations == Activations::kInt8 && weight.codes == Codes::kByte);
}

int64_t int16_rows_bytes(const PackedLinear& weight, int64_t rows) {
  return code_bytes_of(weight, rows) + rows * (weight.columns / weight.unit()) * static_cast<int64_t>(sizeof(RowUnit));
}

void linear_int16_pairs(const LinearCall& call, Pool& pool) {
  const Tiles tiles(call.x.rows, kTileRows);
  const Rounded x = round_rows_of(call, tiles, pool);
  for_each_tile_block(tiles, call.weight->panels(), pool,
                      [&](const Block& block) { multiply_block(call, x, tiles, block); });
}

#else

bool has_int16_pairs(const PackedLinear&) { return false; }

int64_t int16_rows_bytes(const PackedLinear&, int64_t) { return 0; }

void linear_int16_pairs(const LinearCall&, Pool&) {}

#endif

}  // namespace cardan_native
