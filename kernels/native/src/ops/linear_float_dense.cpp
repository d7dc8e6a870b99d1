// Many rows of float activations times dense weights widened to float32, summed in the order of the inner elements
// whatever the number of rows.

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "ops/linear_blocks.h"
#include "ops/linear_expand.h"
#include "ops/linear_float.h"
#include "ops/linear_lines.h"

namespace cardan_native {
namespace {

// Rows whose products share a row of weights in registers, so that there are about twelve sums.
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;

// Up to so many tiles, bfloat16 is widened in registers, anew for each. That takes some of them, so tiles are lower.
constexpr int64_t kFewTiles = 8;
constexpr int64_t kPairRows = kLanes == 8 ? 5 : kTileRows;

// Inner elements of a piece: 12 or 16 KiB of weights, with which a tile fits the first-level cache.
template <class T>
constexpr int64_t kMostInner = std::is_same_v<T, bf16> ? 384 : 256;

template <int kRows>
using Totals = vf[kRows][kPanelVectors];

// Adds the products of one inner element.
template <int kRows>
[[gnu::always_inline]] inline void add(const vf (&weight)[kPanelVectors], const float* x, Totals<kRows>& totals) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    const vf value = splat(x[row]);
    for (int v = 0; v < kPanelVectors; ++v) totals[row][v] = fused(weight[v], value, totals[row][v]);
  }
}

// Adds those of two. Pairs are loaded once for each half of them: there are too few registers to keep them.
template <int kRows>
[[gnu::always_inline]] inline void add_pair(const bf16* pairs, const float* x, bool both, Totals<kRows>& totals) {
  vf weight[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) weight[v] = load_pair(pairs + v * kLanes * 2).even;
  add<kRows>(weight, x, totals);
  if (!both) return;
  __asm__("" : "+r"(pairs));  // or the compiler keeps them
  for (int v = 0; v < kPanelVectors; ++v) weight[v] = load_pair(pairs + v * kLanes * 2).odd;
  add<kRows>(weight, x + kRows, totals);
}

// acc[kRows][16] += a tile times a piece of a panel, which is float32, or pairs of bfloat16 that are widened here.
template <class T, int kRows>
[[gnu::noinline]] void multiply(const T* panel, int64_t count, const float* x, float* acc) {
  Totals<kRows> totals;
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kPanelVectors; ++v) totals[row][v] = load(acc + row * kPanel + v * kLanes);
  int64_t at = 0;
  if constexpr (std::is_same_v<T, bf16>) {
#pragma GCC unroll 2
    for (; at + 2 <= count; at += 2, x += 2 * kRows) add_pair<kRows>(panel + at * kPanel, x, true, totals);
    if (at < count) add_pair<kRows>(panel + at * kPanel, x, false, totals);
  } else {
#pragma GCC unroll 4
    for (; at < count; ++at, x += kRows) {
      vf weight[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) weight[v] = load(panel + at * kPanel + v * kLanes);
      add<kRows>(weight, x, totals);
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kPanelVectors; ++v) store(acc + row * kPanel + v * kLanes, totals[row][v]);
}

// The kernel for a tile of one row, of two, and so on.
template <class T>
using Kernels = std::array<void (*)(const T*, int64_t, const float*, float*), kTileRows>;

template <class T, int... kRows>
constexpr Kernels<T> kernels_of(std::integer_sequence<int, kRows...>) {
  return {&multiply<T, kRows + 1>...};
}

// Where a piece of a panel stands, widened to float32 unless it is that, or pairs that are widened later.
template <class T>
const T* piece_of(const PackedLinear& weight, int64_t panel, int64_t column, int64_t count, float* widened) {
  if (std::is_same_v<T, bf16> || weight.codes == Codes::kF32)
    return reinterpret_cast<const T*>(weight.panel_codes(panel)) + column * kPanel;
  expand_dense(weight, panel, column, count, widened);
  return reinterpret_cast<const T*>(widened);
}

template <class T>
void multiply_block(const LinearCall& call, const float* x, const Tiles& tiles, const Block& block) {
  alignas(64) float acc[kBlockPanels * kBlockRows * kPanel], widened[kMostInner<float> * kPanel];
  constexpr Kernels<T> kernels = kernels_of<T>(std::make_integer_sequence<int, kTileRows>{});
  const PackedLinear& weight = *call.weight;
  const int64_t step = inner_piece(weight.columns, kMostInner<T>), panel_sums = block.rows * kPanel;
  std::fill(acc, acc + block.panels * panel_sums, 0.0f);
  for (int64_t column = 0; column < weight.columns; column += step) {
    const int64_t count = std::min(step, weight.columns - column);
    for (int64_t panel = 0; panel < block.panels; ++panel) {
      const T* piece = piece_of<T>(weight, block.panel + panel, column, count, widened);
      for (int64_t tile = block.tile; tile < block.tile + block.tiles; ++tile) {
        const int64_t first = tiles.first(tile), height = tiles.height(tile);
        kernels[static_cast<size_t>(height - 1)](piece, count, x + first * weight.columns + height * column,
                                                 acc + panel * panel_sums + (first - block.row) * kPanel);
      }
    }
  }
  finish(call, block.panel, block.panels, block.row, block.rows, acc, panel_sums);
}

// Some columns of a row at a time are widened together, and laid side by side from there.
template <class T, int kRows>
void widen_tile(const Rows& x, int64_t first, float* to) {
  const T* rows[kRows];
  for (int row = 0; row < kRows; ++row) rows[row] = x.at<T>(first + row);
  int64_t column = 0;
  for (; column + kLanes <= x.width; column += kLanes) {
    alignas(64) float wide[kRows][kLanes];
    for (int row = 0; row < kRows; ++row) store(wide[row], load(rows[row] + column));
    for (int at = 0; at < kLanes; ++at, to += kRows)
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) to[row] = wide[row][at];
  }
  for (; column < x.width; ++column, to += kRows)
    for (int row = 0; row < kRows; ++row) to[row] = widen(rows[row][column]);
}

template <class T, int... kRows>
constexpr std::array<void (*)(const Rows&, int64_t, float*), kTileRows> wideners_of(
    std::integer_sequence<int, kRows...>) {
  return {&widen_tile<T, kRows + 1>...};
}

// Tiles follow each other; in a tile stand its rows side by side.
const float* widen_tiles_of(const LinearCall& call, const Tiles& tiles, Pool& pool) {
  const Rows& x = call.x;
  auto* to = reinterpret_cast<float*>(call.scratch);
  for_each_tile(tiles, x.width, pool, [&](int64_t tile) {
    const int64_t first = tiles.first(tile), height = tiles.height(tile);
    with_float(x.dtype, "linear", [&]<class T>(T) {
      constexpr auto kWideners = wideners_of<T>(std::make_integer_sequence<int, kTileRows>{});
      kWideners[static_cast<size_t>(height - 1)](x, first, to + first * x.width);
    });
  });
  return to;
}

}  // namespace

int64_t many_dense_bytes(const Rows& x) { return 4 * x.rows * x.width; }

void linear_many_dense(const LinearCall& call, Pool& pool) {
  const bool pairs = call.weight->codes == Codes::kBF16 && call.x.rows <= kFewTiles * kPairRows;
  const Tiles tiles(call.x.rows, pairs ? kPairRows : kTileRows);
  const float* x = widen_tiles_of(call, tiles, pool);
  for_each_tile_block(tiles, call.weight->panels(), pool, [&](const Block& block) {
    if (pairs)
      multiply_block<bf16>(call, x, tiles, block);
    else
      multiply_block<float>(call, x, tiles, block);
  });
}

}  // namespace cardan_native
