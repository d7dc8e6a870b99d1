// bfloat16 activations times dense bfloat16 weights, in pairs, where the processor has instructions for that: products
// are exact and sums float32, with numbers below the smallest normal one taken for 0.
//
// A row's result does not depend on the number of rows, but where there are tiles it changes from the number on from
// which they are used.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "ops/linear_call.h"
#include "ops/linear_choice.h"
#include "ops/linear_lines.h"
#include "ops/linear_tiles.h"

namespace cardan_native {

#if defined(__AVX512BF16__)

namespace {

constexpr int kMostRows = 8;  // whose sums are in registers together
constexpr int64_t kPairRow = 2 * kPanel;
constexpr int64_t kRowsCopied = 16;  // at a time: fewer are copied sooner than threads wake

// Rows copied one after the other, filled up with zeros: tiles are read whole.
struct PaddedRows {
  const bf16* data;
  int64_t stride;
};

int64_t padded_stride(int64_t width) { return (width + 31) / 32 * 32 + 32; }

int64_t padded_count(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

PaddedRows padded_rows_of(const LinearCall& call, Pool& pool) {
  const Rows& x = call.x;
  auto* data = reinterpret_cast<bf16*>(call.scratch);
  const int64_t stride = padded_stride(x.width);
  pool.parallel(padded_count(x.rows), kRowsCopied, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      bf16* to = data + row * stride;
      const int64_t width = row < x.rows ? x.width : 0;
      if (width) std::memcpy(to, x.at<bf16>(row), static_cast<size_t>(width) * 2);
      std::memset(static_cast<void*>(to + width), 0, static_cast<size_t>(stride - width) * 2);
    }
  });
  return {data, stride};
}

template <int kRows>
void multiply(const bf16* panel, int64_t pairs, const bf16* x, int64_t stride, float* acc) {
  __m512 sums[kRows];
  for (int row = 0; row < kRows; ++row) sums[row] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; ++pair, panel += kPairRow, x += 2) {
    __m512bh weight;
    std::memcpy(&weight, panel, sizeof weight);
    for (int row = 0; row < kRows; ++row) {
      int32_t bits;
      std::memcpy(&bits, x + row * stride, 4);
      sums[row] = _mm512_dpbf16_ps(sums[row], weight, (__m512bh)_mm512_set1_epi32(bits));
    }
  }
  for (int row = 0; row < kRows; ++row) _mm512_store_ps(acc + row * kPanel, sums[row]);
}

void multiply_rows(const bf16* panel, int64_t pairs, const PaddedRows& x, int64_t rows, float* acc) {
  int64_t row = 0;
  const auto take = [&]<int kRows>(std::integral_constant<int, kRows>) {
    for (; row + kRows <= rows; row += kRows)
      multiply<kRows>(panel, pairs, x.data + row * x.stride, x.stride, acc + row * kPanel);
  };
  take(std::integral_constant<int, kMostRows>{});
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

#if defined(__AMX_BF16__)

constexpr int64_t kTileColumns = 32;

// acc[16 * kTiles][16] = 16 * kTiles rows times a panel whose inner size is a multiple of 32. A tile of the panel is
// 1 KiB of it, as it lies; tile 4 holds activations, tile 5 weights.
template <int kTiles>
void multiply_tiles(const bf16* panel, int64_t columns, const bf16* x, int64_t stride, float* acc) {
  const int64_t bytes = stride * 2;
  const bf16* second = x + kTileRows * stride;
  const bf16* third = second + kTileRows * stride;
  const bf16* fourth = third + kTileRows * stride;
  _tile_zero(0);
  if constexpr (kTiles > 1) _tile_zero(1);
  if constexpr (kTiles > 2) _tile_zero(2);
  if constexpr (kTiles > 3) _tile_zero(3);
  tiles_see_memory();
  for (int64_t column = 0; column < columns; column += kTileColumns) {
    _tile_loadd(5, panel + column * kPanel, kTileBytes);
    _tile_loadd(4, x + column, bytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kTiles > 1) {
      _tile_loadd(6, second + column, bytes);
      _tile_dpbf16ps(1, 6, 5);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(4, third + column, bytes);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(6, fourth + column, bytes);
      _tile_dpbf16ps(3, 6, 5);
    }
  }
  constexpr int64_t kTileFloats = kTileRows * kPanel;
  _tile_stored(0, acc, kTileBytes);
  if constexpr (kTiles > 1) _tile_stored(1, acc + kTileFloats, kTileBytes);
  if constexpr (kTiles > 2) _tile_stored(2, acc + 2 * kTileFloats, kTileBytes);
  if constexpr (kTiles > 3) _tile_stored(3, acc + 3 * kTileFloats, kTileBytes);
  tiles_see_memory();
}

void multiply_tile_rows(const bf16* panel, int64_t columns, const PaddedRows& x, int64_t rows, float* acc) {
  const TileScope scope{{kTileRows, kTileBytes}, {kTileRows, kTileBytes}, {kTileRows, kTileBytes},
                        {kTileRows, kTileBytes}, {kTileRows, kTileBytes}, {kTileRows, kTileBytes},
                        {kTileRows, kTileBytes}};
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const bf16* from = x.data;
  const auto take = [&]<int kTiles>(std::integral_constant<int, kTiles>) {
    for (; tiles >= kTiles; tiles -= kTiles) {
      multiply_tiles<kTiles>(panel, columns, from, x.stride, acc);
      from += kTiles * kTileRows * x.stride;
      acc += kTiles * kTileRows * kPanel;
    }
  };
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

bool tiles_fit(const PackedLinear& weight) { return weight.columns % kTileColumns == 0; }

#else

bool tiles_fit(const PackedLinear&) { return false; }

void multiply_tile_rows(const bf16*, int64_t, const PaddedRows&, int64_t, float*) {}

#endif

}  // namespace

bool has_bf16_tiles(const PackedLinear& weight) { return weight.codes == Codes::kBF16 && tiles_fit(weight); }

bool takes_bf16_pairs(const PackedLinear& weight, DType x) { return weight.codes == Codes::kBF16 && x == DType::kBF16; }

int64_t bf16_rows_bytes(const Rows& x) { return padded_count(x.rows) * padded_stride(x.width) * 2; }

void linear_bf16_pairs(const LinearCall& call, Pool& pool) {
  const PaddedRows x = padded_rows_of(call, pool);
  const PackedLinear& weight = *call.weight;
  const bool tiles = has_bf16_tiles(weight) && takes_many(weight, call.x.rows);
  for_each_block(call, pool, [&](int64_t panel, int64_t first, int64_t last) {
    alignas(64) float acc[kRowBlock * kPanel];
    const auto* codes = reinterpret_cast<const bf16*>(weight.panel_codes(panel));
    const PaddedRows block{x.data + first * x.stride, x.stride};
    if (tiles)
      multiply_tile_rows(codes, weight.columns, block, last - first, acc);
    else
      multiply_rows(codes, (weight.columns + 1) / 2, block, last - first, acc);
    finish(call, panel, 1, first, last - first, acc);
  });
}

#else

bool has_bf16_tiles(const PackedLinear&) { return false; }

bool takes_bf16_pairs(const PackedLinear&, DType) { return false; }

int64_t bf16_rows_bytes(const Rows&) { return 0; }

void linear_bf16_pairs(const LinearCall&, Pool&) {}

#endif

}  // namespace cardan_native
