// Products of rows of bfloat16 with columns of it, on processors that multiply pairs: products are exact and sums
// float32, with numbers below the smallest normal one taken for 0.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd/bytes.h"

namespace cardan_native {

inline constexpr int64_t kStripColumns = 16;

// For each row, out = out * scale + row x columns; without scales, out = row x columns * factor. Columns stand in strips
// of 16, in whose lines of 64 bytes there is a pair of each column.
struct PairProduct {
  const bf16* rows;
  int64_t row_stride;
  const float* strips;  // [strips][strip_words]
  int64_t strip_words;
  int64_t pairs;  // of a row, 1 or more
  float* out;
  int64_t out_stride;
  const float* scales;  // of rows
  float factor;
};

namespace pairs {

inline constexpr int kMostRows = 6, kMostStrips = 4;  // whose sums leave registers for what is multiplied

template <int kRows, int kStrips, bool kScaled>
void multiply_block(const PairProduct& by) {
  __m512 sums[kRows][kStrips];
  for (int row = 0; row < kRows; ++row)
    for (int strip = 0; strip < kStrips; ++strip) {
      const float* out = by.out + row * by.out_stride + strip * kStripColumns;
      sums[row][strip] = kScaled ? (__m512)(load(out) * splat(by.scales[row])) : _mm512_setzero_ps();
    }
  const bf16 *rows = by.rows, *behind = rows + 2 * by.pairs;
  const float* lines = by.strips;
  do {  // a loop that might not run at all would have the sums in memory
    __m512bh columns[kStrips];
    for (int strip = 0; strip < kStrips; ++strip)
      std::memcpy(&columns[strip], lines + strip * by.strip_words, sizeof columns[strip]);
    for (int row = 0; row < kRows; ++row) {
      int32_t pair;
      std::memcpy(&pair, rows + row * by.row_stride, sizeof pair);
      for (int strip = 0; strip < kStrips; ++strip)
        sums[row][strip] = _mm512_dpbf16_ps(sums[row][strip], (__m512bh)_mm512_set1_epi32(pair), columns[strip]);
    }
    lines += kStripColumns;
  } while ((rows += 2) != behind);
  for (int row = 0; row < kRows; ++row)
    for (int strip = 0; strip < kStrips; ++strip) {
      const vf sum = (vf)sums[row][strip];
      store(by.out + row * by.out_stride + strip * kStripColumns, kScaled ? sum : sum * splat(by.factor));
    }
}

template <bool kScaled, int kStrips, int kRows = kMostRows>
void multiply_rows(const PairProduct& by, int64_t rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows)
      multiply_block<kRows, kStrips, kScaled>(by);
    else
      multiply_rows<kScaled, kStrips, kRows - 1>(by, rows);
  }
}

template <bool kScaled, int kStrips = kMostStrips>
void multiply_strips(const PairProduct& by, int64_t strips, int64_t rows) {
  if constexpr (kStrips > 0) {
    if (strips == kStrips)
      multiply_rows<kScaled, kStrips>(by, rows);
    else
      multiply_strips<kScaled, kStrips - 1>(by, strips, rows);
  }
}

}  // namespace pairs

// All of `rows` rows and `strips` strips.
template <bool kScaled>
void multiply_pairs(const PairProduct& all, int64_t strips, int64_t rows) {
  for (int64_t row = 0; row < rows; row += pairs::kMostRows)
    for (int64_t strip = 0; strip < strips; strip += pairs::kMostStrips) {
      PairProduct by = all;
      by.rows += row * by.row_stride;
      by.strips += strip * by.strip_words;
      by.out += row * by.out_stride + strip * kStripColumns;
      if constexpr (kScaled) by.scales += row;
      pairs::multiply_strips<kScaled>(by, std::min<int64_t>(pairs::kMostStrips, strips - strip),
                                      std::min<int64_t>(pairs::kMostRows, rows - row));
    }
}

}  // namespace cardan_native

#endif
